"""The images on which two results differ most, drawn beside the ground truth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from uniquery.data.coco import CocoData
from uniquery.data.dataset import Row
from uniquery.evaluation.compare import image_score
from uniquery.report.drawings import LabeledMask, data_uri, downscale, overlay

_SIDE = 300


def differing_images(
    data: CocoData, sides: Sequence[Mapping[int, Sequence[Row]]], captions: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """The images whose F1 score changed most from the first results to the second, largest change first.

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
    order = sorted((i for i, change in enumerate(changes) if change), key=lambda i: -abs(changes[i]))[:count]
    return [_picture(data, index, changes[index], sides, captions) for index in order]


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
