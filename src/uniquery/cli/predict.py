"""`uniquery predict`."""

from __future__ import annotations

import argparse
import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from uniquery.cli.options import command, positive, progress_bar
from uniquery.data.images import SUFFIXES, read_image
from uniquery.errors import UserError
from uniquery.evaluation.inference import coco_results, predict_image
from uniquery.files import make_folder, write_atomically
from uniquery.parallel import choose_device
from uniquery.report.drawings import Drawn, label_map, overlay, png_bytes
from uniquery.structures import Instances
from uniquery.weights.model_file import ModelInfo, load_model

FORMATS = ("json", "png", "overlay")


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        run,
        help="find instances in images: COCO json, label pictures, overlays",
        example="uniquery predict runs/cells photos/ 'more/*.png' --output found --score 0.4",
    )
    parser.add_argument("model", type=Path, help="a run folder, a checkpoint folder or a model file")
    parser.add_argument("inputs", nargs="+", help="image files, folders (searched deeply) or quoted globs")
    parser.add_argument("-o", "--output", type=Path, default=Path("predictions"), help="folder for what is found")
    parser.add_argument("--score", type=float, default=0.5, help="smallest score of an instance")
    parser.add_argument("--mask-threshold", type=float, help="instead of the model's own")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="what to write")
    parser.add_argument(
        "--short", type=positive, help="short side that the model sees; by default that of its evaluation"
    )
    parser.add_argument("--device", default="auto")


def run(args: argparse.Namespace) -> None:
    model, card = load_model(args.model, choose_device(args.device))
    files = find_images(args.inputs)
    names = _output_names(files)
    make_folder(args.output)
    results: list[dict[str, Any]] = []
    images = []
    with progress_bar("predicting") as progress:
        for number, file in enumerate(files, start=1):
            image = read_image(file)
            instances = predict_image(
                model,
                image,
                args.short or card.test_size.short,
                card.test_size.longest,
                mask_threshold=args.mask_threshold,
            )
            instances = instances[instances.scores >= args.score]
            height, width = instances.size
            images.append({"id": number, "file_name": str(file), "width": width, "height": height})
            results += coco_results(number, instances, [c.id for c in card.categories])
            _write_pictures(args, names[file], image, instances, [c.name for c in card.categories])
            progress(number, len(files))
    if "json" in args.formats:
        _write_json(args.output, images, results, card)
    Console().print(f"{len(results)} instances in {len(files)} images: {args.output}")


def find_images(inputs: Sequence[str]) -> list[Path]:
    """Every image that files, folders and globs name, once, in order.

    Raises:
        UserError: an input names nothing.
    """
    found: dict[Path, None] = {}
    for text in inputs:
        before = len(found)
        found.update(dict.fromkeys(_expand(text)))
        if len(found) == before and not any(True for _ in _expand(text)):
            raise UserError(f"No image at '{text}': it is neither an image file, nor a folder or glob with images.")
    return list(found)


def _expand(text: str) -> Iterator[Path]:
    path = Path(text)
    if path.is_dir():
        yield from sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    elif path.is_file():
        yield path
    else:
        matches = map(Path, glob.glob(text, recursive=True))  # noqa: PTH207 (Path.glob refuses absolute patterns)
        yield from sorted(p for p in matches if p.suffix.lower() in SUFFIXES)


def _output_names(files: Sequence[Path]) -> dict[Path, str]:
    """A name for each file's pictures; files of the same stem in several folders are told apart by a number."""
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for file in files:
        name, number = file.stem, 2
        while name in taken:
            name, number = f"{file.stem}-{number}", number + 1
        taken.add(name)
        names[file] = name
    return names


def _write_pictures(args: argparse.Namespace, name: str, image: Any, instances: Instances, classes: list[str]) -> None:
    drawn = [
        Drawn(mask, classes[label], score)
        for mask, label, score in zip(instances.rles, instances.labels.tolist(), instances.scores.tolist(), strict=True)
    ]
    if "png" in args.formats:
        write_atomically(args.output / f"{name}.labels.png", png_bytes(label_map(drawn, instances.size)))
    if "overlay" in args.formats:
        write_atomically(args.output / f"{name}.overlay.png", png_bytes(overlay(image, drawn)))


def _write_json(folder: Path, images: list[dict[str, Any]], results: list[dict[str, Any]], card: ModelInfo) -> None:
    categories = [{"id": c.id, "name": c.name} for c in card.categories]
    write_atomically(folder / "results.json", json.dumps(results))
    write_atomically(folder / "images.json", json.dumps({"images": images, "categories": categories}))
