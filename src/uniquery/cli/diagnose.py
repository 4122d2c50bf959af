"""`uniquery diagnose`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from uniquery.cli.eval import open_model_and_data, sweep_table, sweep_thresholds
from uniquery.cli.options import add_split, command, positive
from uniquery.data.coco import CocoData
from uniquery.errors import UserError
from uniquery.evaluation.diagnose import FAMILIES, Scene, cross_scene_response, equivariance_error, read_scenes
from uniquery.files import write_atomically
from uniquery.querying import Segmenter
from uniquery.report.drawings import grid, png_bytes
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import ModelInfo

OTHERS = 8


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "diagnose",
        run,
        example="uniquery diagnose runs/cells --data val.json images --picture response.png",
    )
    parser.add_argument("model", type=Path, help="a run folder, a checkpoint folder or a model file")
    add_split(parser, "--data", "the data; by default the run's own validation data")
    parser.add_argument("--images", type=positive, default=32, help="how many images to look at")
    parser.add_argument("--json", type=Path, help="write the figures as json")
    parser.add_argument("--picture", type=Path, help="draw a query's response on its own and on eight other images")
    parser.epilog = f"{parser.epilog or ''}\n\nWithout --data, a run folder keeps both, and its report shows them."
    parser.add_argument("--no-sweep", dest="sweep", action="store_false", help="leave AP over mask thresholds out")
    parser.add_argument("--device", default="auto")
    parser.set_defaults(max_detections=None, backend="hotcoco", workers=0)


def run(args: argparse.Namespace) -> None:
    console = Console()
    model, card, data = open_model_and_data(args)
    folder = RunFolder(args.model)
    if not args.data and folder.metrics_file.is_file():
        args.json, args.picture = args.json or folder.diagnosis_file, args.picture or folder.response_file
    figures, scenes = diagnose(model, card, data, args.images)
    console.print(_cross_table(figures["cross_scene"]), _equivariance_table(figures["equivariance"]))
    if args.sweep:
        sweep = sweep_thresholds(args, model, card, data, console)
        figures["sweep"] = {str(threshold): metrics.values for threshold, metrics in sweep.items()}
        console.print(sweep_table(sweep))
    if args.json:
        write_atomically(args.json, json.dumps(figures, indent=2))
    if args.picture:
        write_atomically(args.picture, png_bytes(response_picture(model, scenes)))
        console.print(f"{args.picture}: a query on its own image, then on {OTHERS} others.")


def diagnose(
    model: Segmenter[Any, Any, Any], card: ModelInfo, data: CocoData, images: int
) -> tuple[dict[str, Any], list[Scene]]:
    """The figures by name, and the scenes they were measured on."""
    size = card.test_size
    scenes = read_scenes(model, data, size.short, size.longest, _spread(len(data), images))
    cross = cross_scene_response(model, scenes)
    errors = {name: equivariance_error(model, scenes, make) for name, make in FAMILIES.items()}
    figures = {
        "images": len(scenes),
        "cross_scene": asdict(cross) if cross else None,
        "equivariance": {name: asdict(e) if e else None for name, e in errors.items()},
    }
    return figures, scenes


def _spread(total: int, wanted: int) -> list[int]:
    return list(range(0, total, max(1, total // wanted)))[:wanted]


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _cross_table(cross: dict[str, Any] | None) -> Table:
    table = Table("", "response", title="Queries on pixels, as probabilities")
    if cross is None:
        table.add_row("n/a", "no matched query, or no other image")
        return table
    table.add_row(f"own instance, mean of {cross['queries']} queries", _percent(cross["own"]))
    table.add_row("instances of other images, mean", _percent(cross["mean"]))
    table.add_row("… 99th percentile", _percent(cross["p99"]))
    table.add_row("… share above 0.5", _percent(cross["above_half"]))
    return table


def _equivariance_table(errors: dict[str, Any]) -> Table:
    table = Table("transformation", "mask error, 1 − IoU", "feature error", title="Equivariance")
    for name, error in errors.items():
        cells = ("n/a", "n/a") if error is None else (_percent(error["mask_error"]), _percent(error["feature_error"]))
        table.add_row(name, *cells)
    return table


@torch.inference_mode()
def response_picture(model: Segmenter[Any, Any, Any], scenes: Sequence[Scene]) -> npt.NDArray[np.uint8]:
    """The best-matched query of the first scene that has one, on its own image and on others."""
    first = next((i for i, s in enumerate(scenes) if len(s.queries)), None)
    if first is None:
        raise UserError("There is no picture to draw: none of the images has a matched query.")
    scene = scenes[first]
    query = scene.queries[scene.own.argmax()[None]]
    others = [s for s in scenes if s is not scene][:OTHERS]
    pictures, titles = [], []
    for shown in [scene, *others]:
        pixels = model(shown.batch.images).pixels
        shape = pixels.embeddings.shape[-2:]
        response = model.similarity(query, pixels.of_image(0)).sigmoid().view(1, 1, *shape)
        pictures.append(_heat(shown, response))
        titles.append("own image" if shown is scene else f"another, at most {response.max():.2f}")
    return grid(pictures, 3, titles)


def _heat(scene: Scene, response: Tensor) -> npt.NDArray[np.uint8]:
    """The image in gray, with the response in red over it."""
    height, width = scene.batch.images.sizes[0]
    full = torch.nn.functional.interpolate(response, size=scene.batch.images.pixels.shape[-2:], mode="bilinear")
    heat = full[0, 0, :height, :width, None].cpu()
    gray = scene.batch.images.pixels[0, :, :height, :width].float().mean(0)[..., None].cpu()
    picture = gray * 0.7 * (1 - heat) + torch.tensor([255.0, 40.0, 20.0]) * heat
    return picture.round().clamp(0, 255).to(torch.uint8).numpy()
