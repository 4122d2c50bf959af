"""From the outputs of an exported graph to instances at the size of the caller's image, as `predict` gives them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from uniquery.export.graphs import InstanceTensors, MaskFrame
from uniquery.masks import rle
from uniquery.masks.dct import paste_masks
from uniquery.masks.paste import encode_masks, encode_scored_masks, resize_matrix, rle_boxes, scale_boxes
from uniquery.structures import Instances

_FINITE_LOGITS = (1e-30, 1 - 2**-24)  # the probabilities next to 0 and 1: those have no finite logit


def paste_outputs(
    outputs: InstanceTensors,
    i: int,
    frame: MaskFrame,
    valid: tuple[int, int],
    size: tuple[int, int],
    mask_threshold: float,
) -> Instances:
    """The instances of one image of a batch.

    Args:
        outputs: what the graph gave.
        i: which image.
        frame: where the cells of the masks lie.
        valid: (height, width) of the image inside the padding.
        size: (height, width) of the result.
        mask_threshold: probability above which a pixel belongs to a mask.
    """
    found = outputs[0][i] > 0
    scores, labels, boxes, masks = (tensor[i][found] for tensor in outputs)
    boxes = boxes * boxes.new_tensor([size[1] / valid[1], size[0] / valid[0]] * 2)
    if frame.kind == "box":
        rles = paste_masks(masks > mask_threshold, boxes, size)
        kept = torch.tensor([rle.area(one) > 0 for one in rles], dtype=torch.bool)
        return Instances(scores, labels, scale_boxes(boxes, size, size), rles, size)[kept]
    rows, columns = (_matrix(n, frame, v, s) for n, v, s in zip(masks.shape[1:], valid, size, strict=True))
    if frame.scores_from_masks:
        scores = scores / _mean_inside(masks, mask_threshold)
        logits = masks.double().clamp(*_FINITE_LOGITS).logit().float()
        threshold = math.log(mask_threshold / (1 - mask_threshold))
        rles, mask_scores = encode_scored_masks(logits, rows, columns, threshold)
        scores = scores * mask_scores
    else:
        rles = encode_masks(masks, rows, columns, mask_threshold)
    boxes = rle_boxes(rles) if frame.boxes_from_masks else scale_boxes(boxes, size, size)
    order = scores.argsort(descending=True, stable=True)
    return Instances(scores, labels, boxes, rles, size)[order[(boxes[order, 2:] > boxes[order, :2]).all(1)]]


def _mean_inside(masks: Tensor, threshold: float) -> Tensor:
    """(N,) mean of (N, h, w) probabilities above the threshold; there is one in every mask."""
    inside = masks > threshold
    return (masks * inside).sum((1, 2)) / inside.sum((1, 2))


def _matrix(cells: int, frame: MaskFrame, valid: int, size: int) -> Tensor:
    """(cells, size): from cells to the valid pixels of the input, and on to the output; linear twice."""
    position = ((torch.arange(valid) - frame.offset) / frame.stride).clamp(0, cells - 1)
    to_input = (1 - (position - torch.arange(cells)[:, None]).abs()).clamp(min=0)
    return resize_matrix(to_input, size)
