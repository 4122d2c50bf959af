"""Matching and losses of segmenters that predict a set of boxes with their queries (SOLQ).

A class is a sigmoid of its own, and there is no class for no object. Boxes are (center x, center y, width, height) as
shares of the image, or (x0, y0, x1, y1) where a name says corners.

Letters: B images, N queries of an image, L decoder layers, C classes, D channels, V values of a mask vector, M matched
pairs, K instances of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uniquery.masks.losses import sigmoid_focal
from uniquery.parallel import loss_normalizer
from uniquery.segmenters.federated import drop_unlabeled_classes
from uniquery.segmenters.set_prediction import SetAssignment
from uniquery.structures import Outputs, Targets, at_least_float32, index_in_batch

_FOCAL_ALPHA, _FOCAL_GAMMA = 0.25, 2.0


@dataclass(frozen=True)
class BoxOutputs(Outputs):
    """What all decoder layers predict, from first to last.

    Attributes:
        logits: (L, B, N, C) class logits.
        boxes: (L, B, N, 4) as shares of the image, float32 or wider.
        embeddings: (L, B, N, D) queries.
        sizes: valid (height, width) of each image.
    """

    logits: Tensor
    boxes: Tensor
    embeddings: Tensor
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BoxCriterion:
    """SOLQ's matching and losses.

    Attributes:
        class_weight: weight of the class loss, also in matching.
        box_weight: weight of the boxes' L1 loss, also in matching.
        giou_weight: weight of the boxes' GIoU loss, also in matching.
        vector_weight: weight of the mask vectors' L1 loss.
    """

    class_weight: float
    box_weight: float
    giou_weight: float
    vector_weight: float

    def costs(self, outputs: BoxOutputs, targets: Sequence[Targets]) -> list[Tensor]:
        """(L, N, K) matching cost matrix of each image: the cost of each layer's queries for each instance."""
        return [self._image_costs(outputs, i, target) for i, target in enumerate(targets)]

    def _image_costs(self, outputs: BoxOutputs, i: int, target: Targets) -> Tensor:
        labels = target.labels.clamp(0, outputs.logits.shape[3] - 1)
        p = at_least_float32(outputs.logits[:, i, :, labels]).sigmoid()  # (L, N, K)
        positive = _FOCAL_ALPHA * (1 - p) ** _FOCAL_GAMMA * -(p + 1e-8).log()
        negative = (1 - _FOCAL_ALPHA) * p**_FOCAL_GAMMA * -(1 - p + 1e-8).log()
        predicted, boxes = outputs.boxes[:, i], _normalized_boxes(target, outputs.sizes[i]).to(outputs.boxes.dtype)
        distance = torch.cdist(predicted, boxes.expand(len(predicted), -1, -1), p=1)
        overlap = generalized_iou(to_corners(predicted)[:, :, None], to_corners(boxes))
        return self.class_weight * (positive - negative) + self.box_weight * distance - self.giou_weight * overlap

    def losses(
        self,
        outputs: BoxOutputs,
        targets: Sequence[Targets],
        assignment: SetAssignment,
        vectors: Tensor,
        target_vectors: Tensor,
    ) -> dict[str, Tensor]:
        """Those of the last layer by name; `loss_auxiliary` is the sum of those of all layers before it.

        Args:
            outputs: what all layers predict.
            targets: ground truth of each image.
            assignment: the matched pairs of each layer.
            vectors: (M, L, V) mask vectors of the matched queries.
            target_vectors: (ΣK, V) of all instances.
        """
        terms = {
            "loss_class": self.class_losses(outputs, targets, assignment),
            **self.box_losses(outputs, targets, assignment),
            "loss_vector": self.vector_losses(targets, assignment, vectors, target_vectors),
        }  # (L,) each
        last = {name: losses[-1] for name, losses in terms.items()}
        return last | {"loss_auxiliary": torch.stack(list(terms.values()))[:, :-1].sum()}

    def class_losses(self, outputs: BoxOutputs, targets: Sequence[Targets], assignment: SetAssignment) -> Tensor:
        """(L,): focal loss of all queries and classes, per instance."""
        logits = at_least_float32(outputs.logits)
        layer, image = _layers(outputs), assignment.image[:, None]
        labels = torch.cat([t.labels for t in targets])[index_in_batch(targets, image, assignment.layer_target)]
        is_class = torch.zeros_like(logits)
        is_class[layer, image, assignment.layer_query, labels] = 1
        losses = sigmoid_focal(logits, is_class, _FOCAL_ALPHA, _FOCAL_GAMMA)
        if any(t.valid is not None for t in targets):
            ignored = mostly_invalid_boxes(outputs, targets)
            ignored[layer, image, assignment.layer_query] = False
            losses = losses.masked_fill(ignored[..., None], 0)
        losses = drop_unlabeled_classes(losses, is_class, targets)
        return self.class_weight * losses.sum((1, 2, 3)) / _instances(losses, targets)

    def box_losses(
        self, outputs: BoxOutputs, targets: Sequence[Targets], assignment: SetAssignment
    ) -> dict[str, Tensor]:
        """(L,) each: L1 distance and 1 − GIoU of matched boxes, per instance."""
        image = assignment.image[:, None]
        matched = outputs.boxes[_layers(outputs), image, assignment.layer_query]  # (M, L, 4)
        boxes = torch.cat([_normalized_boxes(t, size) for t, size in zip(targets, outputs.sizes, strict=True)])
        owned = boxes.to(matched.dtype)[index_in_batch(targets, image, assignment.layer_target)]
        count = _instances(matched, targets)
        return {
            "loss_box": self.box_weight * (matched - owned).abs().sum((0, 2)) / count,
            "loss_giou": self.giou_weight
            * (1 - generalized_iou(to_corners(matched), to_corners(owned))).sum(0)
            / count,
        }

    def vector_losses(
        self, targets: Sequence[Targets], assignment: SetAssignment, vectors: Tensor, target_vectors: Tensor
    ) -> Tensor:
        """(L,): L1 distance of matched vectors, the mean over pairs and values.

        A vector describes a whole box, so an instance counts by the share of its box that is valid.
        """
        vectors = at_least_float32(vectors)
        owned = index_in_batch(targets, assignment.image[:, None], assignment.layer_target)  # (M, L)
        distance = (vectors - target_vectors[owned].to(vectors.dtype)).abs().mean(2)
        weight = torch.ones_like(distance)
        if any(t.valid is not None for t in targets):
            shares = [valid_share(t.boxes, t.valid) for t in targets]
            weight = torch.cat(shares).to(distance.dtype)[owned]
        return self.vector_weight * (distance * weight).sum(0) / loss_normalizer(weight.sum(0))


