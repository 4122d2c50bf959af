"""`uniquery weights`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from uniquery.cli.options import MODEL_HELP, add_set, command
from uniquery.errors import ConfigError

if TYPE_CHECKING:
    from uniquery.weights.convert import Conversion
    from uniquery.weights.model_file import ModelInfo

PROJECTS = ("original", "huggingface")  # of `uniquery.weights.convert`


def add_parser(commands: Any) -> None:
    parser = command(commands, "weights", run_convert, example="uniquery weights convert runs/cells condinst.pth")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    convert = command(
        actions,
        "convert",
        run_convert,
        help="write a model with another project's names, or another project's checkpoint as a model file",
        example="uniquery weights convert runs/cells condinst.pth\n"
        "  uniquery weights convert condinst.pth model.safetensors --config condinst_r50 --categories val.json",
    )
    convert.add_argument(
        "source", type=Path, help="a run folder, a checkpoint folder, a model file, or a checkpoint of another project"
    )
    convert.add_argument("output", type=Path, help="the file to write: .safetensors, or .pth for another project")
    convert.add_argument(
        "--names",
        choices=PROJECTS,
        default="original",
        help="whose names to write a model of ours with (default: %(default)s)",
    )
    convert.add_argument(
        "--config",
        help="for a checkpoint of another project: the configuration with its model and backbone (default: none)",
    )
    convert.add_argument(
        "--categories",
        type=Path,
        help="for a checkpoint of another project: a COCO json with its classes (default: none)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    add_set(convert)
    show = command(
        actions,
        "show",
        run_show,
        help="show what a model file holds: segmenter, classes, test size, thresholds",
        example="uniquery weights show runs/cells",
    )
    show.add_argument("model", type=Path, help=MODEL_HELP)


def run_show(args: argparse.Namespace) -> None:
    from uniquery.weights.model_file import find_model_file, read_model_info

    info, console = read_model_info(args.model), Console()
    chosen, size = info.thresholds, info.test_size
    console.print(f"{find_model_file(args.model)}: {info.model.name}, backbone {info.backbone.name}", soft_wrap=True)
    console.print(f"test size: short side {size.short}, at most {size.longest}", highlight=False)
    if chosen is None:
        console.print("thresholds: none of its own, so predict uses a score of 0.5 (see eval --choose-thresholds)")
    else:
        console.print(f"thresholds: by {chosen.rule}, mask threshold {chosen.mask}", highlight=False)
    table = Table("id", "class", *(["score ≥"] if chosen else []))
    for label, category in enumerate(info.categories):
        table.add_row(str(category.id), category.name, *([f"{chosen.scores[label]:.3f}"] if chosen else []))
    console.print(table)


def run_convert(args: argparse.Namespace) -> None:
    from uniquery.weights.convert import convert_to_ours, convert_to_theirs, is_own_model

    if is_own_model(args.source):
        if args.config or args.categories or args.set:
            raise ConfigError(
                f"{args.source} is a model of ours, with settings and classes of its own: leave out --config, "
                "--categories and --set."
            )
        done = convert_to_theirs(args.source, args.output, args.names, overwrite=args.overwrite)
        title = f"{done.info.model.name} → {done.project} names"
    else:
        done = convert_to_ours(args.source, args.output, _info(args), overwrite=args.overwrite)
        title = f"{done.info.model.name}, {done.project} names → model file"
    _print(done, title, args.output)


def _info(args: argparse.Namespace) -> ModelInfo:
    """What a checkpoint of another project does not hold."""
    from uniquery.training.config import load_config
    from uniquery.weights.convert import read_categories
    from uniquery.weights.model_file import ModelInfo

    absent = [
        option for option, value in (("--config", args.config), ("--categories", args.categories)) if value is None
    ]
    if absent:
        raise ConfigError(
            f"{args.source} is a checkpoint of another project, which holds no settings and no classes: give "
            f"{' and '.join(absent)}."
        )
    config = load_config(args.config, args.set)
    return ModelInfo(config.model, config.backbone, read_categories(args.categories), config.data.test_size)


def _print(done: Conversion, title: str, output: Path) -> None:
    table = Table("tensors", "count")
    for name in ("converted", "dropped", "missing"):
        table.add_row(name, str(getattr(done, name)))
    pixels, console, classes = done.pixels, Console(), len(done.info.categories)
    console.print(title, table)
    console.print(f"{output}: {classes} class{'es' * (classes > 1)}, backbone {done.info.backbone.name}.")
    where = "1×1" if done.info.backbone.caffe else "3×3"
    stride = f", stride in the {where} convolutions" if done.info.backbone.name.startswith("resnet") else ""
    console.print(
        f"Check on both sides, as weights do not show it: {pixels.order} pixels, mean {list(pixels.mean)}, "
        f"standard deviation {list(pixels.std)}{stride}.",
        highlight=False,
    )
