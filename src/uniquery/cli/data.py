"""`uniquery data`."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from uniquery.cli.options import add_set, add_split, command, positive, progress_bar, split_overrides
from uniquery.errors import ConfigError
from uniquery.files import make_folder, write_atomically

if TYPE_CHECKING:
    from uniquery.data.check import DataReport

MAX_PROBLEMS = 8
"""How many problems of one kind are printed."""


def add_parser(commands: Any) -> None:
    parser = command(commands, "data", run_check, example="uniquery data check train.json images")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    scenes = command(
        actions,
        "make-scenes",
        run_make_scenes,
        help="draw a data set: crowded scenes with exact masks, in COCO format",
        example="uniquery data make-scenes data/scenes --set train_images=1000 --set crowding=15",
    )
    scenes.add_argument("folder", type=Path, help="the folder to make")
    add_set(scenes)

    check = command(
        actions,
        "check",
        run_check,
        help="find everything that is wrong with a COCO data set; exit code 1 if training would fail",
        example="uniquery data check annotations/train.json images/train",
    )
    check.add_argument("annotations", type=Path, help="a COCO json, of instances or panoptic")
    check.add_argument("images", type=Path, help="the folder that its file names are relative to")
    check.add_argument(
        "pngs",
        type=Path,
        nargs="?",
        help="the PNG files of panoptic annotations (default: the path of the json without its ending)",
    )
    check.add_argument(
        "--headers-only", action="store_true", help="do not decode images: faster, but does not find truncated files"
    )

    preview = command(
        actions,
        "preview",
        run_preview,
        help="draw samples as training gets them, each row one image: as it is, then augmented",
        example="uniquery data preview demo --train annotations/train.json images -o preview.png",
    )
    preview.add_argument("config", help="a yaml file or the name of a configuration that comes with uniquery")
    add_split(preview, "--train", "the data to draw (default: data.train of the configuration)")
    preview.add_argument(
        "-o", "--output", type=Path, default=Path("preview.png"), help="the picture (default: %(default)s)"
    )
    preview.add_argument(
        "--images", type=positive, default=4, help="how many images, one per row (default: %(default)s)"
    )
    add_set(preview)


def run_make_scenes(args: argparse.Namespace) -> None:
    from uniquery.data.scenes import ScenesConfig, make_scenes
    from uniquery.settings import validate_settings
    from uniquery.training.config_files import parse_override

    config = validate_settings(ScenesConfig, dict(parse_override(text) for text in args.set), where="--set")
    make_folder(args.folder.parent)
    with progress_bar("drawing scenes") as progress:
        files = make_scenes(args.folder, config, progress)
    Console().print(f"{config.train_images} + {config.val_images} scenes are in {files.root}.")


def run_check(args: argparse.Namespace) -> int:
    from uniquery.data.check import check_data

    with progress_bar("reading images") as progress:
        report = check_data(
            args.annotations, args.images, pngs=args.pngs, read_pixels=not args.headers_only, progress=progress
        )
    _print_report(report, Console())
    return 0 if report.is_valid else 1


def _print_report(report: DataReport, console: Console) -> None:
    console.print(
        f"{report.images} images, {report.instances} instances"
        f"{'' if report.stuff is None else f' ({report.stuff} of them stuff)'}, {report.crowd} crowd regions; "
        f"at most {report.max_instances} instances in an image"
    )
    for title, table in (
        ("instances of class", report.classes),
        ("area", report.areas),
        ("instances per image", report.counts),
    ):
        console.print(_histogram(title, table))
    kinds = Counter((p.kind, p.fatal) for p in report.problems)
    for (kind, fatal), count in kinds.most_common():
        console.print(f"{'[red]error[/]' if fatal else '[yellow]warning[/]'}: {kind}, {count} times")
        for text in [p.text for p in report.problems if p.kind == kind and p.fatal == fatal][:MAX_PROBLEMS]:
            console.print(f"    {text}", highlight=False, markup=False)
    console.print(f"[{'green' if report.is_valid else 'red'}]{report.verdict}[/]")


def _histogram(title: str, counts: dict[str, int], rows: int = 40) -> Table:
    table = Table(title, "count", "", box=None, title_justify="left")
    largest = max(counts.values(), default=0) or 1
    for name, count in list(counts.items())[:rows]:
        table.add_row(name, str(count), "█" * round(30 * count / largest))
    if len(counts) > rows:
        table.add_row(f"and {len(counts) - rows} more", "", "")
    return table


def run_preview(args: argparse.Namespace) -> None:
    from uniquery.data.open import open_data
    from uniquery.report.drawings import png_bytes
    from uniquery.report.preview import preview_picture
    from uniquery.training.config import load_config

    config = load_config(args.config, [*split_overrides("train", args.train), *args.set])
    if config.data.train is None:
        raise ConfigError("There is no data to preview: give --train ANNOTATIONS IMAGES.")
    data = open_data(
        config.data.train.annotations,
        config.data.train.images,
        pngs=config.data.train.panoptic_pngs,
        classes=config.data.classes,
        ignore_crowd=config.data.ignore_crowd,
    )
    picture = preview_picture(data, config.data.augment, config.seed, args.images, config.data.flip_pairs)
    write_atomically(args.output, png_bytes(picture))
    Console().print(f"{args.output}: each image as it is, then as in epochs 0 to 3; hatched regions are ignored.")
