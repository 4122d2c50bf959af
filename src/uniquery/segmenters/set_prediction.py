"""Functions for segmenters that predict a set of queries (Mask2Former and its Hugging Face adapter).

Letters: B images, N queries of an image, L predictions (one per decoder layer, and one before the first), C classes,
D channels, M matched pairs, R matched queries of one image, K instances of an image, P points, h × w the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from uniquery.errors import DataError
from uniquery.layers.sampling import sample_map, sample_products
from uniquery.masks.losses import PointSampling, PointTargets, draw_points, point_losses
from uniquery.masks.paste import encode_scored_masks, rle_boxes
from uniquery.matching import mask_costs, match_all
from uniquery.parallel import all_reduce_mean, loss_normalizer
from uniquery.structures import (
    Assignment,
    Instances,
    Outputs,
    Queries,
    Targets,
    at_least_float32,
    index_in_batch,
    rows_by_image,
)

Extents = Sequence[tuple[float, float]]  # valid (height, width) of each image as fractions of the padded image


@dataclass(frozen=True)
class SetOutputs(Outputs):
    """What all decoder layers predict, from first to last.

    Attributes:
        logits: (L, B, N, C + 1) class logits, the last class is no object.
        embeddings: (L, B, N, D) mask embeddings.
        sizes: valid (height, width) of each image.
    """

    logits: Tensor
    embeddings: Tensor
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SetAssignment(Assignment):
    """The last layer's matching, and that of each layer: every layer matches as many pairs of an image.

    Attributes:
        layer_query: (M, L).
        layer_target: (M, L).
    """

    layer_query: Tensor
    layer_target: Tensor


@dataclass(frozen=True)
class PointCriterion:
    """Mask2Former's matching and losses: classes with no object, and masks compared at sampled points.

    Attributes:
        sampling: how many points, and which.
        class_weight: weight of the class loss, also in matching.
        mask_weight: weight of the masks' cross-entropy, also in matching.
        dice_weight: weight of the dice loss, also in matching.
        label_weights: C + 1 class weights, the last for no object.
    """

    sampling: PointSampling
    class_weight: float
    mask_weight: float
    dice_weight: float
    label_weights: tuple[float, ...]

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.label_weights) - 1

    def costs(self, outputs: SetOutputs, targets: Sequence[Targets], extents: Extents) -> list[Tensor]:
        """(L, N, K) matching cost matrix of each image: the cost of each layer's queries for each instance."""
        return [self._image_costs(outputs, i, *each) for i, each in enumerate(zip(targets, extents, strict=True))]

    def _image_costs(self, outputs: SetOutputs, i: int, target: Targets, extent: tuple[float, float]) -> Tensor:
        embeddings = outputs.pixels.embeddings[i]
        points = draw_points(self.sampling.points, extent, embeddings)
        sampled = PointTargets.sampled(target, points)
        labels = target.labels.clamp(0, self.num_classes - 1)
        with torch.autocast(embeddings.device.type, enabled=False):
            pixels = sample_map(embeddings, points)  # (P, D)
            costs = []
            for logits, queries in zip(outputs.logits[:, i], outputs.embeddings[:, i], strict=True):
                cross_entropy, dice = mask_costs(queries.to(pixels.dtype) @ pixels.T, sampled.values, sampled.valid)
                class_cost = -at_least_float32(logits).softmax(dim=1)[:, labels]
                costs.append(
                    self.class_weight * class_cost + self.mask_weight * cross_entropy + self.dice_weight * dice
                )
        return torch.stack(costs)

    def losses(
        self, outputs: SetOutputs, targets: Sequence[Targets], assignment: SetAssignment, extents: Extents
    ) -> dict[str, Tensor]:
        """Those of the last layer by name; `loss_auxiliary` is the sum of those of all layers before it."""
        class_losses = self.class_losses(outputs, targets, assignment)  # (L,)
        mask_losses, dice_losses = self.mask_losses(outputs, targets, assignment, extents)  # (L,) each
        return {
            "loss_class": class_losses[-1],
            "loss_mask": mask_losses[-1],
            "loss_dice": dice_losses[-1],
            "loss_auxiliary": (class_losses + mask_losses + dice_losses)[:-1].sum(),
        }

    def class_losses(self, outputs: SetOutputs, targets: Sequence[Targets], assignment: SetAssignment) -> Tensor:
        """(L,): cross-entropy over classes and no object."""
        logits = at_least_float32(outputs.logits)
        owned = index_in_batch(targets, assignment.image[:, None], assignment.layer_target)
        labels = torch.full(logits.shape[:3], self.num_classes, device=logits.device)  # (L, B, N)
        layer = torch.arange(len(logits), device=logits.device)
        labels[layer, assignment.image[:, None], assignment.layer_query] = torch.cat([t.labels for t in targets])[owned]
        label_weights = torch.tensor(self.label_weights).to(logits.device, logits.dtype, non_blocking=True)
        weights = label_weights[labels]
        ignored = mostly_invalid(outputs, targets)
        if ignored is not None:
            weights = weights.masked_fill(ignored & (labels == self.num_classes), 0)
        losses = F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(weights)
        total = all_reduce_mean(weights.sum((1, 2)))
        if ignored is not None:
            total = total.clamp(min=torch.finfo(total.dtype).tiny)  # if nothing counts
        return self.class_weight * ((losses * weights).sum((1, 2)) / total)

    def mask_losses(
        self, outputs: SetOutputs, targets: Sequence[Targets], assignment: SetAssignment, extents: Extents
    ) -> Tensor:
        """(2, L): cross-entropy and dice of the masks at sampled points, summed over matched queries, per instance."""
        count = loss_normalizer(at_least_float32(outputs.logits).new_tensor(sum(len(t) for t in targets)))
        if not len(assignment):  # keeps all parameters in the graph, for DDP
            return (outputs.pixels.embeddings.sum() + outputs.embeddings.sum()).mul(0).expand(2, len(outputs.logits))
        layer = torch.arange(len(outputs.logits), device=assignment.image.device)[:, None]
        total: Tensor | float = 0.0
        maps = outputs.pixels.embeddings.unbind()
        for i, rows in enumerate(rows_by_image(assignment.image, len(targets))[1]):
            if len(rows):
                points = draw_points(self.sampling.num_candidates, extents[i], maps[i])
                sampled = PointTargets.sampled(targets[i], points)
                queries = outputs.embeddings[layer, i, assignment.layer_query[rows].T]  # (L, R, D)
                logits = sample_products(queries, maps[i], points)
                owned = assignment.layer_target[rows].T
                per_layer = [point_losses(x, t, sampled, self.sampling) for x, t in zip(logits, owned, strict=True)]
                total = total + torch.stack(per_layer, dim=1).sum(2)  # (2, L)
        return self._weigh(total / count)

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        """`Segmenter.mask_loss`: both mask losses of given (Q, h, w) logits, on points of the whole padded image."""
        total = logits.sum() * 0
        for target, rows in zip(targets, rows_by_image(queries.image, len(targets))[1], strict=True):
            if len(rows):
                points = draw_points(self.sampling.num_candidates, (1.0, 1.0), logits)
                sampled = PointTargets.sampled(target, points)
                at_points = sample_map(logits[rows], points).T  # (R, P)
                total = total + self._weigh(point_losses(at_points, queries.target[rows], sampled, self.sampling)).sum()
        return total / loss_normalizer(total.new_tensor(len(queries)))

    def _weigh(self, terms: Tensor) -> Tensor:
        """(2, ...) cross-entropy and dice, each with its weight."""
        return torch.stack([self.mask_weight * terms[0], self.dice_weight * terms[1]])


