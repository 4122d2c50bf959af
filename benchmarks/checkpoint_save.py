"""How long saving a checkpoint holds up training, against a plain copy of the same bytes.

    python benchmarks/checkpoint_save.py [--backbone resnet50] [--folder .]

CondInst with momentum and a full memory of 100 000 × 256 float32. The copy reads files that are in memory already,
writes them and waits for the disk, as saving does; both take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from uniquery import files
from uniquery.backbones import BackboneConfig
from uniquery.data.dataset import Category
from uniquery.querying import InstancePixels, UniqueQuerying
from uniquery.segmenters import build_segmenter
from uniquery.training.checkpoint import load_trainer_state, save_checkpoint
from uniquery.training.config import Config
from uniquery.training.optim import build_optimizer
from uniquery.training.run import TrainingRun
from uniquery.weights import checksummed
from uniquery.weights.model_file import ModelInfo

CAPACITY, CHANNELS = 100_000, 256


def prepared_run(backbone: str) -> TrainingRun:
    config = Config.model_validate(
        {"backbone": {"name": backbone, "weights": "random"}, "querying": {"inter": {"capacity": CAPACITY}}}
    )
    model = build_segmenter(config.model, config.backbone, 80)
    objective, optimizer = UniqueQuerying(model, config.querying.inter), build_optimizer(model, config.optim, 16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    ids = torch.arange(CAPACITY)
    objective.memory.push(InstancePixels(torch.randn(CAPACITY, CHANNELS), torch.rand(CAPACITY, 2), ids, ids, ids >= 0))
    categories = tuple(Category(i, str(i)) for i in range(80))
    info = ModelInfo(config.model, BackboneConfig(name=backbone, weights="random"), categories, config.data.test_size)
    return TrainingRun(config, info, model, objective, objective, optimizer, None, steps=1, device=torch.device("cpu"))


def save(run: TrainingRun, folder: Path) -> None:
    save_checkpoint(folder, run.eval_state_dict(), run.info, run.trainer_state(), keep=1)


def copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
    for file in (*target.iterdir(), target):
        files._fsync(file)


@contextmanager
def timed(times: dict[str, float]) -> Iterator[None]:
    """Adds up the seconds of the parts of a save."""

    def spy(name: str, work: object) -> object:
        def timed_work(*arguments: object, **named: object) -> object:
            began = time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                times[name] = times.get(name, 0.0) + time.perf_counter() - began

        return timed_work

    with (
        mock.patch.object(checksummed, "_write_all", spy("write", checksummed._write_all)),
        mock.patch.object(checksummed.zlib, "crc32", spy("checksum", zlib.crc32)),
        mock.patch.object(files, "_fsync", spy("wait for the disk", files._fsync)),
        mock.patch.object(files.shutil, "rmtree", spy("remove the oldest", shutil.rmtree)),
    ):
        yield


def measure(run: TrainingRun, folder: Path, repeats: int) -> dict[str, object]:
    save(run, folder / "last")
    size = sum(file.stat().st_size for file in (folder / "last").iterdir())
    saves, copies, parts = [], [], []
    for n in range(repeats):
        os.sync()
        times: dict[str, float] = {}
        began = time.perf_counter()
        with timed(times):
            save(run, folder / "last")
        saves.append(time.perf_counter() - began)
        parts.append(times)
        os.sync()
        began = time.perf_counter()
        copy(folder / "last", folder / f"copy{n}")
        copies.append(time.perf_counter() - began)
        shutil.rmtree(folder / f"copy{n}")
    began = time.perf_counter()
    load_trainer_state(folder / "last")
    return {
        "bytes": size,
        "save": statistics.median(saves),
        "copy": statistics.median(copies),
        "ratio": statistics.median(saves) / statistics.median(copies),
        "best save": min(saves),
        "best copy": min(copies),
        "best ratio": min(saves) / min(copies),
        "parts": {name: statistics.median(p[name] for p in parts) for name in parts[0]},
        "read and verify": time.perf_counter() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; by default where temporary files go")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    run = prepared_run(args.backbone)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = measure(run, Path(folder), args.repeats)
    table = Table("", "median", "best", title=f"saving {found['bytes'] / 1e6:.0f} MB, seconds of {args.repeats} times")
    for name in ("save", "copy"):
        table.add_row(name, f"{found[name]:.3f}", f"{found[f'best {name}']:.3f}")
    for name, seconds in found["parts"].items():
        table.add_row(f"  of a save: {name}", f"{seconds:.3f}")
    table.add_row("read and verify", f"{found['read and verify']:.3f}")
    ratios = f"{found['ratio']:.2f} times as long as the copy (median), {found['best ratio']:.2f} (best)"
    Console().print(table, f"A save takes {ratios}; its checksums are taken beside the writing.")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
