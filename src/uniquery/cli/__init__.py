"""The command line: one file per command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection
from importlib import import_module

from uniquery import __version__
from uniquery.errors import UserError

# Threads that wait by spinning make a step five times slower as soon as anything else runs on the machine; threads that
# sleep at once are slow to wake for the next small operation. A short spin does neither. OpenMP reads this once, when
# torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# The name of each command is that of its module.
COMMANDS = {
    "demo": "make a data set of drawn scenes, train a segmenter on it without and with the method, and compare both",
    "train": "train a segmenter on a COCO-format data set",
    "eval": "score a model on a COCO data set, or a results json of any program",
    "predict": "find instances in images: COCO json, label maps, overlays",
    "export": "write a model as an ONNX file, after a check that it predicts the same",
    "diagnose": "measure how queries respond to other images, and how well predictions follow transformations",
    "study": "train variants of a setting with several seeds, and say whether they help, with intervals",
    "paper": "list the rows of the paper's tables with their figures, and print the commands of a row",
    "report": "write one html page of curves, tables and pictures of a run, or compare several runs",
    "explore": "open a local web page: a gallery, the response of queries, pictures of your own, runs that train",
    "config": "show or list configurations",
    "data": "import, split, make, check or preview data",
    "push": "upload a model to the Hugging Face Hub, with a page about it",
    "weights": "convert models to the names of other projects, and their checkpoints to models",
}


def build_parser(names: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        names: the commands whose options it has; the others are only listed. Importing the module of a command also
            imports torch, which takes seconds.
    """
    parser = argparse.ArgumentParser(
        prog="uniquery", description="Train, evaluate and use query-based instance segmenters on COCO-format data."
    )
    parser.add_argument("--version", action="version", version=f"uniquery {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, sentence in COMMANDS.items():
        if name in names:
            import_module(f"uniquery.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=sentence)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs a command: 0 done, 1 a check failed or another process ended, 2 bad input, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = build_parser(arguments).parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except UserError as error:
        print(f"error{_in_process()}: {error}", file=sys.stderr)
        return 2
    except PermissionError as error:
        print(f"error: No permission for {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        from uniquery.training.distributed import is_lost_connection

        if not is_lost_connection(error):
            raise
        print(f"error{_in_process()}: Another process ended first; its error message is the cause.", file=sys.stderr)
        return 1


def _in_process() -> str:
    """Which of torchrun's processes prints, if there are several."""
    return f" in process {os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
