import json

import numpy as np
import pytest

from uniquery.evaluation import evaluate
from uniquery.evaluation.image_ap import image_ap
from uniquery.masks import rle


def random_mask(rng, size=40) -> dict:
    mask = np.zeros((size, size), np.uint8)
    y, x = rng.integers(0, size - 12, 2)
    height, width = rng.integers(6, 12, 2)
    mask[y : y + height, x : x + width] = 1
    return rle.encode(mask)


def near(rng, mask: dict) -> dict:
    bitmap = np.roll(rle.decode(mask), rng.integers(-2, 3, 2), (0, 1))
    return rle.encode(bitmap)


@pytest.mark.parametrize("seed", range(12))
def test_equals_coco_on_one_image(seed):
    rng = np.random.default_rng(seed)
    truth = [(int(rng.integers(1, 4)), random_mask(rng)) for _ in range(rng.integers(1, 9))]
    crowds = [(int(rng.integers(1, 4)), random_mask(rng)) for _ in range(rng.integers(0, 3))]
    predicted = [(label, near(rng, mask)) for label, mask in truth * 2] + [
        (int(rng.integers(1, 4)), random_mask(rng)) for _ in range(6)
    ]
    order = rng.permutation(len(predicted))
    predicted = [predicted[i] for i in order]
    ground_truth = {
        "images": [{"id": 1, "height": 40, "width": 40}],
        "categories": [{"id": i, "name": str(i)} for i in (1, 2, 3)],
        "annotations": [
            {
                "id": i,
                "image_id": 1,
                "category_id": label,
                "segmentation": mask,
                "iscrowd": int(i > len(truth)),
                "area": rle.area(mask),
            }
            for i, (label, mask) in enumerate([*truth, *crowds], start=1)
        ],
    }
    results = [
        {"image_id": 1, "category_id": label, "segmentation": mask, "score": 1 - i / 100}
        for i, (label, mask) in enumerate(predicted)
    ]
    expected = evaluate(json.loads(json.dumps(ground_truth)), results).values["AP"] / 100
    assert image_ap(truth, predicted, crowds=crowds) == pytest.approx(expected, abs=1e-9)


def test_limits():
    rng = np.random.default_rng(0)
    mask = random_mask(rng)
    assert image_ap([], [(1, mask)]) is None
    assert image_ap([(1, mask)], []) == 0
    assert image_ap([(1, mask)], [(1, mask)]) == pytest.approx(1)
    assert image_ap([(1, mask)], [(2, mask)]) == 0
    assert image_ap([(1, mask)], [(2, mask), (1, mask)], max_detections=1) == pytest.approx(1)  # of each class
    assert image_ap([(1, mask), (2, mask)], [(1, mask)], labeled_classes={1}) == pytest.approx(1)
