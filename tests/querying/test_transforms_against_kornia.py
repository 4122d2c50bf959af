"""Transformations against kornia's, which were written by others."""

import pytest
import torch

from uniquery.querying import Transform

kornia = pytest.importorskip("kornia")
K = kornia.geometry.transform

SIZES = [(64, 64), (64, 96), (96, 32)]


def picture(height: int, width: int) -> torch.Tensor:
    return torch.rand(3, height, width, generator=torch.Generator().manual_seed(0))


def rotated_and_scaled(x: torch.Tensor, angle: float, scale: float) -> torch.Tensor:
    height, width = x.shape[-2:]
    center = torch.tensor([[(width - 1) / 2, (height - 1) / 2]])
    matrix = K.get_rotation_matrix2d(center, torch.tensor([angle]), torch.full((1, 2), scale))
    return K.warp_affine(x[None], matrix, (height, width), mode="bilinear", padding_mode="zeros", align_corners=True)[0]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_flip(height, width):
    x = picture(height, width)
    assert torch.equal(Transform(0, 0, height, width, flip=True).on_map(x), K.hflip(x))


@pytest.mark.parametrize("stride", [1, 4, 8, 32])
def test_crop(stride):
    g = Transform(32, 64, 64, 32)
    x = picture(128 // stride, 160 // stride)
    x0, y0, x1, y1 = (v // stride for v in (g.left, g.top, g.left + g.width, g.top + g.height))
    corners = torch.tensor([[[x0, y0], [x1 - 1, y0], [x1 - 1, y1 - 1], [x0, y1 - 1]]])
    assert torch.equal(g.on_map(x, stride), K.crop_by_indices(x[None], corners)[0])


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("angle", "scale"), [(20.0, 1.0), (60.0, 1.0), (0.0, 0.5), (0.0, 2.0), (-35.0, 1.3)])
def test_rotation_and_scaling(height, width, angle, scale):
    x = picture(height, width)
    ours = Transform(0, 0, height, width, angle=angle, scale=scale).on_map(x)
    torch.testing.assert_close(ours, rotated_and_scaled(x, angle, scale), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_locations_are_moved_by_the_same_matrix(height, width):
    g = Transform(0, 0, height, width, angle=25.0, scale=0.8)
    points = torch.rand(20, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([width, height])
    center = torch.tensor([[width / 2, height / 2]])
    matrix = K.get_rotation_matrix2d(center, torch.tensor([25.0]), torch.full((1, 2), 0.8))[0]
    torch.testing.assert_close(g.on_locations(points), points @ matrix[:, :2].T + matrix[:, 2], rtol=1e-5, atol=1e-4)


def test_mirrored_then_rotated():
    x = picture(64, 96)
    ours = Transform(0, 0, 64, 96, flip=True, angle=30.0, scale=1.2).on_map(x)
    torch.testing.assert_close(ours, rotated_and_scaled(K.hflip(x), 30.0, 1.2), rtol=0, atol=2e-5)
