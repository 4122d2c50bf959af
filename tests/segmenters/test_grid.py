import itertools

import pytest
import torch
import torch.nn.functional as F

from uniquery.masks.geometry import mask_boxes
from uniquery.segmenters.grid import assign_cells, coordinates, find_peaks, quarter_masks, quarter_valid
from uniquery.structures import Targets


class TestAssignCells:
    def test_both_ends_of_a_range_are_inside(self):
        mask = torch.zeros(1, 64, 64, dtype=torch.bool)
        mask[:, 10:26, 20:36] = True  # a side of 16
        target = Targets(torch.zeros(1, dtype=torch.int64), mask_boxes(mask), mask)
        for bounds, owned in (((16, 20), True), ((4, 16), True), ((16.1, 20), False), ((4, 15.9), False)):
            cells, _ = assign_cells(target, (64, 64), (4,), (bounds,), 0.2)
            assert bool(len(cells)) == owned

    def test_a_large_instance_owns_nine_cells_at_most(self):
        mask = torch.ones(1, 64, 64, dtype=torch.bool)
        target = Targets(torch.zeros(1, dtype=torch.int64), mask_boxes(mask), mask)
        cells, _ = assign_cells(target, (64, 64), (10,), ((0, 99),), 1.0)
        assert sorted(cells.tolist()) == [10 * row + column for row in (3, 4, 5) for column in (3, 4, 5)]

    def test_an_empty_mask_belongs_to_no_cell(self):
        masks = torch.zeros(2, 64, 64, dtype=torch.bool)
        masks[1, 20:40, 20:40] = True
        boxes = torch.tensor([[20.0, 20, 40, 40]] * 2)
        cells, owned = assign_cells(Targets(torch.zeros(2), boxes, masks), (64, 64), (8,), ((0, 99),), 0.2)
        assert set(owned.tolist()) == {1}
        assert len(cells)


class TestQuarter:
    def test_masks_are_resized_bilinearly(self):
        masks = torch.rand(6, 64, 96, generator=torch.Generator().manual_seed(0)) < 0.5
        resized = F.interpolate(masks[:, None].float(), scale_factor=0.25, mode="bilinear")[:, 0]
        assert (resized == 0.5).any()
        assert torch.equal(quarter_masks(masks), resized >= 0.5)

    def test_a_cell_is_valid_if_all_that_it_reads_is(self):
        valid = torch.rand(64, 96, generator=torch.Generator().manual_seed(0)) < 0.8
        target = Targets(torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 64, 96, dtype=torch.bool), valid=valid)
        for row, column in itertools.product(range(16), range(24)):
            pixels = valid[4 * row + 1 : 4 * row + 3, 4 * column + 1 : 4 * column + 3]
            assert quarter_valid(target)[row, column] == pixels.all()

    def test_everywhere_valid_by_default(self):
        target = Targets(torch.zeros(0), torch.zeros(0, 4), torch.zeros(0, 8, 12, dtype=torch.bool))
        assert quarter_valid(target).tolist() == [[True] * 3] * 2


def test_coordinates_of_a_column_and_a_row():
    xy = coordinates(torch.zeros(2, 5, 3, 2, dtype=torch.float64))
    assert xy.dtype == torch.float64
    assert xy[1].tolist() == [[[-1, 1]] * 3, [[-1, -1], [0, 0], [1, 1]]]


class TestPeaks:
    @pytest.mark.parametrize("seed", range(3))
    def test_equal_loops(self, seed):
        grids = (5, 3, 1)
        generator = torch.Generator().manual_seed(seed)
        scores = torch.randint(0, 6, (sum(s * s for s in grids), 2), generator=generator) / 6  # many ties
        ours, start = find_peaks(scores, grids).tolist(), 0
        for side in grids:
            for row, column, c in itertools.product(range(side), range(side), range(2)):
                own = scores[start + row * side + column, c]
                rivals = [
                    scores[start + y * side + x, c]
                    for y, x in ((row - 1, column), (row, column - 1), (row - 1, column - 1))
                    if min(y, x) >= 0
                ]
                assert ours[start + row * side + column][c] == all(own >= rival for rival in rivals)
            start += side * side
