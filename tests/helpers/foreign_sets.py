"""One small data set, written in the formats of other tools by code of its own."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from uniquery.data.coco import CocoData
from uniquery.masks import rle

_VOC = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog"),
    *("horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
VOC_NAMES = {name: number for number, name in enumerate(_VOC, start=1)}
CVAT_LABELS = ("person", "dog")


@dataclass(frozen=True)
class Picture:
    """An image and its instances: (class, (H, W) bool), which do not overlap."""

    name: str
    pixels: np.ndarray
    objects: list[tuple[str, np.ndarray]]

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[0], self.pixels.shape[1]


def pictures() -> list[Picture]:
    """A ring with a hole, an instance of two parts, one of one pixel at the corner, and an image without any."""
    rng = np.random.default_rng(0)
    ring, parts, corner, block = (np.zeros((30, 40), bool) for _ in range(4))
    ring[3:12, 4:15] = True
    ring[6:9, 7:12] = False
    parts[15:20, 2:9] = parts[22:29, 12:20] = True
    corner[29, 39] = True
    block[0:10, 20:33] = rng.random((10, 13)) < 0.7
    return [
        Picture("a.png", _noise(rng, 30, 40), [("person", ring), ("dog", parts), ("dog", corner)]),
        Picture("b.png", _noise(rng, 30, 40), [("person", block)]),
        Picture("empty.png", _noise(rng, 20, 24), []),
    ]


def of_coco(data: CocoData, count: int) -> list[Picture]:
    """Images of a real data set; a pixel of several instances belongs to the last."""
    found = []
    for index in range(count):
        ids = np.zeros(data.sizes[index].tolist(), np.int64)
        instances = data.instances(index)
        for number, (_, mask) in enumerate(instances, start=1):
            ids[rle.decode(mask) > 0] = number
        labeled = [(data.classes[label], ids == n) for n, (label, _) in enumerate(instances, start=1)]
        objects = [(name, mask) for name, mask in labeled if mask.any()]
        found.append(Picture(f"{data.path(index).stem}.png", data.read(index), objects))
    return found


def write_images(folder: Path, given: Sequence[Picture]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for picture in given:
        Image.fromarray(picture.pixels).save(folder / picture.name)
    return folder


def write_id_masks(folder: Path, given: Sequence[Picture]) -> tuple[Path, Path]:
    """One 16-bit PNG of instance ids per image."""
    masks = folder / "masks"
    masks.mkdir(parents=True)
    for picture in given:
        ids = np.zeros(picture.size, np.uint16)
        for number, (_, mask) in enumerate(picture.objects):
            ids[mask] = 7 + 300 * number
        Image.fromarray(ids).save(masks / picture.name)
    return write_images(folder / "images", given), masks


def write_instance_masks(folder: Path, given: Sequence[Picture]) -> tuple[Path, Path]:
    """A folder per image with one PNG of 0 and 255 per instance."""
    for picture in given:
        masks = folder / "masks" / Path(picture.name).stem
        masks.mkdir(parents=True)
        for number, (_, mask) in enumerate(picture.objects):
            Image.fromarray(mask.astype(np.uint8) * 255).save(masks / f"{number}.png")
    return write_images(folder / "images", given), folder / "masks"


def write_voc(folder: Path, given: Sequence[Picture], splits: dict[str, list[str]] | None = None) -> Path:
    """VOC's folders, PNG files with its palette; background pixels in the first column are void."""
    palette = [value for index in range(256) for value in voc_color(index)]
    write_images(folder / "JPEGImages", given)
    for picture in given:
        for name in ("SegmentationObject", "SegmentationClass"):
            values = np.zeros(picture.size, np.uint8)
            values[:, 0] = 255
            for number, (class_name, mask) in enumerate(picture.objects, start=1):
                values[mask] = number if name == "SegmentationObject" else VOC_NAMES[class_name]
            image = Image.fromarray(values, mode="P")
            image.putpalette(palette)
            (folder / name).mkdir(exist_ok=True)
            image.save(folder / name / picture.name)
    for split, names in (splits or {}).items():
        lists = folder / "ImageSets" / "Segmentation"
        lists.mkdir(parents=True, exist_ok=True)
        (lists / f"{split}.txt").write_text("\n".join(names) + "\n")
    return folder


def voc_color(index: int) -> tuple[int, int, int]:
    """The colors of the VOC development kit: bits of the index, spread over the channels from the highest."""
    bits = [[(index >> (3 * step + channel)) & 1 for step in range(8)] for channel in range(3)]
    red, green, blue = (sum(bit << (7 - step) for step, bit in enumerate(channel)) for channel in bits)
    return red, green, blue


def cvat_mask(mask: np.ndarray) -> dict[str, Any]:
    """The attributes of CVAT's mask element."""
    rows, columns = np.nonzero(mask)
    top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
    runs = [(value, len(list(group))) for value, group in groupby(mask[top:bottom, left:right].flatten().tolist())]
    lengths = [length for _, length in runs]
    lengths = [0, *lengths] if runs[0][0] else lengths
    box = {"left": left, "top": top, "width": right - left, "height": bottom - top}
    return {"rle": ", ".join(map(str, lengths)), **box}