@torch.no_grad()
def match_layers(costs: Sequence[Tensor], targets: Sequence[Targets], num_classes: int) -> SetAssignment:
    """Hungarian matching of every layer and image, with one transfer from the GPU.

    Args:
        costs: (L, N, K) matching costs of each image.
        targets: ground truth of each image.
        num_classes: number of classes of the model.

    Raises:
        DataError: a label is none of the model's.
    """
    joined = torch.cat(list(costs), dim=2)  # (L, N, ΣK)
    labels = torch.cat([t.labels for t in targets])
    table = torch.cat([joined.flatten(0, 1), labels[None].to(joined.dtype)]).cpu()
    check_labels(table[-1], num_classes)
    per_image = table[:-1].view(joined.shape).split([len(t) for t in targets], dim=2)
    matched = [match_all(image_costs.numpy()) for image_costs in per_image]  # (2, L, M of the image) each
    query, target = torch.cat(matched, dim=2).mT.to(joined.device)  # (M, L) each
    image = torch.arange(len(targets)).repeat_interleave(torch.tensor([m.shape[2] for m in matched])).to(joined.device)
    return SetAssignment(query[:, -1], image, target[:, -1], layer_query=query, layer_target=target)


@torch.no_grad()
def mostly_invalid(outputs: SetOutputs, targets: Sequence[Targets]) -> Tensor | None:
    """(L, B, N) bool: which queries have more than half of their mask, at 0.5 on the map, on invalid pixels.

    Returns:
        None if all pixels of all images are valid.
    """
    if all(t.valid is None for t in targets):
        return None
    result = torch.zeros(outputs.logits.shape[:3], dtype=torch.bool, device=outputs.logits.device)
    x, y = outputs.pixels.locations().long().T
    for i, target in enumerate(targets):
        if target.valid is not None:
            pixels = at_least_float32(outputs.pixels.embeddings[i]).flatten(1)  # (D, h · w)
            invalid = (~target.valid[y, x]).to(pixels.dtype)
            counted = torch.stack([invalid, torch.ones_like(invalid)], dim=1)
            with torch.autocast(pixels.device.type, enabled=False):  # cells are counted, which half precision cannot
                for layer, queries in enumerate(outputs.embeddings[:, i]):
                    masks = queries.to(pixels.dtype) @ pixels > 0
                    on_invalid, area = (masks.to(pixels.dtype) @ counted).T  # (N,) each
                    result[layer, i] = on_invalid > 0.5 * area
    return result


