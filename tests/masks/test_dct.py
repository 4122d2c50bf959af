"""Masks as DCT vectors, against sums written out cell by cell."""

import math

import numpy as np
import pytest
import scipy.fft
import torch

from uniquery.masks import dct, rle
from uniquery.masks.dct import MaskVectors, crop_and_resize, dct_matrix, paste_masks, zigzag


def blobs(count: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    values = torch.randn(count, 1, 6, 7, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(values, size=(height, width), mode="bicubic")[:, 0] > 0


def naive_dct(square: np.ndarray) -> np.ndarray:
    """Σ over both axes of value × cosine × cosine, each frequency on its own."""
    size = len(square)
    result = np.zeros((size, size))
    for u in range(size):
        for v in range(size):
            total = 0.0
            for y in range(size):
                for x in range(size):
                    waves = (
                        math.cos(math.pi * (2 * y + 1) * u / (2 * size)),
                        math.cos(math.pi * (2 * x + 1) * v / (2 * size)),
                    )
                    total += square[y, x] * waves[0] * waves[1]
            scale = [math.sqrt((1 if k == 0 else 2) / size) for k in (u, v)]
            result[u, v] = total * scale[0] * scale[1]
    return result


def naive_zigzag(size: int) -> list[tuple[int, int]]:
    """A walk that turns at the edges."""
    row = column = 0
    cells, up = [], True
    while len(cells) < size * size:
        cells.append((row, column))
        if up and column == size - 1:
            row, up = row + 1, False
        elif up and row == 0:
            column, up = column + 1, False
        elif not up and row == size - 1:
            column, up = column + 1, True
        elif not up and column == 0:
            row, up = row + 1, True
        else:
            row, column = (row - 1, column + 1) if up else (row + 1, column - 1)
    return cells


def bilinear(mask: torch.Tensor, y: float, x: float) -> float:
    """ROIAlign's: zero more than a pixel outside, the nearest edge otherwise."""
    height, width = mask.shape
    if y < -1 or y > height or x < -1 or x > width:
        return 0.0
    y, x = min(max(y, 0.0), height - 1), min(max(x, 0.0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    fy, fx = y - top, x - left
    corners = [(top, left, (1 - fy) * (1 - fx)), (top, right, (1 - fy) * fx)]
    corners += [(bottom, left, fy * (1 - fx)), (bottom, right, fy * fx)]
    return sum(weight for row, column, weight in corners if mask[row, column])


def naive_roi_align(mask: torch.Tensor, box: list[float], size: int) -> torch.Tensor:
    x0, y0, x1, y1 = box
    rows, columns = math.ceil((y1 - y0) / size), math.ceil((x1 - x0) / size)  # samples of a cell
    cell_h, cell_w = (y1 - y0) / size, (x1 - x0) / size
    result = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        for j in range(size):
            samples = [
                bilinear(
                    mask,
                    y0 - 0.5 + i * cell_h + (a + 0.5) * cell_h / rows,
                    x0 - 0.5 + j * cell_w + (b + 0.5) * cell_w / columns,
                )
                for a in range(rows)
                for b in range(columns)
            ]
            result[i, j] = sum(samples) / len(samples)
    return result


def cropped(masks, boxes, size) -> torch.Tensor:
    result = torch.full((len(masks), size, size), -1.0)
    for rows, crops in crop_and_resize(masks, boxes, size):
        assert (result[rows] == -1).all()  # each mask once
        result[rows] = crops
    return result


def test_the_transform_is_the_sum_of_cosines():
    square = np.random.default_rng(0).random((6, 6))
    matrix = dct_matrix(6).numpy()
    np.testing.assert_allclose(matrix @ square @ matrix.T, naive_dct(square), atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 7, 128])
def test_the_transform_is_scipys(size):
    square = np.random.default_rng(0).random((size, size))
    matrix = dct_matrix(size).numpy()
    np.testing.assert_allclose(matrix @ square @ matrix.T, scipy.fft.dctn(square, norm="ortho"), atol=1e-12)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_zigzag_is_a_walk_that_turns_at_the_edges(size):
    walk = naive_zigzag(size)
    for length in (1, size, size * size):
        row, column = zigzag(size, length)
        assert list(zip(row.tolist(), column.tolist(), strict=True)) == walk[:length]


BOXES = [
    [3.0, 4.0, 17.0, 9.0],  # smaller than the square along one axis
    [0.0, 0.0, 40.0, 30.0],  # the whole image
    [2.25, 1.5, 37.75, 28.125],
    [11.3, 7.7, 12.1, 8.4],  # less than a pixel
    [36.0, 26.0, 40.0, 30.0],  # in the corner
    [-3.5, -2.0, 10.0, 12.5],  # beyond the image
    [30.0, 20.0, 45.5, 33.0],
]


@pytest.mark.parametrize("at_once", [2**22, 1500, 1])
def test_cropping_is_roi_align_sample_by_sample(monkeypatch, at_once):
    """Also with several windows padded to one size, and each alone."""
    monkeypatch.setattr(dct, "_PIXELS_AT_ONCE", at_once)
    masks = blobs(len(BOXES), 30, 40)
    result = cropped(masks, torch.tensor(BOXES), 8)
    for mask, box, crop in zip(masks, BOXES, result, strict=True):
        torch.testing.assert_close(crop.double(), naive_roi_align(mask, box, 8), rtol=1e-5, atol=1e-5)


def test_a_window_is_no_larger_than_it_needs_to_be(monkeypatch):
    """Hundreds of small instances of a large image never become one float tensor of its size."""
    monkeypatch.setattr(dct, "_PIXELS_AT_ONCE", 1000)
    masks = torch.ones(50, 400, 400, dtype=torch.bool)
    boxes = torch.tensor([[10.0 + i, 20.0, 25.0 + i, 35.0] for i in range(50)])
    sizes = [len(rows) for rows, _ in crop_and_resize(masks, boxes, 8)]
    assert sizes == [3] * 16 + [2]  # windows of 16 or 17 pixels a side: three make up to 867 pixels


@pytest.mark.parametrize("size", [16, 32])
def test_a_vector_is_the_transform_of_the_resized_mask(size):
    masks, boxes = blobs(len(BOXES), 30, 40), torch.tensor(BOXES)
    vectors = MaskVectors(size, 50).encode(masks, boxes)
    assert vectors.shape == (len(BOXES), 50)
    assert not vectors.requires_grad
    for crop, vector in zip(cropped(masks, boxes, size), vectors, strict=True):
        coefficients = scipy.fft.dctn((crop >= 0.5).numpy().astype(np.float64), norm="ortho")
        expected = [coefficients[cell] for cell in naive_zigzag(size)[:50]]
        np.testing.assert_allclose(vector.numpy(), expected, atol=1e-4)


def test_no_mask():
    vectors = MaskVectors(16, 20)
    assert vectors.encode(torch.zeros(0, 30, 40, dtype=torch.bool), torch.zeros(0, 4)).shape == (0, 20)
    assert vectors.decode(torch.zeros(0, 20)).shape == (0, 16, 16)
    assert paste_masks(torch.zeros(0, 16, 16, dtype=torch.bool), torch.zeros(0, 4), (30, 40)) == []


def test_decoding_inverts_encoding():
    """All coefficients give the square back; few give the inverse transform of these few."""
    masks, boxes = blobs(3, 30, 40), torch.tensor([[0.0, 0.0, 40.0, 30.0]]).expand(3, 4)
    square = (cropped(masks, boxes, 16) >= 0.5).float()
    every = MaskVectors(16, 256)
    torch.testing.assert_close(every.decode(every.encode(masks, boxes)), square, rtol=1e-4, atol=1e-4)
    few = MaskVectors(16, 40)
    for mask, decoded in zip(square, few.decode(few.encode(masks, boxes)), strict=True):
        coefficients = scipy.fft.dctn(mask.numpy().astype(np.float64), norm="ortho")
        kept = np.zeros_like(coefficients)
        for cell in naive_zigzag(16)[:40]:
            kept[cell] = coefficients[cell]
        np.testing.assert_allclose(decoded.numpy(), scipy.fft.idctn(kept, norm="ortho"), atol=1e-4)


def test_half_precision_stays_out():
    masks, boxes = blobs(4, 30, 40), torch.tensor(BOXES[:4])
    vectors = MaskVectors(16, 40)
    expected = vectors.encode(masks, boxes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(vectors.encode(masks, boxes), expected)
        decoded = vectors.decode(expected)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, vectors.decode(expected))
    assert vectors.decode(expected.double()).dtype == torch.float64


def test_masks_lie_above_the_middle_of_their_values():
    torch.manual_seed(0)
    vectors = MaskVectors(16, 40)
    predicted = torch.randn(5, 40) * torch.tensor([0.5, 1.0, 2.0, 5.0, 20.0])[:, None]
    for threshold in (0.3, 0.5, 0.8):
        for values, mask in zip(vectors.decode(predicted), vectors.masks(predicted, threshold), strict=True):
            low, high = values.min().item(), values.max().item()
            assert torch.equal(mask, values > low + threshold * (high - low))


def test_a_mask_that_fills_its_box_is_not_noise():
    """The middle of its values would be in the noise."""
    torch.manual_seed(0)
    vectors = MaskVectors(16, 40)
    full = torch.ones(1, 30, 40, dtype=torch.bool)
    predicted = vectors.encode(full, torch.tensor([[4.0, 3.0, 30.0, 20.0]])) + 0.1 * torch.randn(1, 40)
    assert vectors.masks(predicted, 0.5).all()
    assert not vectors.masks(predicted, 1 - 1e-12).all()


def test_the_original_s_length_keeps_most_of_a_mask():
    masks = blobs(6, 200, 240)
    boxes = torch.tensor([[0.0, 0.0, 240.0, 200.0]]).expand(6, 4)
    vectors = MaskVectors()
    square = cropped(masks, boxes, 128) >= 0.5
    found = vectors.masks(vectors.encode(masks, boxes), 0.5)
    iou = (found & square).sum((1, 2)) / (found | square).sum((1, 2))
    assert iou.min() > 0.95


def naive_paste(mask: torch.Tensor, box: list[float], size: tuple[int, int]) -> np.ndarray:
    """At each pixel's center, the bilinear value of the square, zero outside of it."""
    (height, width), side = size, len(mask)
    x0, y0, x1, y1 = box
    result = np.zeros(size, dtype=bool)
    for row in range(height):
        for column in range(width):
            y = (row + 0.5 - y0) / (y1 - y0) * side - 0.5
            x = (column + 0.5 - x0) / (x1 - x0) * side - 0.5
            value = 0.0
            for i in (math.floor(y), math.floor(y) + 1):
                for j in (math.floor(x), math.floor(x) + 1):
                    if 0 <= i < side and 0 <= j < side and mask[i, j]:
                        value += (1 - abs(y - i)) * (1 - abs(x - j))
            result[row, column] = value >= 0.5
    return result


def test_pasting_pixel_by_pixel():
    boxes = [
        [3.1, 4.2, 17.3, 9.4],
        [-5.3, -3.1, 46.2, 33.7],
        [2.2, 1.7, 12.4, 28.3],
        [33.1, 20.3, 55.2, 36.4],
        [11.27, 7.31, 13.13, 9.4],
    ]
    masks = blobs(len(boxes), 8, 8)
    masks[1] = True
    pasted = paste_masks(masks, torch.tensor(boxes), (30, 40))
    for mask, box, found in zip(masks, boxes, pasted, strict=True):
        assert (rle.decode(found).astype(bool) == naive_paste(mask, box, (30, 40))).all()
    assert sum(rle.area(found) > 0 for found in pasted) >= 4


@pytest.mark.parametrize("box", [[50.0, 5.0, 60.0, 9.0], [-20.0, 5.0, -4.0, 9.0], [5.0, 5.0, 5.0, 5.0]])
def test_a_box_outside_or_without_area_has_no_pixel(box):
    (found,) = paste_masks(torch.ones(1, 8, 8, dtype=torch.bool), torch.tensor([box]), (30, 40))
    assert rle.area(found) == 0
    assert found["size"] == [30, 40]


def test_a_mask_that_is_encoded_and_pasted_is_itself():
    mask = torch.zeros(1, 60, 80, dtype=torch.bool)
    mask[0, 10:50, 20:64] = True
    mask[0, 10:30, 20:40] = False
    box = torch.tensor([[20.0, 10.0, 64.0, 50.0]])
    vectors = MaskVectors(64, 2048)
    decoded = vectors.decode(vectors.encode(mask, box)) > 0.5
    (pasted,) = paste_masks(decoded, box, (60, 80))
    assert (rle.decode(pasted).astype(bool) != mask[0].numpy()).mean() < 0.01
