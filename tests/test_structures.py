import json
import sys
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from uniquery.errors import UserError
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
    Assignment(torch.arange(5), torch.arange(5) % 2, torch.arange(5), has_query=torch.arange(5) > 1),
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
    assert Assignment(torch.arange(3), torch.arange(3), torch.arange(3)).has_query.tolist() == [True] * 3


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

    def test_one_instance_slices_and_iteration(self, instances):
        assert torch.equal(instances[2].scores, instances.scores[2:3])
        assert torch.equal(instances[-1].masks, instances.masks[3:])
        assert torch.equal(instances[1:3].labels, instances.labels[1:3])
        assert [one.labels.item() for one in instances] == [0, 1, 2, 3]
        assert all(len(one) == 1 and one.size == (6, 9) for one in instances)
        assert torch.equal(instances[::2].masks, instances.masks[::2])
        for index in (4, -5):
            with pytest.raises(IndexError):
                instances[index]

    def test_names(self, instances):
        assert instances.names == ["0", "1", "2", "3"]
        named = replace(instances, classes=("a", "b", "c", "d"))
        assert named.names == ["a", "b", "c", "d"]
        assert named[2:].names == ["c", "d"]
        with pytest.raises(UserError, match="classes has 2 names, but an instance has the label 3"):
            _ = replace(instances, classes=("a", "b")).names

    def test_coco_results(self, instances):
        results = instances.to_coco(image_id=5, category_ids=[10, None, 30, 40])
        assert [r["category_id"] for r in results] == [10, 30, 40]
        assert {r["image_id"] for r in results} == {5}
        x0, y0, x1, y1 = instances.boxes[2].tolist()
        assert results[1]["bbox"] == pytest.approx([x0, y0, x1 - x0, y1 - y0], abs=0.006)
        assert results[1]["score"] == instances.scores[2].item()
        assert json.loads(json.dumps(results[1]))["segmentation"] == instances.rles[2]
        own = replace(instances, category_ids=(1, 2, 3, 9))
        assert [r["category_id"] for r in own[2:].to_coco(0)] == [3, 9]
        assert own[:0].to_coco(0) == []
        with pytest.raises(UserError, match="needs category_ids"):
            instances.to_coco(image_id=5)

    def test_supervision_gets_every_field(self, instances, monkeypatch):
        fake = ModuleType("supervision")
        fake.Detections = SimpleNamespace
        monkeypatch.setitem(sys.modules, "supervision", fake)
        detections = replace(instances, classes=("a", "b", "c", "d"))[1:].to_supervision()
        assert np.array_equal(detections.xyxy, instances.boxes[1:].numpy())
        assert np.array_equal(detections.mask, self.bitmaps[1:].numpy())
        assert detections.mask.dtype == bool
        assert np.array_equal(detections.confidence, instances.scores[1:].numpy())
        assert np.array_equal(detections.class_id, [1, 2, 3])
        assert detections.data["class_name"].tolist() == ["b", "c", "d"]
        assert instances[:0].to_supervision().mask.shape == (0, 6, 9)

    def test_supervision_is_missing(self, instances, monkeypatch):
        monkeypatch.setitem(sys.modules, "supervision", None)
        with pytest.raises(UserError, match="pip install supervision"):
            instances.to_supervision()

    def test_drawing(self, instances):
        image = np.full((6, 9, 3), 100, np.uint8)
        picture = instances[:1].draw(image)
        assert np.array_equal((picture != image).any(axis=2), self.bitmaps[0].numpy())
        assert np.array_equal(instances[:1].draw(image, classes=["a"]), picture)
        with pytest.raises(UserError, match="classes has 1 names"):
            instances.draw(image, classes=["a"])
        with pytest.raises(UserError, match="The image is 9 × 6 pixels and the masks are 6 × 9"):
            instances.draw(np.zeros((9, 6, 3), np.uint8))


def test_boxes_of_no_mask_stay_on_the_device():
    assert mask_boxes(torch.zeros(0, 8, 8, dtype=torch.bool, device="meta")).device.type == "meta"
