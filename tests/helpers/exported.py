"""What the tests of exported models share: a description of a small model, and a comparison of predictions."""

from functools import cache

import torch
from hotcoco import mask as coco_mask

from helpers.small_segmenters import NUM_CLASSES, small
from uniquery.backbones import BackboneConfig
from uniquery.data.augment import TestSize
from uniquery.data.dataset import Category
from uniquery.export.onnx_file import to_onnx
from uniquery.masks import rle
from uniquery.querying import Segmenter
from uniquery.structures import Instances
from uniquery.weights.model_file import ModelInfo, Thresholds

THRESHOLDS = Thresholds(scores=(0.3, 0.5, 0.6), mask=0.4, rule="best-f1")


def info_of(model) -> ModelInfo:
    """The header of a small segmenter's file."""
    categories = tuple(Category(10 + i, f"class {i}", None) for i in range(NUM_CLASSES))
    backbone = BackboneConfig(name="tiny", weights="random")
    return ModelInfo(model.config, backbone, categories, TestSize(short=64, longest=96), thresholds=THRESHOLDS)


@cache
def small_onnx(name: str) -> tuple[Segmenter, bytes]:
    """A small segmenter and its ONNX file; an export takes many seconds, so tests share it."""
    model = small(name).eval()
    return model, to_onnx(model, info_of(model))


def assert_same(ours: Instances, theirs: Instances, *, scores: float = 1e-4, boxes: float = 1e-2) -> None:
    """The same instances, in the same order for each label, but for some pixels at the edge of a mask."""
    assert len(ours) == len(theirs)
    # Two of different labels whose scores are equal but for rounding may change places.
    ours, theirs = (one[one.labels.argsort(stable=True)] for one in (ours, theirs))
    torch.testing.assert_close(ours.scores, theirs.scores, atol=scores, rtol=0)
    assert ours.labels.tolist() == theirs.labels.tolist()
    torch.testing.assert_close(ours.boxes, theirs.boxes, atol=boxes, rtol=0)
    for a, b in zip(ours.rles, theirs.rles, strict=True):
        union = rle.area(coco_mask.merge([a, b]))
        both = rle.area(coco_mask.merge([a, b], intersect=True))
        assert union - both <= 0.01 * union + 1
