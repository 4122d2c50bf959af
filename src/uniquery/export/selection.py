"""Selection in graphs whose batch and image sizes are not known: the k best, suppression, boxes of masks.

A graph has no lists of different lengths. Each image of a batch has k candidates, k being the most that any image has;
the others of an image have the score 0.

Letters: B images, N candidates of an image, C classes, k selected, h × w a map.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from uniquery.masks.suppression import nms


def select_best(scores: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """(B, k) best of (B, N) scores and their indices, best first; k is the most scores above 0 of an image.

    Args:
        scores: (B, N), 0 where there is no candidate.
        limit: largest k; the smallest is 1.
    """
    count = cast(int, (scores > 0).sum(1).amax(0).clamp(1, limit).item())
    torch._check(count >= 1)  # what a tracer cannot know
    torch._check(count <= scores.shape[1])
    best, index = scores.topk(count, dim=1)
    return best, index


def take(values: Tensor, index: Tensor) -> Tensor:
    """(B, k, ...) of (B, N, ...) values at (B, k) indices."""
    shape = (*index.shape, *values.shape[2:])
    return values.gather(1, index.view(*index.shape, *[1] * (values.ndim - 2)).expand(shape))


def mean_inside(probabilities: Tensor, inside: Tensor, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """(B, k) cells of each (B, k, h, w) mask, and the mean probability inside of it, 0 of an empty one."""
    area = inside.sum((2, 3))
    return area, (probabilities * inside).sum((2, 3)) / (area + eps).clamp(min=1.0 if eps == 0 else eps)


def boxes_of_masks(inside: Tensor, stride: int, sizes: Tensor) -> Tensor:
    """(B, k, 4) x0 y0 x1 y1 in pixels around (B, k, h, w) bool masks, clipped to the images; zeros of an empty one."""
    low, high = [], []
    for axis in (2, 3):  # the other axis
        is_used = inside.any(axis)  # (B, k, w), (B, k, h)
        cell = torch.arange(is_used.shape[2], device=inside.device)
        low.append(torch.where(is_used, cell, is_used.shape[2]).amin(2))
        high.append(torch.where(is_used, cell + 1, 0).amax(2))
    boxes = torch.stack([*low, *high], dim=2) * stride
    boxes = torch.where(inside.any(3).any(2)[..., None], boxes, 0)
    return clip_boxes(boxes.to(torch.float32), sizes)


def clip_boxes(boxes: Tensor, sizes: Tensor) -> Tensor:
    """(B, k, 4) boxes inside of images of (B, 2) height and width."""
    return torch.minimum(boxes.clamp(min=0), sizes.flip(1).repeat(1, 2)[:, None].to(boxes.dtype))


@torch.library.custom_op("uniquery::nms", mutates_args=())
def suppress(boxes: Tensor, class_scores: Tensor, threshold: float) -> Tensor:
    """(B, N) float: 1 for boxes that class-wise greedy suppression keeps, 0 for others and those of score 0.

    A custom operator, as ONNX has one for this, and torch has none.

    Args:
        boxes: (B, N, 4).
        class_scores: (B, C, N): each box has a score above 0 in one class at most.
        threshold: smallest IoU that suppresses.
    """
    kept = torch.zeros_like(class_scores[:, 0])
    for row, image_boxes, image_scores in zip(kept, boxes, class_scores, strict=True):
        scores, labels = image_scores.max(0)
        candidates = (scores > 0).nonzero().flatten()
        row[candidates[nms(image_boxes[candidates], scores[candidates], labels[candidates], threshold)]] = 1
    return kept


@suppress.register_fake
def _(boxes: Tensor, class_scores: Tensor, threshold: float) -> Tensor:  # noqa: ARG001 (the signature of the operator)
    return torch.empty_like(class_scores[:, 0])


def onnx_translations() -> dict[Any, Any]:
    """The operator above in terms of ONNX."""
    from onnxscript import opset18

    op: Any = opset18

    def onnx_suppress(boxes: Any, class_scores: Any, threshold: float) -> Any:
        best = op.ReduceMax(class_scores, op.Constant(value_ints=[1]), keepdims=0)  # (B, N)
        count = op.Shape(class_scores, start=2, end=3)
        selected = op.NonMaxSuppression(
            boxes,
            class_scores,
            count,
            op.Constant(value_floats=[threshold]),
            op.Constant(value_floats=[0.0]),
        )  # (number of kept boxes, 3): image, class, box
        index = op.Gather(selected, op.Constant(value_ints=[0, 2]), axis=1)
        zeros = op.Mul(best, op.Constant(value_float=0.0))
        ones = op.Expand(op.Constant(value_float=1.0), op.Shape(index, start=0, end=1))
        return op.ScatterND(zeros, index, ones)

    return {torch.ops.uniquery.nms.default: onnx_suppress}
