"""Small COCO sets for the tests of the metrics."""

from typing import Any

import numpy as np

from uniquery.masks import rle

HEIGHT, WIDTH = 150, 180


def rectangle(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    bitmap = np.zeros((HEIGHT, WIDTH), np.uint8)
    bitmap[max(y, 0) : y + height, max(x, 0) : x + width] = 1
    return rle.encode(bitmap)


def uncompressed(mask: dict[str, Any]) -> dict[str, Any]:
    flat = rle.decode(mask).flatten(order="F")
    edges = np.flatnonzero(np.diff(flat, prepend=0)).tolist()
    return {"size": mask["size"], "counts": np.diff([0, *edges, flat.size]).tolist()}


def polygon(x: int, y: int, width: int, height: int) -> list[list[float]]:
    return [[x, y, x + width, y + 0.3, x + width - 1.4, y + height, x + 0.5, y + height]]


def detection(image: int, category: int, box: tuple[int, int, int, int], score: float) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "segmentation": rectangle(*box), "score": score}


def random_set(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Ten images, one of them without objects; four categories, one of them without objects and one without detections.

    All three kinds of segmentation, crowd regions, tied scores, objects of all sizes, and one image with some 400
    detections of one category, of which about 130 find an object.
    """
    random = np.random.default_rng(seed)
    annotations, results = [], []

    def draw(smallest: int = 5, largest: int = 140) -> tuple[int, int, int, int]:
        width, height = random.integers(smallest, largest, 2).tolist()
        return int(random.integers(0, WIDTH - 5)), int(random.integers(0, HEIGHT - 5)), width, height

    def add(image: int, category: int, box: tuple[int, int, int, int], crowd: int = 0) -> None:
        mask = rectangle(*box)
        form = (mask, uncompressed(mask), polygon(*box))[int(random.integers(3))]
        final = rle.from_segmentation(form, HEIGHT, WIDTH)
        number = 7 * len(annotations) + 1
        base = {"id": number, "image_id": image, "category_id": category, "segmentation": form, "iscrowd": crowd}
        annotations.append({**base, "area": float(rle.area(final)), "bbox": list(rle.bounding_box(final))})

    def find(image: int, category: int, box: tuple[int, int, int, int], spread: int) -> None:
        near = [side + int(step) for side, step in zip(box, random.integers(-spread, spread + 1, 4), strict=True)]
        x, y, width, height = near
        score = round(float(random.random()), 1)
        results.append(detection(image, category, (x, y, max(width, 2), max(height, 2)), score))

    for image in range(0, 45, 5):
        for category in random.choice([0, 4, 9], 5).tolist():
            box = draw()
            add(image, category, box, crowd=int(random.random() < 0.2))
            for _ in range(int(random.integers(3)) if category != 9 else 0):
                find(image, category, box, 4)
        find(image, int(random.choice([0, 2, 4])), draw(), 0)
    for _ in range(130):
        box = draw(5, 25)
        add(0, 4, box)
        for _ in range(3):
            find(0, 4, box, 2)
    add(5, 0, (5, 5, 140, 130))
    find(5, 0, (5, 5, 140, 130), 4)
    find(45, 0, draw(), 0)
    order = random.permutation(len(results)).tolist()
    truth = {
        "images": [{"id": image, "height": HEIGHT, "width": WIDTH} for image in range(45, -5, -5)],
        "categories": [{"id": i, "name": name} for i, name in ((9, "d"), (0, "a"), (2, "b"), (4, "c"))],
        "annotations": annotations,
    }
    return truth, [results[i] for i in order]


def one_object() -> dict[str, Any]:
    """One image with one object."""
    return {
        "images": [{"id": 42, "height": HEIGHT, "width": WIDTH}],
        "categories": [{"id": 3, "name": "cell"}],
        "annotations": [{"id": 0, "image_id": 42, "category_id": 3, "segmentation": rectangle(10, 20, 30, 40)}],
    }


PERFECT = {**detection(42, 3, (10, 20, 30, 40), 0.7), "bbox": [10, 20, 30, 40]}
