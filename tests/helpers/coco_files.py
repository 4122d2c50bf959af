"""A small, sound COCO set on disk, for tests that read it, and for tests that break it first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from uniquery.data.coco import CocoData
from uniquery.masks import rle

Content = dict[str, Any]


def ring(height: int, width: int) -> np.ndarray:
    """A mask with a hole."""
    mask = np.zeros((height, width), np.uint8)
    mask[2:10, 3:14] = 1
    mask[4:8, 6:10] = 0
    return mask


def runs(mask: np.ndarray) -> list[int]:
    """Uncompressed run lengths, column by column, of zeros first; made with no help from a library."""
    counts, last = [0], 0
    for value in mask.T.ravel().tolist():
        if value != last:
            counts.append(0)
            last = value
        counts[-1] += 1
    return counts


def sound() -> Content:
    """Ids from anywhere, 0 included; every kind of segmentation; one image without instances, one with a crowd only."""
    block = np.zeros((30, 20), np.uint8)
    block[20:, 10:] = 1
    two_parts = [[1, 1, 9, 1, 9, 7, 1, 7], [20.5, 10.5, 30.0, 10.5, 25.0, 20.0]]
    crowd = np.zeros((24, 32), np.uint8)
    crowd[15:, :12] = 1
    return {
        "info": {"description": "a test"},
        "images": [
            {"id": 7, "file_name": "a.png", "height": 24, "width": 32},
            {"id": 0, "file_name": "sub/b.jpg", "height": 30, "width": 20},
            {"id": 11, "file_name": "nothing.png", "height": 16, "width": 18},
            {"id": 3, "file_name": "crowd.png", "height": 24, "width": 32},
        ],
        "categories": [{"id": 5, "name": "cell"}, {"id": 0, "name": "debris"}, {"id": 90, "name": "dust"}],
        "annotations": [
            _annotation(100, 7, 5, two_parts),
            _annotation(4, 0, 90, {"size": [30, 20], "counts": runs(block)}),
            _annotation(0, 7, 0, rle.encode(ring(24, 32))),
            _annotation(9, 7, 5, {"size": [24, 32], "counts": runs(crowd)}, crowd=1),
            _annotation(12, 3, 0, {"size": [24, 32], "counts": runs(crowd)}, crowd=1),
            _annotation(13, 0, 5, [[2, 3, 12, 3, 12, 13]]),
        ],
    }


def _annotation(number: int, image: int, category: int, segmentation: Any, crowd: int = 0) -> Content:
    row = {"id": number, "image_id": image, "category_id": category, "segmentation": segmentation, "iscrowd": crowd}
    return row | {"area": 10.0, "bbox": [0, 0, 5, 5]}


def pixels(name: str, height: int, width: int) -> np.ndarray:
    """(H, W, 3) noise that differs from name to name."""
    return np.random.default_rng(list(name.encode())).integers(0, 256, (height, width, 3), dtype=np.uint8)


def write_json(folder: Path, content: Any) -> Path:
    path = folder / "annotations.json"
    path.write_text(json.dumps(content))
    return path


def write_images(folder: Path, content: Content) -> Path:
    root = folder / "images"
    for row in content["images"]:
        path = root / row["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(row["file_name"], row["height"], row["width"])).save(path)
    return root


def write_set(folder: Path, content: Content | None = None) -> tuple[Path, Path]:
    """The json and the image folder."""
    content = sound() if content is None else content
    return write_json(folder, content), write_images(folder, content)


def changed_set(tmp_path: Path, change: Callable[[Content], Any], **options: Any) -> CocoData:
    """The sound set with its json changed, but not its images."""
    content = sound()
    images = write_images(tmp_path, content)
    change(content)
    return CocoData(write_json(tmp_path, content), images, **options)


def assert_one_sentence(error: BaseException | str) -> None:
    """What a user reads: one line, not too long, that ends like a sentence."""
    text = str(error)
    assert "\n" not in text
    assert 20 < len(text) < 600
    assert text.endswith((".", "?"))
    assert not text.endswith("..")
    assert text.isprintable()
