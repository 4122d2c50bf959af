"""`uniquery export`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from uniquery.cli.options import MODEL_HELP, add_split, command, progress_bar
from uniquery.errors import UserError
from uniquery.files import write_atomically

RUNTIMES = ("onnxruntime", "openvino")


def add_parser(commands: Any) -> None:
    parser = command(commands, "export", run, example="uniquery export runs/cells cells.onnx")
    parser.add_argument("model", type=Path, help=MODEL_HELP)
    parser.add_argument("output", type=Path, help="the ONNX file to write")
    add_split(
        parser, "--data", "COCO json and image folder that both models are run on (default: the run's validation data)"
    )
    parser.add_argument(
        "--check-with",
        nargs="+",
        choices=RUNTIMES,
        default=RUNTIMES[:1],
        help="what runs the exported model in the check (default: onnxruntime)",
    )


def run(args: argparse.Namespace) -> None:
    from uniquery.data.dataset import is_panoptic
    from uniquery.export.onnx_file import check_installed, to_onnx
    from uniquery.export.proof import MAX_AP_DIFFERENCE, compare_models, summary_lines
    from uniquery.export.runtimes import open_exported
    from uniquery.training.model_and_data import open_model_and_data

    if not args.output.absolute().parent.is_dir():
        raise UserError(f"There is no folder {args.output.parent} to write {args.output.name} into.")
    for runtime in args.check_with:
        check_installed(runtime, extra="export" if runtime == "onnxruntime" else "openvino")
    console = Console()
    trained = open_model_and_data(args.model, args.data)
    if is_panoptic(trained.info.categories):
        raise UserError(f"{args.model} was trained on panoptic data, but an exported model predicts instances only.")
    with console.status("exporting"):
        content = to_onnx(trained.model, trained.info)
    for runtime in args.check_with:
        with progress_bar(f"checking with {runtime}", console) as progress:
            proof = compare_models(
                trained.model,
                open_exported(content, runtime),
                trained.data,
                trained.info.test_size,
                max_detections=trained.max_detections,
                protocol=trained.protocol,
                progress=progress,
            )
        for line in summary_lines(proof, runtime):
            console.print(line, highlight=False)
        if not proof.is_equal:
            raise UserError(
                f"{args.output} is not written: with {runtime}, the AP differs by {proof.ap_difference:.2f}, and more "
                f"than {MAX_AP_DIFFERENCE} means that the exported model is not the same."
            )
    write_atomically(args.output, content)
    print(f"written to {args.output} ({len(content) / 1e6:.1f} MB)")
