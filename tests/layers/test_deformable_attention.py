import math

import pytest
import torch
import torch.nn.functional as F

from uniquery.layers import deformable_attention_cpu
from uniquery.layers.deformable_attention import DeformableAttention, DeformableLayer, deformable_sum, token_centers
from uniquery.layers.deformable_sampling import sum_by_autograd

SHAPES = [(2, 3), (4, 5), (1, 1)]
TOKENS = sum(h * w for h, w in SHAPES)
IMAGES, HEADS, QUERIES, CHANNELS, POINTS = 2, 2, 5, 3, 2
BOTH = pytest.mark.parametrize("compute", [deformable_sum, sum_by_autograd], ids=["cpu", "any device"])


def inputs(seed=0, *, spread=3.0):
    """Values, x, y and logits in float64; points inside, at the edge of and far outside of each level."""
    generator = torch.Generator().manual_seed(seed)
    points = (IMAGES, HEADS, QUERIES, len(SHAPES) * POINTS)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = random(IMAGES, HEADS, TOKENS, CHANNELS)
    return [
        t.requires_grad_()
        for t in (values, 1 + spread * random(*points), 1 + spread * random(*points), random(*points))
    ]


def naive_value(level, x, y):
    """Bilinear value of a (height, width, D) level at x, y, by the four cells around it."""
    height, width, _ = level.shape
    left, top = math.floor(x), math.floor(y)
    total = torch.zeros_like(level[0, 0])
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        if 0 <= row < height and 0 <= column < width:
            total = total + (1 - abs(x - column)) * (1 - abs(y - row)) * level[row, column]
    return total


def naive_sum(values, x, y, logits):
    attention = logits.softmax(3)
    out = torch.zeros(IMAGES, HEADS, x.shape[2], CHANNELS, dtype=values.dtype)
    for i in range(IMAGES):
        for head in range(HEADS):
            start = 0
            for k, (h, w) in enumerate(SHAPES):
                level = values[i, head, start : start + h * w].view(h, w, -1)
                start += h * w
                for q in range(x.shape[2]):
                    for j in range(k * POINTS, (k + 1) * POINTS):
                        value = naive_value(level, x[i, head, q, j].item(), y[i, head, q, j].item())
                        out[i, head, q] += attention[i, head, q, j] * value
    return out


class TestSum:
    @BOTH
    def test_the_naive_way(self, compute):
        arguments = [t.detach() for t in inputs()]
        expected = naive_sum(*arguments)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(compute(*arguments, SHAPES), expected)

    @BOTH
    @pytest.mark.parametrize("seed", range(3))
    def test_gradients(self, compute, seed):
        assert torch.autograd.gradcheck(lambda *a: compute(*a, SHAPES), inputs(seed), eps=1e-7, atol=1e-5)

    def test_gradients_in_several_chunks(self, monkeypatch):
        whole = deformable_sum(*(first := inputs()), SHAPES)
        whole.square().sum().backward()
        monkeypatch.setattr(deformable_attention_cpu, "_SUMS_AT_ONCE", 3)
        parts = deformable_sum(*(second := inputs()), SHAPES)
        parts.square().sum().backward()
        assert torch.equal(whole, parts)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.grad, b.grad)

    @BOTH
    @pytest.mark.parametrize(("x", "y"), [(-1, 0), (0, -1), (5, 0), (0, 4), (-1e9, 1e9), (torch.inf, 0)])
    def test_zero_outside(self, compute, x, y):
        values, *points, logits = inputs()
        with torch.no_grad():
            points[0].fill_(x)
            points[1].fill_(y)
        out = compute(values, *points, logits, SHAPES)
        assert not out.any()
        out.sum().backward()
        assert not values.grad.any()
        if abs(x) > 5:  # at the very edge a step inwards would be felt
            assert not any(p.grad.any() for p in points)

    @BOTH
    def test_a_point_on_a_cell_reads_that_cell(self, compute):
        values = torch.arange(TOKENS, dtype=torch.float64).view(1, 1, TOKENS, 1)
        x, y = torch.tensor([[2.0, 4, 0], [0, 1, 0]]).double().view(2, 1, 1, 1, 3)
        logits = torch.tensor([-torch.inf, 0, -torch.inf]).double().view(1, 1, 1, 3)
        assert compute(values, x, y, logits, SHAPES).item() == 2 * 3 + 1 * 5 + 4

    @BOTH
    def test_not_a_number_stays_one(self, compute):
        """A diverged network must say so, not crash."""
        values, x, y, logits = inputs()
        with torch.no_grad():
            x[0, 0, 0, 0] = torch.nan
        out = compute(values, x, y, logits, SHAPES)
        assert out[0, 0, 0].isnan().all()
        assert out[1].isfinite().all()
        out.sum().backward()

    def test_half_precision_is_widened(self):
        arguments = [t.detach().bfloat16() for t in inputs()]
        out = deformable_sum(*arguments, SHAPES)
        assert out.dtype == torch.float32
        assert torch.equal(out, deformable_sum(*(t.float() for t in arguments), SHAPES))


def module(channels=8) -> DeformableAttention:
    torch.manual_seed(0)
    attention = DeformableAttention(channels, HEADS, len(SHAPES), POINTS).double()
    for parameter in attention.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
    return attention


