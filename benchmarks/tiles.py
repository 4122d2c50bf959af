"""Tiles: AP on mosaics of images, whole and tiled, and the memory of a very large image.

python benchmarks/tiles.py runs/nuclei --data val.json images --tile 256
python benchmarks/tiles.py runs/nuclei --data val.json images --tile 256 --pixels 20000
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

import uniquery
from uniquery.data.dataset import GroundTruth
from uniquery.evaluation import evaluate
from uniquery.evaluation.tiles import Tiling, seam_error
from uniquery.masks import rle
from uniquery.masks.runs import encode_runs, runs_of_window
from uniquery.training.model_and_data import open_model_and_data


def mosaic(data, indices, cell, grid):
    """A grid × grid mosaic of images, each cut to (cell, cell), and its instances as (label, run lengths)."""
    side = cell * grid
    canvas, instances = np.zeros((side, side, 3), np.uint8), []
    for place, index in enumerate(indices):
        y, x = (cell * part for part in divmod(place, grid))
        sample = data.load(index)
        pixels = sample.image.permute(1, 2, 0).numpy()[:cell, :cell]
        canvas[y : y + pixels.shape[0], x : x + pixels.shape[1]] = pixels
        for mask, label in zip(sample.masks.numpy()[:, :cell, :cell], sample.labels.tolist(), strict=True):
            if mask.any():
                instances.append((label, encode_runs(runs_of_window(mask, x, y, side), (side, side))))
    return canvas, instances


def truth_of(mosaics, categories) -> GroundTruth:
    images, annotations = {}, []
    for i, (canvas, instances) in enumerate(mosaics, start=1):
        images[i] = {"id": i, "file_name": f"{i}.png", "height": canvas.shape[0], "width": canvas.shape[1]}
        for label, mask in instances:
            row = {"id": len(annotations) + 1, "image_id": i, "category_id": categories[label].id, "iscrowd": 0}
            box = [float(side) for side in rle.bounding_box(mask)]
            annotations.append({**row, "segmentation": mask, "bbox": box, "area": rle.area(mask)})
    names = {category.id: {"id": category.id, "name": category.name} for category in categories}
    return GroundTruth(images, names, annotations, "mosaics")


def compare(args, model, data) -> None:
    per_mosaic, count = args.grid**2, args.mosaics * args.grid**2
    indices = [i % len(data) for i in range(count)]
    mosaics = [
        mosaic(data, indices[start : start + per_mosaic], args.cell, args.grid) for start in range(0, count, per_mosaic)
    ]
    truth = truth_of(mosaics, model.categories)
    factor = args.short / args.tile
    side, limit = args.cell * args.grid, 100_000
    config = model.segmenter.config.model_copy(update={"max_detections": 10_000, "candidates": 5000})
    model.segmenter.config = config  # a mosaic has many more instances than an image
    whole = replace(
        model, info=replace(model.info, test_size=model.info.test_size.model_copy(update={"longest": limit}))
    )
    tiling = Tiling(args.tile, args.overlap)
    rows, errors = {"whole": [], "tiled": []}, []
    for i, (canvas, _) in enumerate(mosaics, start=1):
        found = whole.predict(canvas, score_threshold=0.0, short=round(side * factor))
        rows["whole"] += found.to_coco(i)
        found = model.predict_tiles(canvas, tiling, score_threshold=0.0, short=args.short)
        rows["tiled"] += found.to_coco(i)
        error, _ = seam_error(lambda cut, canvas=canvas: model.predict_tiles(canvas, cut, short=args.short), tiling)
        errors.append(error)
    scores = {
        name: evaluate(truth, part, iou_type="segm", max_detections=10_000).values["AP"] for name, part in rows.items()
    }
    print(f"{len(mosaics)} mosaics of {side} pixels, {len(truth.annotations)} instances, tiles of {args.tile} pixels")
    whole_ap, tiled_ap = scores.values()
    print(f"AP whole {whole_ap:.2f}, tiled {tiled_ap:.2f}, difference {tiled_ap - whole_ap:+.2f}")
    print(f"seam error (1 − PQ, seams moved, score ≥ 0.5): {100 * np.mean(errors):.1f} %")


def measure_memory(args, model, data) -> None:
    """Predicts a mosaic of args.pixels pixels a side from an uncompressed TIFF file, and prints the peak memory."""
    patch = np.zeros((args.cell, args.cell, 3), np.uint8)
    pixels = data.load(0).image.permute(1, 2, 0).numpy()[: args.cell, : args.cell]
    patch[: pixels.shape[0], : pixels.shape[1]] = pixels
    with tempfile.TemporaryDirectory() as folder:
        path, repeat = Path(folder) / "large.tif", -(-args.pixels // args.cell)
        Image.fromarray(np.tile(patch, (repeat, repeat, 1))[: args.pixels, : args.pixels]).save(path)
        base = resident()
        peak, done = [0.0], threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                peak[0] = max(peak[0], resident())

        threading.Thread(target=watch, daemon=True).start()
        start = time.perf_counter()
        found = model.predict_tiles(path, Tiling(args.tile, args.overlap), score_threshold=args.score, short=args.short)
        done.set()
    decoder = args.pixels**2 * 4 / 2**30  # pillow holds an RGB pixel in four bytes
    print(f"{args.pixels}² pixels: {len(found)} instances in {time.perf_counter() - start:.0f} s; ", end="")
    print(f"{peak[0] - base:.2f} GB above the loaded model, of which the decoded image is {decoder:.2f} GB")


def resident() -> float:
    """Resident memory of this process in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", nargs=2, type=Path, required=True)
    parser.add_argument("--tile", type=int, default=256)
    parser.add_argument("--overlap", type=float, default=0.2)
    parser.add_argument("--short", type=int, default=384, help="what a tile is resized to")
    parser.add_argument("--cell", type=int, default=256, help="pixels of an image of a mosaic")
    parser.add_argument("--grid", type=int, default=2, help="images along a side of a mosaic")
    parser.add_argument("--mosaics", type=int, default=8)
    parser.add_argument("--score", type=float, default=0.5, help="smallest score of the large image")
    parser.add_argument("--pixels", type=int, help="measure the memory of an image of so many pixels a side")
    args = parser.parse_args()
    model, data = uniquery.load(args.model, device="cpu"), open_model_and_data(args.model, tuple(args.data)).data
    (compare if args.pixels is None else measure_memory)(args, model, data)


if __name__ == "__main__":
    main()
