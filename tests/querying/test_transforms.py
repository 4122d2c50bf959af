"""Elements of G: the group law, and that images, maps, masks, boxes and locations move together."""

import pytest
import torch

from uniquery.querying.transforms import SIZE_DIVISIBILITY, RandomTransform, Transform

ELEMENTS = [
    Transform(0, 0, 96, 128),
    Transform(0, 0, 96, 128, flip=True),
    Transform(32, 64, 64, 64),
    Transform(32, 64, 64, 64, flip=True),
    Transform(0, 0, 96, 128, angle=30.0),
    Transform(0, 0, 96, 128, scale=1.5),
    Transform(0, 0, 96, 128, flip=True, angle=50.0, scale=0.7),
    Transform(32, 0, 64, 96, flip=True, angle=20.0, scale=1.2),
]


def blob(x, y, height=96, width=128, sigma=3.0):
    ys, xs = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.exp(-((xs - x) ** 2 + (ys - y) ** 2) / (2 * sigma**2))[None]


@pytest.mark.parametrize("g", ELEMENTS)
def test_locations_follow_the_picture(g):
    x, y = g.left + g.width * 0.45, g.top + g.height * 0.6
    view = g.on_map(blob(x, y))[0]
    row, column = divmod(view.argmax().item(), g.width)
    (moved,) = g.on_locations(torch.tensor([[x, y]])).tolist()
    assert column + 0.5 == pytest.approx(moved[0], abs=1)
    assert row + 0.5 == pytest.approx(moved[1], abs=1)


