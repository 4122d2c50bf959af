"""The images on which two results differ most, drawn beside the ground truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from uniquery.data.coco import CocoData
from uniquery.data.dataset import Row
from uniquery.evaluation.compare import image_score
from uniquery.report.drawings import LabeledMask, data_uri, downscale, overlay

_SIDE = 300


def differing_images(
    data: CocoData, sides: Sequence[Mapping[int, Sequence[Row]]], captions: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """The images whose F1 score changed most from the first results to the second, gains and losses in turn.

    Args:
        data: the images.
        sides: two sets of predictions by image id, best score first, without those that are not drawn.
        captions: their names.
        count: how many images, at most; images without a change are left out.

    Returns:
        Name, note and captioned pictures of each, for the template.
    """
    labels = {category.id: label for label, category in enumerate(data.categories)}
    changes = []
    for index in range(len(data)):
        instances, image_id = data.instances(index), int(data.image_ids[index])
        found = [[(labels[r["category_id"]], r["segmentation"]) for r in side.get(image_id, ())] for side in sides]
        before, after = (image_score(instances, predicted) for predicted in found)
        changes.append(after - before)
    return [_picture(data, index, changes[index], sides, captions) for index in largest_changes(changes)[:count]]


def largest_changes(changes: Sequence[float]) -> list[int]:
    """Indices of the largest gain, the largest loss, the second largest gain, …: neither side hides the other.

    >>> largest_changes([0.1, -1.0, 0.0, -0.5, 0.3, -0.2])
    [4, 1, 0, 3, 5]
    """
    gains = sorted((i for i, change in enumerate(changes) if change > 0), key=lambda i: -changes[i])
    losses = sorted((i for i, change in enumerate(changes) if change < 0), key=lambda i: changes[i])
    return [i for pair in zip_longest(gains, losses) for i in pair if i is not None]


def _picture(
    data: CocoData,
    index: int,
    change: float,
    sides: Sequence[Mapping[int, Sequence[Row]]],
    captions: Sequence[str],
) -> dict[str, Any]:
    names = {category.id: category.name for category in data.categories}
    image, image_id = data.read(index), int(data.image_ids[index])
    truth = [LabeledMask(mask, data.classes[label]) for label, mask in data.instances(index)]
    drawn = [
        [LabeledMask(r["segmentation"], names[r["category_id"]], r["score"]) for r in side.get(image_id, ())]
        for side in sides
    ]
    difference = f"{change:+.2f}".replace("-", "−")
    return {
        "name": data.path(index).name,
        "note": f"{captions[1]}: image score {difference} against {captions[0]}",
        "images": [
            (data_uri(overlay(*downscale(image, masks, _SIDE)), _SIDE), caption)
            for masks, caption in zip((truth, *drawn), ("ground truth", *captions), strict=True)
        ],
    }