def _layers(outputs: BoxOutputs) -> Tensor:
    return torch.arange(len(outputs.logits), device=outputs.logits.device)


def _instances(like: Tensor, targets: Sequence[Targets]) -> Tensor:
    """The number of instances of the batch, at least one over all processes; see `loss_normalizer`."""
    return loss_normalizer(like.new_tensor(sum(len(t) for t in targets)))


def _normalized_boxes(target: Targets, size: tuple[int, int]) -> Tensor:
    """(K, 4) center and size of an image's boxes, as shares of its (height, width)."""
    corners = target.boxes / target.boxes.new_tensor([size[1], size[0]] * 2)
    return torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], dim=1)


def to_corners(boxes: Tensor) -> Tensor:
    """(..., 4) center and size → corners.

    >>> to_corners(torch.tensor([0.5, 0.5, 0.5, 1.0])).tolist()
    [0.25, 0.0, 0.75, 1.0]
    """
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], dim=-1)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU minus the share of the smallest box around both that neither covers (Rezatofighi et al., CVPR 2019).

    Args:
        a: (..., 4) corners.
        b: (..., 4) corners, broadcast with the first.

    Returns:
        (...) in −1..1.

    >>> generalized_iou(torch.tensor([0.0, 0.0, 2.0, 1.0]), torch.tensor([2.0, 0.0, 4.0, 2.0]))
    tensor(-0.2500)
    """
    tiny = torch.finfo(a.dtype).tiny
    intersection = _area(torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:]))
    union = _area(a[..., :2], a[..., 2:]) + _area(b[..., :2], b[..., 2:]) - intersection
    around = _area(torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:]))
    return intersection / union.clamp(min=tiny) - (around - union) / around.clamp(min=tiny)


def _area(start: Tensor, end: Tensor) -> Tensor:
    return (end - start).clamp(min=0).prod(-1)


@torch.no_grad()
def mostly_invalid_boxes(outputs: BoxOutputs, targets: Sequence[Targets]) -> Tensor:
    """(L, B, N) bool: which queries have more than half of their box, as far as it is on the image, invalid."""
    result = torch.zeros(outputs.boxes.shape[:3], dtype=torch.bool, device=outputs.boxes.device)
    for i, (target, (height, width)) in enumerate(zip(targets, outputs.sizes, strict=True)):
        if target.valid is not None:
            inside = target.valid[:height, :width]
            corners = to_corners(outputs.boxes[:, i]) * outputs.boxes.new_tensor([width, height] * 2)
            result[:, i] = valid_share(corners, inside) < 0.5
    return result


def valid_share(corners: Tensor, valid: Tensor | None) -> Tensor:
    """(...): the share of the pixels that a box touches which are valid; 1 for a box that touches none.

    Args:
        corners: (..., 4) in pixels.
        valid: (H, W) bool; None means that all are.

    >>> valid_share(torch.tensor([0.0, 0.0, 4.0, 1.0]), torch.tensor([[True, False, False, False]]))
    tensor(0.2500)
    """
    if valid is None:
        return torch.ones_like(corners[..., 0])
    height, width = valid.shape
    sums = torch.zeros(height + 1, width + 1, dtype=torch.int64, device=valid.device)
    sums[1:, 1:] = valid.cumsum(0).cumsum(1)
    x0, y0 = corners[..., 0].floor().long().clamp(0, width), corners[..., 1].floor().long().clamp(0, height)
    x1, y1 = corners[..., 2].ceil().long().clamp(0, width), corners[..., 3].ceil().long().clamp(0, height)
    inside = sums[y1, x1] - sums[y0, x1] - sums[y1, x0] + sums[y0, x0]
    area = ((x1 - x0) * (y1 - y0)).clamp(min=0)
    return torch.where(area > 0, inside / area.clamp(min=1), 1.0)
