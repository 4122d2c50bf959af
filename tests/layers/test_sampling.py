import pytest
import torch
import torch.nn.functional as F

from uniquery.layers.sampling import sample_map, sample_masks, sample_products, valid_at


@pytest.fixture
def points():
    """Inside, and right at the edges."""
    inside = torch.rand(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.cat([inside, torch.tensor([[0.0, 0.0], [1, 1], [0, 1], [0.999, 0.001]], dtype=torch.float64)])


def by_grid_sample(features, points):
    """(P, D)."""
    return F.grid_sample(features[None], 2 * points[None, None] - 1, align_corners=False)[0, :, 0].T


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class TestMap:
    @pytest.mark.parametrize("shape", [(5, 7), (1, 1), (1, 6)])
    def test_equals_grid_sample(self, points, shape):
        features = random(3, *shape)
        torch.testing.assert_close(sample_map(features, points), by_grid_sample(features, points))

    def test_gradient(self, points):
        assert torch.autograd.gradcheck(lambda x: sample_map(x, points[:6]), random(2, 3, 4).requires_grad_())

    def test_half_precision_is_widened(self, points):
        assert sample_map(random(2, 3, 4).bfloat16(), points.float()).dtype == torch.float32


@pytest.mark.parametrize(("layers", "rows"), [(2, 1), (2, 9), (3, 0)], ids=["few rows", "many rows", "no row"])
def test_products_are_the_same_whichever_is_sampled(points, layers, rows):
    queries, features = random(layers, rows, 5), random(5, 6, 4)
    expected = (
        torch.stack([by_grid_sample((q @ features.flatten(1)).view(-1, 6, 4), points).T for q in queries])
        if rows
        else torch.zeros(layers, 0, len(points)).double()
    )
    torch.testing.assert_close(torch.stack(list(sample_products(queries, features, points))), expected)


@pytest.mark.parametrize("rows", [1, 9])
def test_products_are_not_rounded_under_autocast(points, rows):
    queries, features, points = (x.float() for x in (random(2, rows, 5), random(5, 6, 4), points))
    expected = list(sample_products(queries, features, points))
    with torch.autocast("cpu", torch.bfloat16):
        for product, exact in zip(sample_products(queries, features, points), expected, strict=True):
            assert torch.equal(product, exact)
            assert torch.is_autocast_enabled("cpu")  # for the caller, nothing changes


class TestMasks:
    def test_equal_the_float_way(self, points):
        masks = random(6, 9, 8) > 0
        expected = by_grid_sample(masks.double(), points).T
        torch.testing.assert_close(sample_masks(masks, points), expected)

    def test_no_mask(self, points):
        assert sample_masks(torch.zeros(0, 4, 4, dtype=torch.bool), points).shape == (0, len(points))


def test_known_if_all_neighbors_are():
    valid = torch.ones(4, 4, dtype=torch.bool)
    valid[:, 2:] = False
    x = torch.tensor([0.0, 0.1, 0.374, 0.376, 0.5, 0.9])  # the last valid cell's center is at 0.375
    points = torch.stack([x, torch.full_like(x, 0.5)], dim=1)
    assert valid_at(valid, points).tolist() == [True, True, True, False, False, False]
