from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from uniquery.masks import rle
from uniquery.masks.geometry import mask_boxes
from uniquery.structures import (
    Assignment,
    Images,
    Instances,
    Outputs,
    PixelMap,
    Pixels,
    Queries,
    Targets,
    grid_locations,
)


@dataclass(frozen=True)
class LocatedQueries(Queries):
    locations: Tensor


@dataclass(frozen=True)
class ScoredOutputs(Outputs):
    scores: Tensor
    sizes: tuple[tuple[int, int], ...]


SETS = [
    Pixels(torch.rand(5, 4), torch.rand(5, 2)),
    Queries(torch.rand(5, 3), torch.arange(5), torch.arange(5) - 1),
    LocatedQueries(torch.rand(5, 3), torch.arange(5), torch.arange(5) - 1, torch.rand(5, 2)),
    Assignment(torch.arange(5), torch.arange(5) % 2, torch.arange(5)),
    Assignment(torch.arange(5), torch.arange(5) % 2, torch.arange(5), takes_part=torch.arange(5) > 1),
]
INDICES = [
    torch.tensor([True, False, True, False, False]),
    torch.tensor([4, 0, 0, 2]),
    torch.zeros(5, dtype=torch.bool),
    slice(1, 4),
]


@pytest.mark.parametrize("index", INDICES, ids=["flags", "numbers", "none", "slice"])
@pytest.mark.parametrize("structure", SETS, ids=lambda s: type(s).__name__)
def test_indexing_filters_every_field(structure, index):
    chosen = structure[index]
    assert type(chosen) is type(structure)
    for field in fields(structure):
        assert torch.equal(getattr(chosen, field.name), getattr(structure, field.name)[index])
    assert len(chosen) == len(torch.arange(5)[index])


@pytest.mark.parametrize("structure", SETS, ids=lambda s: type(s).__name__)
def test_joining_undoes_splitting(structure):
    joined = type(structure).cat([structure[:2], structure[2:2], structure[2:]])
    assert type(joined) is type(structure)
    for field in fields(structure):
        assert torch.equal(getattr(joined, field.name), getattr(structure, field.name))


@pytest.mark.parametrize("index", INDICES, ids=["flags", "numbers", "none", "slice"])
def test_indexing_targets_keeps_what_is_of_the_image(index):
    valid = torch.rand(4, 6) > 0.5
    targets = Targets(torch.arange(5), torch.rand(5, 4), torch.rand(5, 4, 6) > 0.5, 7, valid, torch.rand(5) > 0.5)
    chosen = targets[index]
    for name in ("labels", "boxes", "masks", "things"):
        assert torch.equal(getattr(chosen, name), getattr(targets, name)[index])
    assert chosen.image_id == 7
    assert chosen.valid is valid
    assert len(chosen) == len(chosen.labels)
    assert replace(targets, things=None)[index].things is None


def test_all_pairs_of_an_assignment_take_part_by_default():
    assert Assignment(torch.arange(3), torch.arange(3), torch.arange(3)).takes_part.tolist() == [True] * 3


def test_structures_move_with_all_they_hold():
    outputs = ScoredOutputs(PixelMap(torch.rand(2, 3, 4, 4), 8), torch.rand(2), ((9, 9), (8, 8)))
    moved = outputs.to("meta")
    assert moved.scores.device.type == "meta"
    assert moved.pixels.embeddings.device.type == "meta"
    assert (moved.pixels.stride, moved.sizes) == (8, ((9, 9), (8, 8)))
    assert outputs.scores.device.type == outputs.pixels.embeddings.device.type == "cpu"


def test_targets_and_images_move():
    targets = Targets(torch.arange(1), torch.rand(1, 4), torch.ones(1, 2, 2).bool(), 3, torch.ones(2, 2).bool())
    moved = targets.to("meta")
    assert {t.device.type for t in (moved.labels, moved.boxes, moved.masks, moved.valid)} == {"meta"}
    assert replace(targets, valid=None).to("meta").valid is None
    images = Images(torch.zeros(2, 3, 4, 4), ((4, 4), (3, 2))).to("meta")
    assert images.pixels.device.type == "meta"
    assert len(images) == 2


def test_structures_do_not_change():
    with pytest.raises(AttributeError):
        SETS[0].embeddings = torch.zeros(1)


def test_pixels_of_an_image_are_its_cells_row_by_row():
    pixel_map = PixelMap(torch.rand(2, 3, 4, 5), stride=8)
    pixels = pixel_map.of_image(1)
    assert len(pixels) == 20
    for y in range(4):
        for x in range(5):
            assert torch.equal(pixels.embeddings[5 * y + x], pixel_map.embeddings[1, :, y, x])
            assert pixels.locations[5 * y + x].tolist() == [8 * x + 4, 8 * y + 4]
    assert torch.equal(grid_locations(4, 5, 8), pixels.locations)


class TestInstances:
    @pytest.fixture
    def instances(self):
        self.bitmaps = torch.rand(4, 6, 9, generator=torch.Generator().manual_seed(0)) > 0.5
        rles = [rle.encode(bitmap.numpy().astype(np.uint8)) for bitmap in self.bitmaps]
        return Instances(torch.rand(4), torch.arange(4), torch.rand(4, 4), rles, (6, 9))

    def test_masks(self, instances):
        assert instances.masks.dtype == torch.bool
        assert torch.equal(instances.masks, self.bitmaps)

    @pytest.mark.parametrize(
        "index", [torch.tensor([True, False, False, True]), torch.tensor([3, 1]), torch.zeros(4, dtype=torch.bool)]
    )
    def test_indexing_filters_every_field(self, instances, index):
        chosen = instances[index]
        for name in ("scores", "labels", "boxes", "masks"):
            assert torch.equal(getattr(chosen, name), getattr(instances, name)[index])
        assert chosen.size == (6, 9)
        assert len(chosen) == len(chosen.rles) == len(instances.scores[index])

    def test_none(self, instances):
        none = instances[torch.zeros(0, dtype=torch.int64)]
        assert none.masks.shape == (0, 6, 9)
        assert none.masks.dtype == torch.bool


def test_boxes_of_no_mask_stay_on_the_device():
    assert mask_boxes(torch.zeros(0, 8, 8, dtype=torch.bool, device="meta")).device.type == "meta"
