"""`uniquery data`."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from uniquery.cli.options import (
    add_set,
    add_split,
    command,
    not_negative,
    positive,
    probability,
    progress_bar,
    split_overrides,
)
from uniquery.errors import ConfigError, UserError
from uniquery.files import make_folder, write_atomically

if TYPE_CHECKING:
    from uniquery.data.check import DataReport
    from uniquery.data.importing import ImportReport

MAX_PROBLEMS = 8
"""How many problems of one kind are printed."""
IMPORT_FORMATS = ("yolo", "masks", "voc", "cvat", "label-studio")
MAX_EXAMPLES = 3
"""How many dropped things of one kind are printed."""


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

    _add_import(actions)
    _add_split(actions)

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


def _add_import(actions: Any) -> None:
    parser = command(
        actions,
        "import",
        run_import,
        help="write annotations of another tool as COCO json, with their images, into a new folder",
        example="uniquery data import cvat annotations.xml images --output data/cells",
    )
    parser.add_argument(
        "format",
        metavar="FORMAT",
        choices=IMPORT_FORMATS,
        help="yolo (segmentation), masks (image files of instance ids, or one per instance), voc (SegmentationObject), "
        "cvat (xml for images) or label-studio (json)",
    )
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        type=Path,
        help="yolo: data.yaml [FOLDER]; masks: IMAGES MASKS, or one folder with images/ and masks/ per image; voc: "
        "FOLDER; cvat: annotations.xml [IMAGES]; label-studio: export.json IMAGES",
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("imported"), help="the folder to make (default: %(default)s)"
    )
    parser.add_argument("--class", dest="class_name", help="masks: the class of all instances (default: object)")


def _add_split(actions: Any) -> None:
    parser = command(
        actions,
        "split",
        run_split,
        help="divide a COCO json into training and validation data, by image",
        example="uniquery data split data/cells/annotations.json --val 0.2 --seed 0",
    )
    parser.add_argument("annotations", type=Path, help="a COCO json of instances")
    parser.add_argument(
        "--val", type=probability, default=0.2, help="share of the images for validation (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=not_negative, default=0, help="another seed, another split (default: %(default)s)"
    )
    parser.add_argument(
        "--group",
        metavar="REGEX",
        help="keep images together whose file names agree in the part that this regular expression finds (in its first "
        "group, if it has one), such as '^patient[0-9]+' (default: each image alone)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="folder for train.json and val.json (default: that of the annotations)"
    )


def run_import(args: argparse.Namespace) -> None:
    from uniquery.data.importing import DEFAULT_CLASS, import_data

    if args.class_name is not None and args.format != "masks":
        raise UserError("--class is for masks, which name no class: leave it out.")
    with progress_bar("reading annotations") as progress:
        report = import_data(
            args.format, args.sources, args.output, class_name=args.class_name or DEFAULT_CLASS, progress=progress
        )
    _print_import(report, args.output, Console())


def _print_import(report: ImportReport, output: Path, console: Console) -> None:
    for split, images in report.images.items():
        name = f"{split}: " if split else ""
        console.print(f"{name}{images} images, {report.instances[split]} instances")
    console.print(_histogram("instances of class", report.classes))
    for title, entries in (("[yellow]dropped[/]", report.dropped), ("[yellow]note[/]", report.notes)):
        for reason, places in entries.items():
            console.print(f"{title}: {len(places)} × {escape(reason)}", highlight=False)
            for place in places[:MAX_EXAMPLES]:
                console.print(f"    {place}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Written to {output}.", soft_wrap=True)
    if "train" not in report.images:
        console.print(f"Divide it: uniquery data split {output / 'annotations.json'}", soft_wrap=True)
    console.print(f"Train on it: uniquery train CONFIG --dataset {output}", soft_wrap=True)


def run_split(args: argparse.Namespace) -> None:
    from uniquery.data.split import split_annotations

    report = split_annotations(args.annotations, share=args.val, seed=args.seed, group=args.group, output=args.output)
    console = Console()
    for part in report:
        groups = f" in {part.groups} groups" if args.group else ""
        console.print(f"{part.file}: {part.images} images{groups}, {part.instances} instances", soft_wrap=True)
    table = Table("instances of class", *(part.file.stem for part in report), box=None)
    for name in report[0].classes:
        table.add_row(escape(name), *(str(part.classes[name]) for part in report))
    console.print(table)


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
        bit_depth=config.data.bit_depth,
    )
    picture = preview_picture(data, config.data.augment, config.seed, args.images, config.data.flip_pairs)
    write_atomically(args.output, png_bytes(picture))
    Console().print(f"{args.output}: each image as it is, then as in epochs 0 to 3; hatched regions are ignored.")
