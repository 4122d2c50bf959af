"""Non-maximum suppression of boxes and masks.

Letters: N predictions, h × w the map of a mask.
"""

import torch
from torch import Tensor


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """(N, M) intersection over union of x0 y0 x1 y1 boxes."""
    overlap = (torch.minimum(a[:, None, 2:], b[:, 2:]) - torch.maximum(a[:, None, :2], b[:, :2])).clamp(min=0).prod(-1)
    area_a, area_b = (a[:, 2:] - a[:, :2]).prod(-1), (b[:, 2:] - b[:, :2]).prod(-1)
    return overlap / (area_a[:, None] + area_b - overlap)


def nms(boxes: Tensor, scores: Tensor, labels: Tensor, threshold: float) -> Tensor:
    """Class-wise greedy non-maximum suppression: indices of the kept boxes, best first.

    Greedy suppression is the fixed point of "kept unless a better kept box of its class overlaps it too much".
    Iterating that to convergence takes as many rounds as the longest chain of suppressions, with no loop over boxes.

    >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0, 1, 10, 11], [0, 2, 10, 12]])
    >>> nms(boxes, torch.tensor([0.5, 0.9, 0.8]), torch.zeros(3), 0.8)
    tensor([1])
    """
    order = scores.argsort(descending=True, stable=True)
    boxes, labels = boxes[order], labels[order]
    suppresses = (labels[:, None] == labels).triu(diagonal=1)  # [i, j]: i is better than j
    for start in range(0, len(boxes), 512):
        suppresses[start : start + 512] &= box_iou(boxes[start : start + 512], boxes) > threshold
    kept = torch.ones_like(order, dtype=torch.bool)
    while True:
        suppressed = (suppresses & kept[:, None]).any(0)
        if torch.equal(kept, ~suppressed):
            return order[kept]
        kept = ~suppressed


def matrix_nms(masks: Tensor, scores: Tensor, labels: Tensor, sigma: float) -> Tensor:
    """Soft suppression in one step (SOLOv2): scores decay with the overlap with better masks of their class.

    A better mask j multiplies the score of i by exp(−σ IoU(j, i)²) / exp(−σ IoU(j)²), where IoU(j) is the largest
    overlap of j with a mask better than itself: a mask that is itself suppressed suppresses others less. The smallest
    factor counts.

    Args:
        masks: (..., N, h, w) bool, best first.
        scores: (..., N) falling.
        labels: (..., N) classes; masks of different classes do not suppress each other.
        sigma: how sharply overlap lowers a score.

    Returns:
        (..., N) scores, no larger than before.

    >>> masks = torch.tensor([[[1, 1]], [[1, 1]], [[0, 1]]]).bool()
    >>> matrix_nms(masks, torch.ones(3), torch.tensor([0, 0, 1]), sigma=2.0)
    tensor([1.0000, 0.1353, 1.0000])
    """
    if scores.shape[-1] == 0:
        return scores
    pixels = masks.flatten(-2).float()
    overlap, area = pixels @ pixels.mT, pixels.sum(-1)
    iou = overlap / (area[..., :, None] + area[..., None, :] - overlap).clamp(min=1)  # 0 of empty masks
    is_better = (labels[..., :, None] == labels[..., None, :]).triu(diagonal=1)  # [j, i]: j is better than i
    iou = torch.where(is_better, iou, 0)
    largest_iou = iou.amax(-2)  # (..., N) with a better one
    decay = torch.exp(-sigma * (iou.square() - largest_iou.square()[..., :, None])).amin(-2)
    return scores * decay
