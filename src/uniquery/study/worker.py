"""One run of a study in a process of its own: train, diagnose, write a small json.

python -m uniquery.study.worker CONFIG.yaml TASK.json
"""

from __future__ import annotations

import fcntl
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from uniquery import __version__
from uniquery.errors import UserError
from uniquery.evaluation.diagnose import diagnose
from uniquery.evaluation.inference import predict_dataset
from uniquery.files import write_atomically
from uniquery.parallel import choose_device
from uniquery.report.runs import RunRecord, load_run
from uniquery.study.results import Evaluation, RunResult
from uniquery.training.config import Config, load_config
from uniquery.training.loop import train
from uniquery.training.memory_use import peak_memory
from uniquery.training.model_and_data import open_model_and_data
from uniquery.training.run_folder import RunFolder


def main(config_file: str, task_file: str) -> int:
    """Trains (or resumes) and writes the result; 0 if all went well, 2 for bad input."""
    task = json.loads(Path(task_file).read_text())
    with exclusive_lock(Path(task_file).with_suffix(".lock")) as waited:
        if waited and Path(task["result"]).is_file():
            return 0
        try:
            config = load_config(Path(config_file))
            folder = RunFolder(train(config, resume="auto", console=Console(width=120)))
            result = finish(folder, task, config)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        write_atomically(Path(task["result"]), result.model_dump_json(indent=1))
    return 0


@contextmanager
def exclusive_lock(path: Path) -> Iterator[bool]:
    """Waits while another process has the lock, which ends with that process; True if it had to wait."""
    with path.open("ab") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            print("Another process trains this run: waiting for it.", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield waited


def finish(folder: RunFolder, task: dict[str, Any], config: Config) -> RunResult:
    """Predictions and diagnosis of the last weights, and the result of the run."""
    device = choose_device(config.train.device)
    peak_bytes = peak_memory(device)  # of the training alone; of a resumed one, since it was resumed
    trained = open_model_and_data(folder.last, None, device)
    (results,) = predict_dataset(
        trained.model,
        trained.data,
        trained.classes,
        trained.info.test_size,
        workers=config.data.workers,
        on_unreadable=(lambda _: None) if config.data.on_unreadable == "skip" else None,  # the training has named them
    ).values()
    write_atomically(folder.final_predictions_file, json.dumps(results))
    diagnosis = {}
    if task["diagnose_images"]:
        diagnosis = diagnose(trained.model, trained.data, trained.info.test_size, task["diagnose_images"]).to_dict()
    record = load_run(folder.path)
    assert record.final is not None, "a run with validation data is evaluated at its end"
    return RunResult(
        **{name: task[name] for name in ("data", "variant", "seed", "key")},
        headline=record.final.headline,
        evaluations=_evaluations(record, 2 if config.querying.has_extra_views else 1),
        diagnosis=diagnosis,
        seconds=sum(record.phase_seconds().values()) + sum(e.seconds or 0.0 for e in record.evals),
        peak_memory_gb=peak_bytes / 1e9,
        versions={
            "uniquery": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": str(device),
            "threads": str(torch.get_num_threads()),
        },
    )


def _evaluations(record: RunRecord, forwards_per_image: int) -> tuple[Evaluation, ...]:
    assert record.final is not None
    forwards_per_step = forwards_per_image * record.images // max(record.steps, 1)
    return tuple(
        Evaluation(step=e.step, images=e.step * forwards_per_step, metrics=e.metrics)
        for e in record.evals
        if e.weights == record.final.weights
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
