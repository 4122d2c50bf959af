"""A small, sound panoptic set on disk, for tests that read it, and for tests that break it first."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from helpers.coco_files import write_images
from uniquery.data.open import open_data
from uniquery.data.panoptic import PanopticData

Content = dict[str, Any]
CAT, DOG, CROWD, SKY = 3 + 256 * 5 + 65536 * 7, 1, 255, 256**3 - 1  # ids that need all three channels, and small ones

CONTENT: Content = {
    "images": [
        {"id": 7, "file_name": "a.png", "height": 12, "width": 16},
        {"id": 0, "file_name": "sub/b.jpg", "height": 10, "width": 8},
        {"id": 3, "file_name": "void.png", "height": 6, "width": 6},
    ],
    "categories": [
        {"id": 5, "name": "cat", "isthing": 1},
        {"id": 2, "name": "dog", "isthing": 1},
        {"id": 40, "name": "sky", "isthing": 0},
    ],
    "annotations": [
        {
            "image_id": 7,
            "file_name": "a.png",
            "segments_info": [
                {"id": CAT, "category_id": 5, "iscrowd": 0, "area": 20},
                {"id": DOG, "category_id": 2},
                {"id": CROWD, "category_id": 5, "iscrowd": 1},
                {"id": SKY, "category_id": 40, "iscrowd": 0},
            ],
        },
        {"image_id": 3, "file_name": "void.png", "segments_info": []},
        {"image_id": 0, "file_name": "sub/b.png", "segments_info": [{"id": SKY, "category_id": 40}]},
    ],
}


def maps() -> dict[int, np.ndarray]:
    """Image id → segment ids. The first image: a cat, a dog, a crowd, sky in two parts, and two columns of void."""
    first = np.full((12, 16), SKY)
    first[2:6, 1:6] = CAT
    first[2:10, 6:9] = DOG
    first[8:, :5] = CROWD
    first[:, 14:] = 0
    return {7: first, 0: np.full((10, 8), SKY), 3: np.zeros((6, 6), int)}


def save_ids(path: Path, ids: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    colors = np.zeros((*ids.shape, 3), np.uint8)
    for channel in range(3):
        colors[..., channel] = (ids >> (8 * channel)) & 255
    Image.fromarray(colors).save(path)


def write_panoptic(folder: Path, change: Callable[[Content], Any] = lambda _: None) -> tuple[Path, Path]:
    """The json and the image folder; the PNG files are beside the json. A change applies to the json alone."""
    content = copy.deepcopy(CONTENT)
    images = write_images(folder, content)
    names = {entry["image_id"]: entry["file_name"] for entry in content["annotations"]}
    for image, ids in maps().items():
        save_ids(folder / "annotations" / names[image], ids)
    change(content)
    path = folder / "annotations.json"
    path.write_text(json.dumps(content))
    return path, images


def panoptic_set(folder: Path, change: Callable[[Content], Any] = lambda _: None, **options: Any) -> PanopticData:
    data = open_data(*write_panoptic(folder, change), **options)
    assert isinstance(data, PanopticData)
    return data