def by_grid_sample(attention, queries, positions, reference, tokens, valid=None):
    """The same attention, by `F.grid_sample` level by level, as the original writes it."""
    images, count, channels = queries.shape
    values = attention.values(tokens)
    if valid is not None:
        values = values * valid[..., None]
    queries = queries + positions
    offsets = attention.offsets(queries).view(images, count, HEADS, len(SHAPES), POINTS, 2)
    weights = attention.attention(queries).view(images, count, HEADS, -1).softmax(3).unflatten(3, (len(SHAPES), POINTS))
    reference = reference.expand(images, -1, -1, -1).double()
    out = torch.zeros(images, count, HEADS, channels // HEADS, dtype=tokens.dtype)
    for k, (level, (h, w)) in enumerate(zip(values.split([h * w for h, w in SHAPES], dim=1), SHAPES, strict=True)):
        maps = level.unflatten(2, (HEADS, -1)).permute(0, 2, 3, 1).reshape(images * HEADS, -1, h, w)
        centers, sizes = reference[:, :, k, :2], reference[:, :, k, 2:]
        shares = (
            offsets[:, :, :, k] / POINTS * sizes[:, :, None, None] * 0.5
            if sizes.shape[-1]
            else offsets[:, :, :, k] / torch.tensor([w, h])
        )
        grid = 2 * (centers[:, :, None, None] + shares) - 1  # (B, Q, A, P, 2)
        read = F.grid_sample(maps, grid.transpose(1, 2).flatten(0, 1), align_corners=False)
        out += torch.einsum("badqp,bqap->bqad", read.unflatten(0, (images, HEADS)), weights[:, :, :, k])
    return attention.output(out.flatten(2))


class TestAttention:
    @pytest.fixture
    def tokens(self):
        return torch.randn(IMAGES, TOKENS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    @pytest.fixture
    def queries(self):
        return torch.randn(IMAGES, QUERIES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    @pytest.fixture(params=["for all images", "per image", "boxes", "boxes per image"])
    def reference(self, request):
        shape = (QUERIES, len(SHAPES), 4 if "boxes" in request.param else 2)
        shape = (IMAGES, *shape) if "per image" in request.param else shape
        return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 1.2 - 0.1

    def test_tokens_read_each_other(self, tokens):
        attention, positions, centers = module(), torch.randn(TOKENS, 8).double(), token_centers(SHAPES)
        out = attention(tokens, positions, centers, tokens, SHAPES)
        expected = by_grid_sample(attention, tokens, positions, centers, tokens)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)

    def test_queries_read_tokens(self, queries, reference, tokens):
        attention, positions = module(), torch.randn(QUERIES, 8).double()
        valid = torch.rand(IMAGES, TOKENS, generator=torch.Generator().manual_seed(4)) > 0.2
        out = attention(queries, positions, reference, tokens, SHAPES, valid)
        expected = by_grid_sample(attention, queries, positions, reference, tokens, valid)
        assert out.shape == (IMAGES, QUERIES, 8)
        torch.testing.assert_close(out, expected)

    def test_gradients_of_queries_points_and_tokens(self, queries, reference, tokens):
        attention, positions = module(), torch.zeros(1, dtype=torch.float64)
        assert torch.autograd.gradcheck(
            lambda q, r, t: attention(q, positions, r, t, SHAPES),
            [t.requires_grad_() for t in (queries, reference, tokens)],
            eps=1e-7,
            atol=1e-5,
            fast_mode=True,
        )

    def test_the_same_points_for_every_image(self, queries, tokens):
        attention = module()
        points = torch.rand(QUERIES, len(SHAPES), 2).double()
        shared = attention(queries, queries, points, tokens, SHAPES)
        assert torch.equal(shared, attention(queries, queries, points.expand(IMAGES, -1, -1, -1), tokens, SHAPES))

    def test_no_query(self, tokens):
        out = module()(tokens[:, :0], tokens[:, :0], torch.zeros(0, len(SHAPES), 2), tokens, SHAPES)
        assert out.shape == (IMAGES, 0, 8)

    def test_padding_is_not_read(self, tokens):
        attention, positions, centers = module(), torch.zeros(TOKENS, 8).double(), token_centers(SHAPES)
        valid = torch.rand(IMAGES, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.4
        out = attention(tokens, positions, centers, tokens, SHAPES, valid)
        expected = by_grid_sample(attention, tokens, positions, centers, tokens, valid)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        soiled = tokens + 9 * ~valid[..., None]
        other = attention(soiled, positions, centers, soiled, SHAPES, valid)
        assert torch.equal(other[valid], out[valid])
        assert not torch.allclose(attention(soiled, positions, centers, soiled, SHAPES)[valid], out[valid])

    def test_heads_start_in_directions_of_their_own(self):
        bias = DeformableAttention(32, 4, 2, 3).offsets.bias.view(4, 2, 3, 2)
        expected = torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
        for point in range(3):
            torch.testing.assert_close(bias[:, 1, point], expected * (point + 1), rtol=0, atol=1e-6)

    def test_a_layer_keeps_the_shape_and_reaches_every_parameter(self):
        layer = DeformableLayer(8, HEADS, len(SHAPES), 16)
        out = layer(torch.randn(IMAGES, TOKENS, 8), torch.randn(1, TOKENS, 8), token_centers(SHAPES), SHAPES)
        assert out.shape == (IMAGES, TOKENS, 8)
        out.square().sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())


def test_centers_of_one_level_are_its_cells():
    x, y = token_centers([(2, 3)])[:, 0].T
    assert (3 * x - 0.5).tolist() == pytest.approx([0, 1, 2, 0, 1, 2], abs=1e-6)
    assert (2 * y - 0.5).tolist() == pytest.approx([0, 0, 0, 1, 1, 1], abs=1e-6)