@pytest.mark.parametrize("g", ELEMENTS)
def test_masks_and_locations_move_together(g):
    masks = torch.zeros(1, 96, 128, dtype=torch.bool)
    top, left = g.top + g.height // 2 - 8, g.left + g.width // 2 - 12
    masks[0, top : top + 16, left : left + 24] = True
    view = g.on_masks(masks)
    assert view.dtype == torch.bool
    rows, columns = view[0].any(1).nonzero(), view[0].any(0).nonzero()
    tight = torch.tensor([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()
    corners = g.on_locations(torch.tensor([[left + x, top + y] for x in (0.0, 24.0) for y in (0.0, 16.0)]))
    box = torch.cat([corners.amin(0), corners.amax(0)])
    assert (box - tight).abs().max() <= 1.5
    assert view.sum() == pytest.approx(16 * 24 * g.scale**2, rel=0.1)


@pytest.mark.parametrize("g", ELEMENTS)
def test_autocast_moves_nothing(g):
    picture = blob(g.left + 40, g.top + 30)
    with torch.autocast("cpu", torch.bfloat16):
        view, valid = g.on_map(picture, 1), g.valid(1)
    assert torch.equal(view, g.on_map(picture, 1))
    assert torch.equal(valid, g.valid(1))


def test_a_window_off_the_grid_of_a_map():
    g = Transform(32, 32, 64, 64)
    for act in (lambda: g.on_map(torch.zeros(1, 2, 2), 64), lambda: Transform(0, 0, 96, 98).valid(4)):
        with pytest.raises(ValueError, match="not on the grid"):
            act()


@pytest.mark.parametrize("g", [g for g in ELEMENTS if g.is_exact])
@pytest.mark.parametrize("stride", [4, 8, 16, 32])
def test_exact_elements_line_up_at_every_stride(g, stride):
    """Averaging cells and transforming commute: g(I) and g(f(I)) show the same."""
    image = torch.rand(3, 96, 128)
    pool = torch.nn.AvgPool2d(stride)
    torch.testing.assert_close(g.on_map(pool(image), stride), pool(g.on_map(image)))


@pytest.mark.parametrize("g", [ELEMENTS[4], ELEMENTS[6]])
def test_resampling_lines_up_across_strides(g):
    smooth = blob(60.0, 50.0, sigma=24.0)
    pool = torch.nn.AvgPool2d(8)
    valid = g.valid(8)
    difference = (g.on_map(pool(smooth), 8) - pool(g.on_map(smooth)))[0][valid]
    assert difference.abs().max() < 0.05


@pytest.mark.parametrize("g", [g for g in ELEMENTS if not (g.top or g.left) and (g.height, g.width) == (96, 128)])
def test_inverse_undoes(g):
    points = torch.rand(20, 2) * torch.tensor([128.0, 96.0])
    torch.testing.assert_close(g.inverse().on_locations(g.on_locations(points)), points, rtol=1e-4, atol=1e-3)
    identity = g.then(g.inverse())
    assert not identity.flip
    assert identity.angle == pytest.approx(0)
    assert identity.scale == pytest.approx(1)


@pytest.mark.parametrize("first", ELEMENTS)
@pytest.mark.parametrize(
    "second",
    [Transform(0, 0, 0, 0), Transform(0, 0, 0, 0, flip=True), Transform(0, 0, 0, 0, flip=True, angle=15.0, scale=1.3)],
)
def test_composition_is_one_element(first, second):
    second = Transform(0, 0, first.height, first.width, second.flip, second.angle, second.scale)
    points = torch.rand(20, 2) * torch.tensor([128.0, 96.0])
    torch.testing.assert_close(
        first.then(second).on_locations(points), second.on_locations(first.on_locations(points)), rtol=1e-4, atol=1e-3
    )


def test_crops_compose_exactly():
    image = torch.rand(2, 96, 128)
    for flip in (False, True):
        first = Transform(32, 0, 64, 96, flip=flip)
        second = Transform(0, 32, 32, 64, flip=True)
        assert torch.equal(first.then(second).on_map(image), second.on_map(first.on_map(image)))


def test_what_cannot_be_done_says_so():
    with pytest.raises(ValueError, match="has no inverse"):
        Transform(32, 0, 32, 32).inverse()
    with pytest.raises(ValueError, match="not one element"):
        Transform(0, 0, 96, 128, angle=10.0).then(Transform(32, 0, 32, 32))


def test_valid_region():
    assert Transform(0, 0, 32, 64, flip=True).valid().all()
    turned = Transform(0, 0, 64, 64, angle=45.0).valid()
    assert not turned[0, 0]
    assert turned[32, 32]
    small = Transform(0, 0, 64, 64, scale=0.5).valid()
    assert small.float().mean() == pytest.approx(0.25, abs=0.02)


def test_drawn_windows_are_on_the_grid_and_inside():
    group = RandomTransform(crop=(0.6, 1.0))
    generator = torch.Generator().manual_seed(0)
    sizes = [(200, 333), (64, 800), (96, 128)]
    shapes = set()
    for _ in range(50):
        for (height, width), g in zip(sizes, group.draw(sizes, generator), strict=True):
            assert all(v % SIZE_DIVISIBILITY == 0 for v in (g.top, g.left, g.height, g.width))
            assert g.top + g.height <= height
            assert g.left + g.width <= width
            shapes.add((g.height, g.width))
    assert len(shapes) > 5


@pytest.mark.parametrize("side", [64, 100, 128, 192, 250, 800])
def test_a_crop_keeps_the_smallest_fraction_at_least(side):
    """Rounding to the grid never cuts more than was allowed, unless the grid itself does not fit the side."""
    group = RandomTransform(crop=(0.6, 1.0))
    generator = torch.Generator().manual_seed(0)
    kept = {g.height for _ in range(60) for g in group.draw([(side, side)], generator)}
    assert all(0.6 * side <= height <= side and height % 32 == 0 for height in kept)
    assert len(kept) > 1 or side == 64


def test_a_flip_without_a_crop_takes_the_largest_window():
    (g,) = RandomTransform(flip=1.0, crop=None).draw([(100, 170)])
    assert (g.top, g.left, g.height, g.width, g.flip) == (0, 0, 96, 160, True)


def test_choose_takes_one_at_a_time():
    group = RandomTransform(flip=1.0, crop=(0.5, 0.5), rotate=(10, 20), scale=(2.0, 2.0), combine="choose")
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(60):
        (g,) = group.draw([(128, 128)], generator)
        active = (g.flip, g.height < 128, g.angle > 0, g.scale > 1)
        assert sum(active) == 1
        seen.add(active)
    assert len(seen) == 4


def test_draws_repeat_with_the_seed():
    group = RandomTransform(rotate=(0, 60), scale=(0.5, 2))
    draws = [group.draw([(128, 256)] * 3, torch.Generator().manual_seed(s)) for s in (3, 3, 4)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]


@pytest.mark.parametrize(
    "settings", [{"flip": 2}, {"crop": (0.5, 1.2)}, {"crop": (0, 1)}, {"scale": (2, 1)}, {"rotate": (9, 1)}]
)
def test_bad_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        RandomTransform(**settings)


def test_gradients_flow_through_maps():
    for g in ELEMENTS:
        x = torch.rand(2, 12, 16, requires_grad=True)
        g.on_map(x, 8).sum().backward()
        assert x.grad.abs().sum() > 0


def test_an_image_narrower_than_a_cell_stays_as_it_is():
    group = RandomTransform(flip=1.0, rotate=(10, 20))
    for g in group.draw([(20, 100), (100, 20)], torch.Generator().manual_seed(0)):
        assert g.is_exact
        assert not g.flip
