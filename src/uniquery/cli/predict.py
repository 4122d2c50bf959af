"""`uniquery predict`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from uniquery.cli.options import add_device, command, positive, progress_bar
from uniquery.errors import UserError
from uniquery.model import SCORE_THRESHOLD, Model, load
from uniquery.report.predictions import FORMATS, find_images, write_panoptic_predictions, write_predictions


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
        type=float,
        help=f"leave out instances with a lower score (default: {SCORE_THRESHOLD})",
    )
    parser.add_argument(
        "--mask-threshold", type=float, help="the smallest probability of a mask's pixel (default: the model's own)"
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
        help="the short side in pixels to which images are resized (default: the model's own test size)",
    )
    parser.add_argument(
        "--panoptic",
        action="store_true",
        help="predict things and stuff, and write COCO's panoptic.json and PNG files",
    )
    parser.add_argument(
        "--object-threshold", type=float, help="panoptic: the least class score of a segment (default: the model's own)"
    )
    parser.add_argument(
        "--overlap-threshold",
        type=float,
        help="panoptic: the least share of its area that a mask must keep (default: the model's own)",
    )
    add_device(parser)


def run(args: argparse.Namespace) -> None:
    _check_options(args)
    model = load(args.model, device=args.device)
    files = find_images(args.inputs)
    if args.panoptic:
        _run_panoptic(args, model, files)
        return
    with progress_bar("predicting") as progress:
        instances = write_predictions(
            model,
            files,
            args.output,
            formats=args.formats,
            score_threshold=SCORE_THRESHOLD if args.score is None else args.score,
            mask_threshold=args.mask_threshold,
            short=args.short,
            progress=progress,
        )
    print(f"{instances} instances in {len(files)} images, written to {args.output}")


def _check_options(args: argparse.Namespace) -> None:
    """Raises if an option is given that the kind of prediction does not have."""
    names = ("score", "mask_threshold") if args.panoptic else ("object_threshold", "overlap_threshold")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        reason = "is for instances: leave it out with --panoptic" if args.panoptic else "needs --panoptic"
        raise UserError(f"{', '.join(given)} {reason}.")


def _run_panoptic(args: argparse.Namespace, model: Model, files: list[Path]) -> None:
    with progress_bar("predicting") as progress:
        segments = write_panoptic_predictions(
            model,
            files,
            args.output,
            formats=args.formats,
            object_threshold=args.object_threshold,
            overlap_threshold=args.overlap_threshold,
            short=args.short,
            progress=progress,
        )
    print(f"{segments} segments in {len(files)} images, written to {args.output}")
