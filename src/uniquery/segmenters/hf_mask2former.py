"""The method for Hugging Face's Mask2Former: an adapter for an existing model.

Network, matching and base losses are Hugging Face's own; the adapter maps its tensors to queries and pixel embeddings.
Targets with invalid pixels, which Hugging Face does not have, are matched and compared by `set_prediction`.

Letters: B images, N queries of an image, L predictions (one per decoder layer, and one before the first), C classes,
D channels, M matched pairs, K instances of an image, h × w the map, H × W the padded input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from uniquery.errors import DataError, UserError
from uniquery.layers.normalize import Normalize
from uniquery.masks.geometry import mask_boxes
from uniquery.masks.losses import PointSampling
from uniquery.masks.paste import resize_matrices
from uniquery.querying.contract import Segmenter
from uniquery.segmenters.set_prediction import (
    PointCriterion,
    SetAssignment,
    SetOutputs,
    best_instances,
    check_labels,
    match_layers,
    queries_of_layers,
    queries_with_targets,
)
from uniquery.structures import Assignment, Images, Instances, PixelMap, Queries, Targets, rows_by_image

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_WHOLE = (1.0, 1.0)  # points are drawn from the whole padded image, as Hugging Face does


@dataclass(frozen=True)
class HFOutputs(SetOutputs):
    """What all decoder layers predict, from first to last.

    Attributes:
        masks: L of (B, N, h, w) mask logits, which Hugging Face's forward computes in any case.
    """

    masks: tuple[Tensor, ...]


@dataclass(frozen=True)
class HFAssignment(Assignment):
    """The last layer's matching.

    Attributes:
        targets: what was matched; layers before the last are matched where `layer_queries` asks for them.
        all_layers: with invalid pixels, the matching of all layers, computed by `set_prediction`.
    """

    targets: tuple[Targets, ...]
    all_layers: SetAssignment | None = None


class HFMask2Former(Segmenter[HFOutputs, HFAssignment, Queries]):
    """Hugging Face's `Mask2FormerForUniversalSegmentation` as a `Segmenter`.

    The model inside is not changed: it keeps its parameters and their names, and is saved by
    `adapter.model.save_pretrained(folder)`. Weights of the losses and numbers of points are those of its configuration.

    Args:
        model: from `from_pretrained`, or made from a configuration.
        num_classes: how many classes the data has; compared with the model's labels.
        image_mean: mean of the image processor, for colors in 0..1.
        image_std: standard deviation of the image processor.
        max_detections: most instances that `predict` gives for an image.
        mask_threshold: probability from which on a pixel belongs to a predicted mask.

    Raises:
        UserError: if transformers is missing, the model is another one, or its labels do not fit the data.
    """

    dot_product_scale = 1.0

    def __init__(
        self,
        model: Any,
        num_classes: int | None = None,
        *,
        image_mean: Sequence[float] = IMAGENET_MEAN,
        image_std: Sequence[float] = IMAGENET_STD,
        max_detections: int = 100,
        mask_threshold: float = 0.5,
    ) -> None:
        super().__init__()
        _check_model(model, num_classes)
        _check_colors(image_mean, image_std)
        config = model.config
        self.model = model
        self.num_classes = int(config.num_labels)
        self.stride = int(config.common_stride)
        self.criterion = PointCriterion(
            PointSampling(config.train_num_points, config.oversample_ratio, config.importance_sample_ratio),
            class_weight=config.class_weight,
            mask_weight=config.mask_weight,
            dice_weight=config.dice_weight,
            label_weights=(*[1.0] * self.num_classes, config.no_object_weight),
        )
        self.normalize = Normalize([255 * m for m in image_mean], [255 * s for s in image_std], "RGB")
        self.max_detections, self.mask_threshold = max_detections, mask_threshold

    def forward(self, images: Images) -> HFOutputs:
        pixels = self.normalize(images).to(self.model.dtype)
        predicted = self.model.model(
            pixel_values=pixels, pixel_mask=_pixel_mask(images), output_hidden_states=True, return_dict=True
        )
        states = torch.stack(predicted.transformer_decoder_intermediate_states).transpose(
            1, 2
        )  # (L, B, N, D), normalized
        return HFOutputs(
            PixelMap(predicted.pixel_decoder_last_hidden_state, self.stride),
            logits=self.model.class_predictor(states),
            embeddings=self.model.model.transformer_module.decoder.mask_predictor.mask_embedder(states),
            masks=tuple(predicted.masks_queries_logits),
            sizes=images.sizes,
        )

    @torch.no_grad()
    def assign(self, outputs: HFOutputs, targets: Sequence[Targets]) -> HFAssignment:
        """Hugging Face's matching of the last layer; uniquery's of all layers where targets have invalid pixels.

        Raises:
            DataError: if a label is none of the model's, or an image has not as many labels as masks.
        """
        self._check_labels(targets)
        if _have_invalid_pixels(targets):
            costs = self.criterion.costs(outputs, targets, [_WHOLE] * len(targets))
            ours = match_layers(costs, targets, self.num_classes)
            return HFAssignment(ours.query, ours.image, ours.target, targets=tuple(targets), all_layers=ours)
        image, query, target = self._matched(outputs, -1, targets)
        return HFAssignment(query, image, target, targets=tuple(targets))

    def _matched(self, outputs: HFOutputs, layer: int, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
        """(M,) image, query and target of each pair."""
        pairs = self.model.criterion.matcher(*self._predictions(outputs, layer), *_annotations(targets))
        image = torch.arange(len(pairs)).repeat_interleave(torch.tensor([len(query) for query, _ in pairs]))
        query, target = (torch.cat(column) for column in zip(*pairs, strict=True))
        device = outputs.logits.device
        return image.to(device), query.to(device), target.to(device)

    def _predictions(self, outputs: HFOutputs, layer: int) -> tuple[Tensor, Tensor]:
        """(B, N, h, w) mask and (B, N, C + 1) class logits, in the types that the criterion works in."""
        return outputs.masks[layer].float(), outputs.logits[layer].to(self.model.criterion.empty_weight.dtype)

    def _check_labels(self, targets: Sequence[Targets]) -> None:
        for target in targets:
            if len(target.labels) != len(target.masks):
                raise DataError(
                    f"Image {target.image_id} has {len(target.labels)} labels for {len(target.masks)} masks; "
                    "give one label for each mask."
                )
        check_labels(torch.cat([t.labels for t in targets]), self.num_classes)

    def queries(self, outputs: HFOutputs, assignment: HFAssignment) -> Queries:
        return queries_with_targets(outputs.embeddings[-1], assignment.image, assignment.query, assignment.target)

    def layer_queries(self, outputs: HFOutputs, assignment: HFAssignment) -> list[Queries]:
        if assignment.all_layers is not None:
            return queries_of_layers(outputs.embeddings, assignment.all_layers)
        layers = []
        for layer, embeddings in enumerate(outputs.embeddings[:-1]):
            with torch.no_grad():
                pairs = self._matched(outputs, layer, assignment.targets)
            kept = torch.isin(pairs[0], assignment.image)
            layers.append(queries_with_targets(embeddings, *(column[kept] for column in pairs)))
        return [*layers, self.queries(outputs, assignment)]

    def mask_loss(self, logits: Tensor, queries: Queries, targets: Sequence[Targets]) -> Tensor:
        """Cross-entropy and dice on as many points, chosen by the same rule and with the weights of the base.

        Hugging Face's criterion has no invalid pixels, so uniquery samples the points.
        """
        return self.criterion.mask_loss(logits, queries, targets)

    def losses(self, outputs: HFOutputs, targets: Sequence[Targets], assignment: HFAssignment) -> dict[str, Tensor]:
        """Hugging Face's, by name for the last layer; `loss_auxiliary` is the sum of those of all layers before it.

        Their sum is what `model(...).loss` gives, including random numbers: each layer is matched right before its
        loss, as there. Hugging Face's criterion has no invalid pixels: where targets have some, uniquery computes the
        losses, with the same formulas, weights and numbers of points.
        """
        if assignment.all_layers is not None:
            return self.criterion.losses(outputs, targets, assignment.all_layers, [_WHOLE] * len(targets))
        criterion, annotations = self.model.criterion, _annotations(targets)
        masks, classes = self._predictions(outputs, -1)
        pairs = [
            (assignment.query[rows], assignment.target[rows])
            for rows in rows_by_image(assignment.image, len(targets))[1]
        ]
        count = criterion.get_num_masks(annotations[1], device=masks.device)
        last = self._weigh(
            {
                **criterion.loss_masks(masks, annotations[0], pairs, count),
                **criterion.loss_labels(classes, annotations[1], pairs),
            }
        )
        auxiliary = masks.new_zeros(())
        for layer in range(len(outputs.masks) - 1):
            auxiliary = auxiliary + sum(
                self._weigh(criterion(*self._predictions(outputs, layer), *annotations)).values()
            )
        return {
            "loss_class": last["loss_cross_entropy"],
            "loss_mask": last["loss_mask"],
            "loss_dice": last["loss_dice"],
            "loss_auxiliary": auxiliary,
        }

    def _weigh(self, terms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.model.weight_dict[name] * term for name, term in terms.items()}

    @torch.no_grad()
    def predict(
        self, outputs: HFOutputs, sizes: Sequence[tuple[int, int]], *, mask_threshold: float | None = None
    ) -> list[Instances]:
        """The best pairs of query and class; a score is that of the class times the mask's mean probability."""
        threshold = self.mask_threshold if mask_threshold is None else mask_threshold
        logit_threshold = math.log(threshold / (1 - threshold))
        return [self._predict_one(outputs, i, size, logit_threshold) for i, size in enumerate(sizes)]

    def _predict_one(self, outputs: HFOutputs, i: int, size: tuple[int, int], logit_threshold: float) -> Instances:
        def predict_masks(queries: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            logits = outputs.masks[-1][i, queries]
            shape = logits.shape[1], logits.shape[2]
            return logits, resize_matrices(shape, self.stride, outputs.sizes[i], size)

        scores = outputs.logits[-1, i].float().softmax(dim=1)[:, :-1]  # (N, C)
        return best_instances(
            scores, predict_masks, size, max_detections=self.max_detections, logit_threshold=logit_threshold
        )

    def unpack(self, batch: Mapping[str, Any], image_ids: Sequence[int]) -> tuple[Images, list[Targets]]:
        """`Images` and `Targets` from what Hugging Face's image processor and collate function give.

        Args:
            batch: `pixel_values` (B, 3, H, W), `mask_labels` and `class_labels` of each image; `pixel_mask` (B, H, W)
                where images are padded at the bottom and the right.
            image_ids: a number for each image of the data set: pixels of the same image are no negatives.
        """
        pixels = batch["pixel_values"] * self.normalize.std + self.normalize.mean
        sizes = [tuple(pixels.shape[-2:])] * len(pixels)
        if batch.get("pixel_mask") is not None:
            inside = batch["pixel_mask"].bool()
            sizes = torch.stack([inside.any(2).sum(1), inside.any(1).sum(1)], dim=1).tolist()
        targets = []
        for labels, values, image_id in zip(batch["class_labels"], batch["mask_labels"], image_ids, strict=True):
            masks = values.bool()
            targets.append(Targets(labels.long(), mask_boxes(masks), masks, image_id))
        return Images(pixels, tuple((height, width) for height, width in sizes)), targets


def _check_model(model: object, num_classes: int | None) -> None:
    try:
        from transformers import Mask2FormerForUniversalSegmentation
    except ImportError as error:
        raise UserError(
            "uniquery.segmenters.hf_mask2former needs transformers; install it with: pip install 'uniquery[hf]'."
        ) from error
    if not isinstance(model, Mask2FormerForUniversalSegmentation):
        raise UserError(
            f"HFMask2Former wraps a Mask2FormerForUniversalSegmentation of transformers, not a {type(model).__name__}."
        )
    labels = model.config.num_labels
    if num_classes is not None and num_classes != labels:
        raise UserError(
            f"The model has {labels} labels but the data {num_classes} classes; load it with from_pretrained(..., "
            f"num_labels={num_classes}, ignore_mismatched_sizes=True), which makes a new class layer."
        )


def _check_colors(mean: Sequence[float], std: Sequence[float]) -> None:
    if len(mean) != 3 or len(std) != 3 or not all(0 <= m <= 1 for m in mean) or not all(0 < s <= 1 for s in std):
        raise UserError(
            f"image_mean and image_std are three numbers each, for colors in 0..1; got {list(mean)} and {list(std)}."
        )


def _have_invalid_pixels(targets: Sequence[Targets]) -> bool:
    return any(t.valid is not None and not bool(t.valid.all()) for t in targets)


def _pixel_mask(images: Images) -> Tensor:
    """(B, H, W) int64: 1 where the image is, 0 for padding."""
    mask = images.pixels.new_zeros(len(images), *images.pixels.shape[-2:], dtype=torch.int64)
    for image_mask, (height, width) in zip(mask, images.sizes, strict=True):
        image_mask[:height, :width] = 1
    return mask


def _annotations(targets: Sequence[Targets]) -> tuple[list[Tensor], list[Tensor]]:
    """Masks as numbers, and labels, of each image: what Hugging Face calls `mask_labels` and `class_labels`."""
    return [t.masks.float() for t in targets], [t.labels for t in targets]