def write_cvat(folder: Path, given: Sequence[Picture], attributes: str = "") -> tuple[Path, Path]:
    lines = ['<?xml version="1.0" encoding="utf-8"?>', "<annotations>", "  <version>1.1</version>"]
    lines += ["  <meta><task><labels>"]
    lines += [f"<label><name>{name}</name><color>#24b353</color></label>" for name in CVAT_LABELS]
    lines += ["  </labels></task></meta>"]
    for number, picture in enumerate(given):
        height, width = picture.size
        lines.append(f'  <image id="{number}" name="{picture.name}" width="{width}" height="{height}" {attributes}>')
        for class_name, mask in picture.objects:
            fields = " ".join(f'{key}="{value}"' for key, value in cvat_mask(mask).items())
            lines.append(f'    <mask label="{class_name}" source="manual" occluded="0" {fields} z_order="0">')
            lines.append("    </mask>")
        lines.append("  </image>")
    file = folder / "annotations.xml"
    images = write_images(folder / "images", given)
    file.write_text("\n".join([*lines, "</annotations>"]))
    return file, images


def pack_rle(values: Sequence[int] | np.ndarray, sizes: Sequence[int] = (3, 4, 8, 16)) -> list[int]:
    """The bytes of thi.ng/rle-pack for values of 8 bits, from the description of its format."""
    bits = f"{len(values):032b}{8 - 1:05b}" + "".join(f"{size - 1:04b}" for size in sizes)

    def block(flag: int, length: int, content: Sequence[int]) -> str:
        kind = next(k for k, size in enumerate(sizes) if length - 1 < 1 << size)
        return f"{flag}{kind:02b}{length - 1:0{sizes[kind]}b}" + "".join(f"{value:08b}" for value in content)

    most, single = 1 << sizes[-1], list[int]()
    starts = np.flatnonzero(np.diff(values, prepend=-1))
    for start, length in zip(starts.tolist(), np.diff(starts, append=len(values)).tolist(), strict=True):
        value = int(values[start])
        if length == 1 and len(single) < most:
            single.append(value)
            continue
        bits += block(0, len(single), single) if single else ""
        single = []
        for done in range(0, length, most):
            bits += block(1, min(most, length - done), [value])
    bits += block(0, len(single), single) if single else ""
    bits += "0" * (-len(bits) % 8)
    return [int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)]


def brush_result(class_name: str, mask: np.ndarray, number: int = 0) -> dict[str, Any]:
    """A region of Label Studio, painted with a brush: RGBA, of which only alpha says what is painted."""
    rgba = np.zeros((*mask.shape, 4), np.uint8)
    rgba[mask] = (200, 30, 90, 255)
    return {
        "id": f"region{number}",
        "type": "brushlabels",
        "from_name": "tag",
        "to_name": "image",
        "origin": "manual",
        "original_width": mask.shape[1],
        "original_height": mask.shape[0],
        "image_rotation": 0,
        "value": {"format": "rle", "rle": pack_rle(rgba.flatten().astype(np.int64)), "brushlabels": [class_name]},
    }


def label_studio_task(number: int, name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": number,
        "annotations": [{"id": number, "completed_by": 1, "was_cancelled": False, "result": results}],
        "predictions": [],
        "data": {"image": f"/data/upload/1/0a1b2c3d-{name}"},
        "file_upload": f"0a1b2c3d-{name}",
    }


def write_label_studio(folder: Path, given: Sequence[Picture]) -> tuple[Path, Path]:
    images = write_images(folder / "images", given)
    tasks = [
        label_studio_task(n, p.name, [brush_result(c, mask, i) for i, (c, mask) in enumerate(p.objects)])
        for n, p in enumerate(given, start=1)
    ]
    file = folder / "export.json"
    file.write_text(json.dumps(tasks))
    return file, images


def write_yolo(folder: Path, labels: dict[str, list[str]], names: Any, **config: Any) -> Path:
    """A data.yaml with images of 40 × 20 pixels in images/train, and the lines of their label files."""
    for name, lines in labels.items():
        write_images(folder / "images" / "train", [Picture(f"{name}.png", np.zeros((20, 40, 3), np.uint8), [])])
        (folder / "labels" / "train").mkdir(parents=True, exist_ok=True)
        (folder / "labels" / "train" / f"{name}.txt").write_text("\n".join(lines))
    file = folder / "data.yaml"
    file.write_text(yaml.safe_dump({"train": "images/train", "names": names, **config}))
    return file


def read_back(annotations: Path, images: Path) -> list[Picture]:
    """What the data set of this project reads."""
    data = CocoData(annotations, images)
    data.check_files_exist()
    return [
        Picture(
            data.path(index).name,
            data.read(index),
            [(data.classes[label], rle.decode(mask) > 0) for label, mask in data.instances(index)],
        )
        for index in range(len(data))
    ]


def assert_same(given: Sequence[Picture], found: Sequence[Picture], class_name: str | None = None) -> None:
    """The same images with the same instances, in any order; `class_name` replaces the classes."""
    assert [p.name for p in found] == [p.name for p in given]
    for one, other in zip(given, found, strict=True):
        assert np.array_equal(one.pixels, other.pixels)
        expected = sorted((class_name or name, mask.tobytes()) for name, mask in one.objects)
        assert sorted((name, mask.tobytes()) for name, mask in other.objects) == expected


def _noise(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
