"""Runs a study: each training in a process of its own, resumable run by run and inside a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from uniquery.errors import UserError
from uniquery.files import make_folder, write_atomically
from uniquery.signals import stop_requests
from uniquery.study.plan import PlannedRun
from uniquery.study.results import RunResult, read_result, result_file
from uniquery.training.config import to_yaml
from uniquery.training.run_folder import RunFolder

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error.

    Attributes:
        run: which.
        reason: the last line that it wrote, or the signal that ended it.
        log: the file.
    """

    run: PlannedRun
    reason: str
    log: Path


def finished_result(run: PlannedRun, output: Path) -> RunResult | None:
    """The result of a run, or None if it has none yet.

    Raises:
        UserError: the result was made with other settings, or its file is damaged.
    """
    result = read_result(result_file(output, run))
    if result is not None and result.key != run.key:
        raise UserError(
            f"{result_file(output, run)} was made with other settings than the study has now: choose another --output, "
            "or remove it and its run folder to run it again."
        )
    # A variant that was renamed within its file name keeps its results.
    return result and result.model_copy(update={"data": run.data, "variant": run.variant})


def runs_left(runs: Sequence[PlannedRun], output: Path) -> list[PlannedRun]:
    """The runs without a result, after the bases that they start from and whose weights are no longer there.

    Raises:
        UserError: a result, or a run in progress, was made with other settings.
    """
    left = [run for run in runs if finished_result(run, output) is None]
    for run in left:
        _check_progress(run, output)
    bases = {run.start.name: run.start for run in left if run.start and not _has_weights(run.start, output)}
    return [*bases.values(), *(run for run in left if run.name not in bases)]


def _check_progress(run: PlannedRun, output: Path) -> None:
    task = _task_file(run, output)
    if not run.config.folder.is_dir() or not task.is_file():
        return
    try:
        key = json.loads(task.read_bytes())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{task} is damaged: remove it if {run.config.folder} was started with the study's settings, else both."
        ) from None
    if key != run.key:
        raise UserError(
            f"The unfinished run {run.config.folder} was started with other settings than the study has now: choose "
            "another --output, or remove it to start it again."
        )


def _has_weights(base: PlannedRun, output: Path) -> bool:
    return finished_result(base, output) is not None and RunFolder(base.config.folder).last.is_dir()


def run_study(
    runs: Sequence[PlannedRun],
    output: Path,
    *,
    diagnose_images: int,
    jobs: int = 1,
    report: Callable[[PlannedRun, str], None] = lambda *_: None,
) -> list[Failure]:
    """Executes every run that has no result yet; a failed run does not stop the others.

    Args:
        runs: of the study, bases before the runs that start from them.
        output: folder of the study.
        diagnose_images: for `diagnose` of each run.
        jobs: how many run at the same time.
        report: called with a run and "started", "done" or "failed".

    Returns:
        The runs that failed.

    Raises:
        KeyboardInterrupt: SIGINT came, and all running trainings have written a checkpoint.
        SystemExit: SIGTERM came, likewise.
    """
    for folder in ("configs", "logs", "results", "runs"):
        make_folder(output / folder)
    waiting = runs_left(runs, output)
    failed: list[Failure] = []
    running: dict[str, tuple[PlannedRun, subprocess.Popen[bytes]]] = {}
    with stop_requests() as stop:
        try:
            while (waiting or running) and not stop:
                while len(running) < jobs and (run := _next_ready(waiting, {*running, *(f.run.name for f in failed)})):
                    waiting.remove(run)
                    running[run.name] = run, _start(run, output, diagnose_images, jobs)
                    report(run, "started")
                if not running and waiting:  # their base failed
                    failed += [
                        Failure(run, "the base that it starts from failed", _log(run, output)) for run in waiting
                    ]
                    break
                time.sleep(_POLL_SECONDS)
                for name, (run, process) in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        succeeded = process.returncode == 0
                        if not succeeded:
                            log = _log(run, output)
                            failed.append(Failure(run, _reason(process.returncode, log), log))
                        report(run, "done" if succeeded else "failed")
        finally:
            _stop([process for _, process in running.values()])
    if stop:
        stop.exit()
    return failed


def threads_per_run(jobs: int) -> int | None:
    """Threads of each of several runs at a time; None: torch decides, or the user, who has set OMP_NUM_THREADS."""
    return max(1, (os.cpu_count() or 1) // jobs) if jobs > 1 and "OMP_NUM_THREADS" not in os.environ else None


def _next_ready(waiting: Sequence[PlannedRun], unfinished: Set[str]) -> PlannedRun | None:
    """The first run whose base is neither waiting nor running nor failed."""
    unfinished = unfinished | {run.name for run in waiting}
    return next((run for run in waiting if run.start is None or run.start.name not in unfinished), None)


def _start(run: PlannedRun, output: Path, diagnose_images: int, jobs: int) -> subprocess.Popen[bytes]:
    config, task = output / "configs" / f"{run.name}.yaml", _task_file(run, output)
    write_atomically(config, to_yaml(run.config))
    values = {"data": run.data, "variant": run.variant, "seed": run.seed, "key": run.key}
    values |= {"result": str(result_file(output, run)), "diagnose_images": diagnose_images if run.variant else 0}
    write_atomically(task, json.dumps(values))
    command = [sys.executable, "-m", "uniquery.study.worker", str(config), str(task)]
    environment = {"OMP_NUM_THREADS": str(threads)} if (threads := threads_per_run(jobs)) else {}
    environment |= os.environ
    with _log(run, output).open("ab") as log:
        # A session of its own: Ctrl-C reaches only this process, which then asks each run to stop once.
        return subprocess.Popen(  # noqa: S603 (our own module)
            command, stdout=log, stderr=log, start_new_session=True, env=environment
        )


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Asks trainings to write a checkpoint and end, and waits."""
    for process in processes:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
    for process in processes:
        process.wait()


def _task_file(run: PlannedRun, output: Path) -> Path:
    return output / "configs" / f"{run.name}.json"


def _log(run: PlannedRun, output: Path) -> Path:
    return output / "logs" / f"{run.name}.log"


def _reason(returncode: int, log: Path) -> str:
    if returncode < 0:
        hint = ", perhaps because memory ran out" if -returncode == signal.SIGKILL else ""
        return f"it was ended by {signal.Signals(-returncode).name}{hint}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
