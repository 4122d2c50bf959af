"""`uniquery predict`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from uniquery.cli.options import add_device, command, positive, print_warning, probability, progress_bar

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
        default=SCORE_THRESHOLD,
        help="leave out instances with a lower score (default: %(default)s)",
    )
    parser.add_argument(
        "--mask-threshold",
        type=probability,
        help="the smallest probability of a mask's pixel (default: the model's own)",
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
    add_device(parser)


def run(args: argparse.Namespace) -> int:
    from uniquery.model import load
    from uniquery.report.predictions import find_images, write_predictions

    model = load(args.model, device=args.device)
    files, unreadable = find_images(args.inputs), list[str]()
    with progress_bar("predicting") as progress:
        instances = write_predictions(
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
    print(f"{instances} instances in {len(files) - len(unreadable)} images, written to {args.output}")
    for sentence in unreadable:
        print_warning(f"left out: {sentence}")
    return 1 if unreadable else 0
