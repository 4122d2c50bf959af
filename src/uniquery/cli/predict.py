"""`uniquery predict`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uniquery.cli.options import MODEL_HELP, add_device, command, positive, print_warning, probability, progress_bar
from uniquery.errors import DataError, UserError

if TYPE_CHECKING:
    from uniquery.evaluation.tiles import Tiling
    from uniquery.model import Model

FORMATS = ("coco", "png", "overlay", "yolo", "labelme", "geojson")
DEFAULT_FORMATS = FORMATS[:3]
SCORE_THRESHOLD = 0.5  # of `Model.predict`
OVERLAP = 0.2  # of `Tiling`


def add_parser(commands: Any) -> None:
    parser = command(
        commands,
        "predict",
        run,
        example="uniquery predict runs/cells photos/ 'more/*.png' --output predictions --score 0.4",
    )
    parser.add_argument("model", type=Path, help=MODEL_HELP)
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
        "--format",
        "--formats",
        dest="formats",
        metavar="FORMAT",
        nargs="+",
        choices=FORMATS,
        default=DEFAULT_FORMATS,
        help="what to write: coco (results json), png (label maps), overlay (pictures), yolo (segmentation), labelme, "
        "geojson (with holes) (default: coco png overlay)",
    )
    parser.add_argument(
        "--short",
        type=positive,
        help="the short side in pixels to which images are resized; the limit of the long side changes by the same "
        "factor (default: the model's own test size)",
    )
    parser.add_argument(
        "--tile",
        type=positive,
        metavar="PIXELS",
        help="predict images of any size in square tiles of this side, about that of the training images; each tile is "
        "resized like an image (default: whole images)",
    )
    parser.add_argument(
        "--overlap",
        type=probability,
        help=f"the share of its side that a tile has in common with the next one (default: {OVERLAP})",
    )
    parser.add_argument(
        "--seam-check",
        action="store_true",
        help="predict again with the seams of the tiles moved, and print how much the results differ",
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
    if args.panoptic and args.tile is not None:
        raise UserError("--tile is for instances: leave it out with --panoptic.")
    names = ("score", "mask_threshold") if args.panoptic else ("object_threshold", "overlap_threshold")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if given:
        reason = "is for instances: leave it out with --panoptic" if args.panoptic else "needs --panoptic"
        raise UserError(f"{', '.join(given)} {reason}.")


def _tiling(args: argparse.Namespace) -> Tiling | None:
    from uniquery.evaluation.tiles import Tiling

    if args.tile is not None:
        return Tiling(args.tile, OVERLAP if args.overlap is None else args.overlap)
    if args.overlap is not None or args.seam_check:
        raise UserError("--overlap and --seam-check are for tiles: add --tile, such as --tile 1024.")
    return None


def _print_seam_errors(args: argparse.Namespace, model: Model, files: list[Path], tiling: Tiling) -> None:
    """How much the instances of each readable image depend on where the seams are."""
    from uniquery.evaluation.tiles import seam_error

    for file in files:
        try:
            with progress_bar(f"seams of {file.name}") as progress:
                error, count = seam_error(
                    lambda cut, file=file, progress=progress: model.predict_tiles(  # type: ignore[misc]
                        file,
                        cut,
                        score_threshold=args.score,
                        mask_threshold=args.mask_threshold,
                        short=args.short,
                        progress=progress,
                    ),
                    tiling,
                )
        except DataError:  # it is listed as left out
            continue
        print(f"{file}: seam error {100 * error:.1f} % of {count} instances (1 − PQ with seams moved by half a tile)")


def _write_instances(args: argparse.Namespace, model: Model, files: list[Path], unreadable: list[str]) -> int:
    from uniquery.report.predictions import write_predictions

    tiling = _tiling(args)
    with progress_bar("predicting") as progress:
        count = write_predictions(
            model,
            files,
            args.output,
            formats=args.formats,
            score_threshold=args.score,
            mask_threshold=args.mask_threshold,
            short=args.short,
            tiling=tiling,
            progress=progress,
            on_unreadable=unreadable.append,
            note=print_warning,
        )
    if args.seam_check and tiling is not None:
        _print_seam_errors(args, model, files, tiling)
    return count


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
