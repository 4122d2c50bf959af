import math

import pytest
import torch
from torch.autograd import gradcheck

from uniquery.layers.resize import aligned_bilinear, aligned_linear_matrix


def naive_sample(row, position):
    """The value of a row of cells at a fractional position, its last cell going on for ever."""
    left = math.floor(position)
    right, part = min(left + 1, len(row) - 1), position - left
    return row[left] * (1 - part) + row[right] * part


def naive_axis(row, factor):
    """Cell i of the finer row lies (i − factor // 2) / factor cells from the first, never before it."""
    return [naive_sample(row, max(i - factor // 2, 0) / factor) for i in range(factor * len(row))]


def naive_bilinear(image, factor):
    wide = [naive_axis(row, factor) for row in image]
    columns = [naive_axis(column, factor) for column in zip(*wide, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("factor", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [(1, 1), (1, 4), (3, 5), (6, 2)])
def test_equals_sampling_cell_by_cell(factor, size):
    torch.manual_seed(0)
    x = torch.rand(2, 3, *size, dtype=torch.float64)
    expected = [[naive_bilinear(channel, factor) for channel in image] for image in x.tolist()]
    torch.testing.assert_close(aligned_bilinear(x, factor), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_the_matrix_does_it_axis_by_axis(factor):
    torch.manual_seed(0)
    x = torch.rand(1, 1, 5, 7)
    rows, columns = aligned_linear_matrix(5, factor), aligned_linear_matrix(7, factor)
    assert rows.shape == (5, 5 * factor)
    torch.testing.assert_close(rows.T @ x[0, 0] @ columns, aligned_bilinear(x, factor)[0, 0])


def test_the_matrix_mixes_cells_without_gain():
    matrix = aligned_linear_matrix(9, 4)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(0), torch.ones(36))


def test_none_in_none_out():
    assert aligned_bilinear(torch.zeros(0, 1, 3, 4), 2).shape == (0, 1, 6, 8)


@pytest.mark.parametrize("factor", [2, 3])
def test_gradient(factor):
    torch.manual_seed(0)
    x = torch.rand(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda values: aligned_bilinear(values, factor), x)
