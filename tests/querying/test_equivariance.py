"""L_equi alone, for a model that is not ours: a dot product and a binary cross-entropy."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from uniquery.masks.geometry import mask_boxes
from uniquery.querying import EquivarianceLoss, Transform, feature_equivariance, view_of
from uniquery.querying.equivariance import _inside_window
from uniquery.structures import Images, PixelMap, Queries, Targets

ELEMENTS = {
    "identity": Transform(0, 0, 64, 96),
    "flip": Transform(0, 0, 64, 96, flip=True),
    "crop": Transform(32, 32, 32, 64, flip=True),
    "rotation": Transform(0, 0, 64, 96, angle=25.0, scale=1.3),
}


def decode(queries, pixel_map):
    return torch.einsum("qd,qdhw->qhw", queries.embeddings, pixel_map.embeddings[queries.image])


def mask_loss(logits, queries, targets):
    """Mean over known cells at stride 8."""
    total = logits.new_zeros(())
    for x, image, target in zip(logits, queries.image.tolist(), queries.target.tolist(), strict=True):
        mask = targets[image].masks[target, ::8, ::8].to(x.dtype)
        valid = targets[image].valid
        known = torch.ones_like(mask) if valid is None else valid[::8, ::8].to(x.dtype)
        total = total + (F.binary_cross_entropy_with_logits(x, mask, reduction="none") * known).sum() / known.sum()
    return total / len(logits)


def case(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    masks = torch.zeros(2, 64, 96, dtype=torch.bool)
    masks[0, 20:60, 30:80] = True
    masks[1, 36:60, 50:90] = True
    targets = [Targets(torch.zeros(2, dtype=torch.int64), mask_boxes(masks), masks, 5)]
    images = Images(torch.randint(0, 256, (1, 3, 64, 96), generator=g, dtype=torch.uint8), ((64, 96),))
    features = torch.randn(1, 4, 8, 12, generator=g, dtype=dtype, requires_grad=True)
    embeddings = torch.randn(2, 4, generator=g, dtype=dtype, requires_grad=True)
    return images, targets, features, embeddings


@pytest.mark.parametrize("name", ["identity", "flip", "crop"])
def test_equals_indexing_by_hand(name):
    """Exact elements: cut and mirror features and masks with plain indices."""
    g = ELEMENTS[name]
    images, targets, features, embeddings = case()
    _, view_targets = view_of(images, targets, [g])
    queries = Queries(embeddings, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    loss = EquivarianceLoss(decode, mask_loss)(queries, view_targets, PixelMap(features, 8), [g])
    rows, columns = slice(g.top // 8, (g.top + g.height) // 8), slice(g.left // 8, (g.left + g.width) // 8)
    moved, masks = (
        features[0, :, rows, columns],
        targets[0].masks[:, g.top : g.top + g.height, g.left : g.left + g.width],
    )
    if g.flip:
        moved, masks = moved.flip(2), masks.flip(2)
    logits = torch.einsum("qd,dhw->qhw", embeddings, moved)
    wanted = F.binary_cross_entropy_with_logits(logits, masks[:, ::8, ::8].double())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    ours, by_hand = (torch.autograd.grad(x, (embeddings, features)) for x in (loss, wanted))
    for a, b in zip(ours, by_hand, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)
        assert a.abs().sum() > 0


@pytest.mark.parametrize("name", sorted(ELEMENTS))
def test_gradcheck(name):
    g = ELEMENTS[name]
    images, targets, features, embeddings = case()
    _, view_targets = view_of(images, targets, [g])
    owners = torch.zeros(2, dtype=torch.int64), torch.arange(2)

    def value(e, f):
        return EquivarianceLoss(decode, mask_loss)(Queries(e, *owners), view_targets, PixelMap(f, 8), [g])

    assert torch.autograd.gradcheck(value, (embeddings, features))


def test_out_of_frame_does_not_count():
    g = ELEMENTS["rotation"]
    images, targets, features, embeddings = case()
    _, view_targets = view_of(images, targets, [g])
    seen = []

    def watched(logits, queries, given):
        seen.extend(given)
        return mask_loss(logits, queries, given)

    queries = Queries(embeddings, torch.zeros(2, dtype=torch.int64), torch.arange(2))
    EquivarianceLoss(decode, watched)(queries, view_targets, PixelMap(features, 8), [g])
    assert torch.equal(seen[0].valid, g.valid())
    assert not seen[0].valid.all()


@pytest.mark.parametrize("name", sorted(ELEMENTS))
def test_an_ignore_region_moves_with_the_view(name):
    """What is not valid in the source is not valid in the view, beside what the view brings in from outside."""
    g = ELEMENTS[name]
    images, targets, features, embeddings = case()
    valid = torch.ones(64, 96, dtype=torch.bool)
    valid[36:52, 40:70] = False
    source = replace(targets[0], valid=valid)
    given = []

    def recorded(logits, queries, view_targets):
        given.extend(view_targets)
        return mask_loss(logits, queries, view_targets)

    _, (view,) = view_of(images, [source], [g])
    queries = Queries(embeddings, torch.zeros(len(view), dtype=torch.int64), torch.arange(len(view)))
    EquivarianceLoss(decode, recorded)(queries, [view], PixelMap(features, 8), [g])
    for target in (view, given[0]):
        for y, x in torch.randint(0, 32, (200, 2), generator=torch.Generator().manual_seed(1)).tolist():
            point = torch.tensor([[x + 0.5, y + 0.5]])
            if g.is_exact:
                source_x, source_y = (Transform(0, 0, g.height, g.width, g.flip).on_locations(point)[0]).tolist()
                assert target.valid[y, x] == valid[int(source_y) + g.top, int(source_x) + g.left]
        inside = g.on_masks(valid[None])[0] & g.valid()
        assert torch.equal(target.valid[: g.height, : g.width], inside)
        assert not target.valid.all()


def test_the_window_and_the_ignore_region_are_intersected():
    """A view beside a larger one is padded: valid for the base loss, not for L_equi, which has no features there."""
    small, large = Transform(0, 0, 32, 64), Transform(0, 0, 64, 96)
    images, targets, _, _ = case()
    valid = torch.ones(64, 96, dtype=torch.bool)
    valid[:, :10] = False
    source = replace(targets[0], valid=valid)
    pair = Images(images.pixels.expand(2, -1, -1, -1), images.sizes * 2)
    _, (view, _) = view_of(pair, [source, source], [small, large])
    assert view.valid[40:].all()
    inside = _inside_window(view, small).valid
    assert not inside[32:].any()
    assert not inside[:, 64:].any()
    assert not inside[:, :10].any()
    assert inside[:32, 10:64].all()


@pytest.mark.parametrize("name", sorted(ELEMENTS))
def test_feature_equivariance_is_a_mean_of_squares_over_what_is_shown(name):
    g = ELEMENTS[name]
    _, _, features, _ = case()
    view = torch.randn(1, 4, 8, 12, dtype=torch.float64, requires_grad=True)

    def value(v, f):
        return feature_equivariance(PixelMap(v, 8), PixelMap(f, 8), [g])

    moved = g.on_map(features[0], 8)
    squares = [
        (view[0, c, y, x] - moved[c, y, x]).item() ** 2 for c in range(4) for y, x in g.valid(8).nonzero().tolist()
    ]
    assert value(view, features).item() == pytest.approx(sum(squares) / len(squares), rel=1e-9)
    assert torch.autograd.gradcheck(value, (view, features))
