"""`uniquery predict`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uniquery.cli.options import add_device, command, positive, print_warning, probability, progress_bar
from uniquery.errors import UserError

if TYPE_CHECKING:
    from uniquery.model import Model

FORMATS = ("json", "png", "overlay")
SCORE_THRESHOLD = 0.5  # of `Model.predict`


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        run,
        example="uniquery predict runs/cells photos/ 'more/*.png' --output predictions --score 0.4",
    )
    parser.add_argument("model", type=Path, help="a run folder, a checkpoint folder or a model file")
    parser.add_argument(
        "inputs", nargs="+", help="image files, folders (with their subfolders) or quoted glob patterns"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("predictions"),
        help="the folder to write into (default: %(default)s)",
    )
    parser.add_argument(
        "--score",
        type=probability,
        help="leave out instances with a lower score (default: the thresholds in the model file, see eval "
        f"--choose-thresholds, else {SCORE_THRESHOLD})",
    )
    parser.add_argument(
        "--mask-threshold",
        type=probability,
        help="the smallest probability of a mask's pixel (default: that in the model file, else the segmenter's own)",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=FORMATS,
        default=FORMATS,
        help="what to write: COCO json, label maps (png), overlays (default: all)",
    )
    parser.add_argument(
        "--short",
        type=positive,
        help="the short side in pixels to which images are resized; the limit of the long side changes by the same "
        "factor (default: the model's own test size)",
    )
    parser.add_argument(
        "--panoptic",
        action="store_true",
        help="predict things and stuff, and write COCO's panoptic.json and PNG files",
    )
    parser.add_argument(
        "--object-threshold",
        type=probability,
        help="panoptic: the least class score of a segment (default: the model's own)",
    )
    parser.add_argument(
        "--overlap-threshold",
        type=probability,
        help="panoptic: the least share of its area that a mask must keep (default: the model's own)",
    )
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    from uniquery.model import load
    from uniquery.report.predictions import find_images

    _check_options(args)
    model = load(args.model, device=args.device)
    files, unreadable = find_images(args.inputs), list[str]()
    if args.panoptic:
        count = f"{_write_panoptic(args, model, files, unreadable)} segments"
    else:
        count = f"{_write_instances(args, model, files, unreadable)} instances"
    print(f"{count} in {len(files) - len(unreadable)} images, written to {args.output}")
    for sentence in unreadable:
        print_warning(f"left out: {sentence}")
    return 1 if unreadable else 0


def _check_options(args: argparse.Namespace) -> None:
    """Raises if an option is given that the kind of prediction does not have."""
    names = ("score", "mask_threshold") if args.panoptic else ("object_threshold", "overlap_threshold")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        reason = "is for instances: leave it out with --panoptic" if args.panoptic else "needs --panoptic"
        raise UserError(f"{', '.join(given)} {reason}.")


def _write_instances(args: argparse.Namespace, model: Model, files: list[Path], unreadable: list[str]) -> int:
    from uniquery.report.predictions import write_predictions

    with progress_bar("predicting") as progress:
        return write_predictions(
            model,
            files,
            args.output,
            formats=args.formats,
            score_threshold=args.score,
            mask_threshold=args.mask_threshold,
            short=args.short,
            progress=progress,
            on_unreadable=unreadable.append,
        )


def _write_panoptic(args: argparse.Namespace, model: Model, files: list[Path], unreadable: list[str]) -> int:
    from uniquery.report.predictions import write_panoptic_predictions

    with progress_bar("predicting") as progress:
        return write_panoptic_predictions(
            model,
            files,
            args.output,
            formats=args.formats,
            object_threshold=args.object_threshold,
            overlap_threshold=args.overlap_threshold,
            short=args.short,
            progress=progress,
            on_unreadable=unreadable.append,
        )
