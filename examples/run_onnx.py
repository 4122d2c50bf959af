"""Runs a model that `uniquery export` wrote; needs numpy, pillow and onnxruntime only.

python run_onnx.py model.onnx photo.jpg --output photo_instances.png --json photo.json
"""

from __future__ import annotations

import argparse
import colorsys
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageDraw, ImageOps


def main() -> None:
    parser = argparse.ArgumentParser(description="Finds instances in an image by an exported model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--score", type=float, help="smallest score (default: that of the model)")
    parser.add_argument("--output", type=Path, help="write the image with its instances drawn over it")
    parser.add_argument("--json", type=Path, help="write classes, scores, boxes and run lengths of masks")
    args = parser.parse_args()
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    info = json.loads(session.get_modelmeta().custom_metadata_map["uniquery"])
    image = ImageOps.exif_transpose(Image.open(args.image)).convert("RGB")
    instances = predict(session, info, image, args.score)
    for one in instances:
        print(f"{one['class']} {one['score']:.3f} {[round(side, 1) for side in one['box']]}")
    if args.output:
        draw(image, instances).save(args.output)
    if args.json:
        rows = [{**one, "mask": run_lengths(one["mask"])} for one in instances]
        args.json.write_text(json.dumps(rows))


def predict(
    session: Any, info: dict[str, Any], image: Image.Image, least_score: float | None = None
) -> list[dict[str, Any]]:
    """The instances of an image, best first: class, category_id, score, box (x0 y0 x1 y1) and mask (H, W) bool."""
    pixels, valid = prepare(image, info)
    sizes = np.array([valid], dtype=np.int64)
    names = ["scores", "labels", "boxes", "masks"]
    scores, labels, boxes, masks = (out[0] for out in session.run(names, {"images": pixels[None], "sizes": sizes}))
    size = (image.height, image.width)
    boxes = boxes * np.array([size[1] / valid[1], size[0] / valid[0]] * 2, dtype=np.float32)
    found = []
    for score, label, box, cells in zip(scores, labels, boxes, masks, strict=True):
        if score <= 0:  # images have as many rows as the one that has most instances
            continue
        mask, factor = paste(cells, box, valid, size, info)
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if not len(rows):
            continue
        if info["masks"]["boxes_from_masks"]:
            box = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=np.float32)
        if score * factor >= (info["score_thresholds"][label] if least_score is None else least_score):
            found.append(
                {
                    "class": info["classes"][label],
                    "category_id": info["category_ids"][label],
                    "score": float(score * factor),
                    "box": np.clip(box, 0, [size[1], size[0]] * 2).tolist(),
                    "mask": mask,
                }
            )
    return sorted(found, key=lambda one: -one["score"])


def prepare(image: Image.Image, info: dict[str, Any]) -> tuple[np.ndarray, tuple[int, int]]:
    """(3, H, W) uint8 pixels, resized and padded at the bottom and the right, and the size before padding."""
    factor = min(info["short"] / min(image.size), info["longest"] / max(image.size))
    width, height = (max(1, int(side * factor + 0.5)) for side in image.size)
    resized = np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    rows, columns = (-(-side // info["multiple"]) * info["multiple"] for side in (height, width))
    padded = np.zeros((3, rows, columns), dtype=np.uint8)
    padded[:, :height, :width] = resized.transpose(2, 0, 1)
    return padded, (height, width)


def paste(
    cells: np.ndarray, box: np.ndarray, valid: tuple[int, int], size: tuple[int, int], info: dict[str, Any]
) -> tuple[np.ndarray, float]:
    """(H, W) bool mask of an image, and the factor that its resizing changes the score by."""
    frame, threshold = info["masks"], info["mask_threshold"]
    if frame["kind"] == "box":  # the mask covers its box
        square = (cells > threshold).astype(np.float32)
        across, down = (inside_box(box[i], box[i + 2], size[1 - i], len(cells)) for i in (0, 1))
        return down @ square @ across.T >= 0.5, 1.0
    down, across = (
        resizing(inside, length) @ to_pixels(count, frame, inside)
        for count, inside, length in zip(cells.shape, valid, size, strict=True)
    )
    if frame["resize"] == "probabilities":
        return down @ cells @ across.T > threshold, 1.0
    clipped = np.clip(cells.astype(np.float64), 1e-30, 1 - 2**-24)
    logits = down @ np.log(clipped / (1 - clipped)) @ across.T
    mask = logits > np.log(threshold / (1 - threshold))
    if not frame["scores_from_masks"] or not mask.any():
        return mask, 1.0
    inside = 1 / (1 + np.exp(-logits[mask]))
    return mask, float(inside.mean() / cells[cells > threshold].mean())


def to_pixels(cells: int, frame: dict[str, Any], pixels: int) -> np.ndarray:
    """(pixels, cells): linear interpolation between cells, at the pixels of the model's input."""
    return between((np.arange(pixels) - frame["offset"]) / frame["stride"], cells)


def resizing(old: int, new: int) -> np.ndarray:
    """(new, old): linear resizing of a line of pixels."""
    return between((np.arange(new) + 0.5) * old / new - 0.5, old)


def between(position: np.ndarray, count: int) -> np.ndarray:
    """(len(position), count): the weights of linear interpolation; beyond the ends, the last value goes on."""
    position = np.clip(position, 0, count - 1)
    return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(count))).astype(np.float32)


def inside_box(low: float, high: float, pixels: int, cells: int) -> np.ndarray:
    """(pixels, cells): linear interpolation between cells that fill a box; zero outside of it."""
    position = (np.arange(pixels) + 0.5 - low) * cells / max(high - low, 1e-6) - 0.5
    return np.maximum(0, 1 - np.abs(position[:, None] - np.arange(cells))).astype(np.float32)


def run_lengths(mask: np.ndarray) -> dict[str, Any]:
    """COCO's run lengths, not compressed: down the columns, beginning with how many pixels are outside."""
    flat = np.concatenate([[0], mask.T.ravel().astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(flat))
    counts = np.diff(np.concatenate([[0], edges, [mask.size]])) if len(edges) else np.array([mask.size])
    return {"size": list(mask.shape), "counts": counts[: -1 if counts[-1] == 0 else None].tolist()}


def draw(image: Image.Image, instances: list[dict[str, Any]]) -> Image.Image:
    """The image with masks in colors, and names and scores."""
    canvas = np.asarray(image).astype(np.float32)
    colors = [np.array(colorsys.hsv_to_rgb(0.618 * i % 1, 0.8, 1.0)) * 255 for i in range(len(instances))]
    for color, one in reversed(list(zip(colors, instances, strict=True))):
        canvas[one["mask"]] = 0.5 * canvas[one["mask"]] + 0.5 * color
    picture = Image.fromarray(canvas.astype(np.uint8))
    pen = ImageDraw.Draw(picture)
    for one in reversed(instances):
        pen.text(
            one["box"][:2], f"{one['class']} {one['score']:.2f}", fill="white", stroke_width=1, stroke_fill="black"
        )
    return picture


if __name__ == "__main__":
    main()
