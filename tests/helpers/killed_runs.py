"""The command line in processes of their own, which may be killed at any moment; a module that they can import."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from uniquery.cli import main

_LATE_IMPORTS = ("torch._dynamo", "torch.distributed.tensor")  # of torch's own, seconds in the first step
ALGORITHM = ["querying.inter={capacity: 40, sampling: {count: 3}}", "querying.equivariance={}"]


def start(arguments: list[str], output: Path) -> BaseProcess:
    """`uniquery …` in a process that is forked from one where everything is imported; its output goes to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["uniquery.training.loop", "uniquery.report.build", *_LATE_IMPORTS])
    process = context.Process(target=_run, args=(arguments, output))
    process.start()
    return process


def _run(arguments: list[str], output: Path) -> None:
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # as it is for a command, here for its data workers
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    torch.set_num_threads(1)
    sys.exit(main(arguments))


def train_to_the_end(config: Path, *settings: str) -> None:
    """An undisturbed run."""
    process = start(arguments(config, *settings), config.with_name("whole.txt"))
    process.join(120)
    assert process.exitcode == 0, config.with_name("whole.txt").read_text()


def train_with_kills(config: Path, run: Path, kills: int, *settings: str) -> None:
    """Kills a run that saves every step `kills` times, each some steps and moments after it was resumed."""
    rng, output = random.Random(0), config.with_name("killed.txt")
    for life in range(kills + 1):
        workers = f"data.workers={life % 2}"  # must not matter
        process = start([*arguments(config, *settings, workers), "--resume", "auto"], output)
        if life < kills:
            wait_for_step(run, saved_step(run) + rng.randint(0, 2), process)
            time.sleep(rng.uniform(0, 0.2))
            assert process.is_alive(), f"life {life} ended by itself: {output.read_text()[-2000:]}"
            os.killpg(process.pid, signal.SIGKILL)  # with its data workers, which would live some seconds longer
        process.join(120)
    assert process.exitcode == 0, output.read_text()[-2000:]


def wait_for_step(run: Path, step: int, process: BaseProcess) -> None:
    """Waits for the checkpoint of a step; at least until the process has started."""
    begin = time.monotonic()
    time.sleep(0.1)
    while saved_step(run) < step and process.is_alive():
        assert time.monotonic() < begin + 60, f"step {step} does not come"
        time.sleep(0.005)


def saved_step(run: Path) -> int:
    """The step of the last checkpoint, 0 without one; it may be in the middle of a rename."""
    for name in ("last", ".last.old", "last.1"):
        with suppress(OSError, ValueError):
            return int(json.loads((run / name / "trainer.json").read_text())["step"])
    return 0


def arguments(config: Path, *settings: str) -> list[str]:
    """Of `uniquery train`."""
    return ["train", str(config), *(part for setting in settings for part in ("--set", setting))]


def run_content(run: Path) -> dict[str, Any]:
    """The files of a run that must be bit-identical in two equal runs, without times."""
    names = ("last/model.safetensors", "last/trainer.safetensors", "best/model.safetensors", "predictions.json")
    files = {name: (run / name).read_bytes() for name in names}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seconds")
    return {**files, "trainer.json": json.loads((run / "last" / "trainer.json").read_text()), "metrics": lines}


def wait_for(condition: Callable[[], bool], output: Path, seconds: float = 40.0) -> None:
    """Waits for a condition; fails with the content of `output`."""
    end = time.monotonic() + seconds
    while not (output.exists() and condition()):
        assert time.monotonic() < end, output.read_text() if output.exists() else "nothing was printed"
        time.sleep(0.02)


def children(pid: int) -> list[str]:
    """Process ids of a process's children."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