def check_labels(labels: Tensor, num_classes: int) -> None:
    """Raises a `DataError` unless all labels are classes of the model."""
    low, high = (int(labels.min()), int(labels.max())) if len(labels) else (0, 0)
    if not 0 <= low <= high < num_classes:
        raise DataError(
            f"Labels must be from 0 to {num_classes - 1}, as the model has {num_classes} classes; got {low} to {high}."
        )


def queries_with_targets(embeddings: Tensor, image: Tensor, query: Tensor, target: Tensor) -> Queries:
    """All of one layer's (B, N, D) queries, with the instances that some of them own.

    Args:
        embeddings: (B, N, D).
        image: (M,) index in the batch.
        query: (M,) index in 0..N.
        target: (M,) index in the image's targets.
    """
    images, count, _ = embeddings.shape
    owned = torch.full((images, count), -1, dtype=torch.int64, device=image.device)
    owned[image, query] = target
    query_image = torch.arange(images, device=image.device).repeat_interleave(count)
    return Queries(embeddings.flatten(0, 1), query_image, owned.flatten())


def queries_of_layers(embeddings: Tensor, assignment: SetAssignment) -> list[Queries]:
    """`queries_with_targets` of each of (L, B, N, D) layers."""
    pairs = zip(embeddings, assignment.layer_query.T, assignment.layer_target.T, strict=True)
    return [queries_with_targets(layer, assignment.image, query, target) for layer, query, target in pairs]


def best_instances(
    scores: Tensor,
    predict_masks: Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor]]],
    size: tuple[int, int],
    *,
    max_detections: int,
    logit_threshold: float,
) -> Instances:
    """The best pairs of query and class; a score is that of the class times the mask's mean probability.

    Args:
        scores: (N, C) class scores.
        predict_masks: (n,) queries → their (n, h, w) mask logits, and the two matrices that resize them to `size`.
        size: (height, width) of the output.
        max_detections: most pairs.
        logit_threshold: above it, a pixel belongs to the mask; masks are resized as logits.
    """
    best, pairs = scores.flatten().topk(min(max_detections, scores.numel()))
    query, labels = pairs // scores.shape[1], pairs % scores.shape[1]
    distinct, mask = query.unique(return_inverse=True)  # a query may be taken for several classes
    logits, matrices = predict_masks(distinct)
    rles, mask_scores = encode_scored_masks(logits, *matrices, logit_threshold)
    mask = mask.cpu()
    final = best.cpu() * mask_scores[mask]
    order = final.argsort(descending=True, stable=True)
    order = order[mask_scores[mask[order]] > 0]  # without empty masks
    kept = [rles[k] for k in mask[order].tolist()]
    return Instances(final[order], labels.cpu()[order], rle_boxes(kept), kept, size)
