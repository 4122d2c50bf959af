"""What a run prints: on a narrow terminal, in a log file, after an evaluation."""

import io
import json
import re
import shlex
import sys

import pytest
from rich.console import Console

import uniquery
from helpers.small_runs import small_config
from uniquery.training import loop
from uniquery.training.config import load_config
from uniquery.training.console import RemainingTime, training_progress

NOTE = "loss 3.687 (class 1.123, box 0.400, centerness 0.664, mask 1.500)  2.29 s/step (data 0.64)  lr 0.0019"


@pytest.mark.parametrize(("width", "is_cut"), [(60, True), (80, True), (200, False)])
def test_a_narrow_terminal_cuts_the_note_and_not_the_times(width, is_cut):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True)
    progress = training_progress(console)
    task = progress.add_task("train", total=100_000, completed=0, note=NOTE)
    progress.update(task, completed=50_000)
    progress.tasks[0].start_time = progress.get_time() - 7200
    console.print(progress.make_tasks_table(progress.tasks))
    (line,) = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()).splitlines() if line.strip()]
    assert "50000/100000" in line
    assert "2:00:00" in line
    assert re.search(r"2:00:0\d +(\d+:\d\d:\d\d|-:--:--) ", line)
    assert line.rpartition(":")[2].partition(" ")[2].startswith("lo")
    assert (NOTE not in line) == is_cut
    assert ("…" in line) == is_cut


def test_the_remaining_time_is_that_of_the_steps_so_far(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("uniquery.training.console.time.monotonic", lambda: now[0])
    remaining = RemainingTime(step=20)
    now[0] += 30
    assert remaining(30, 1030) == "0:50:00"  # 3 seconds a step
    assert remaining(1030, 1030) == "0:00:00"


def test_lines_of_a_log_file(scenes, tmp_path, monkeypatch):
    given = ["python", "-m", "uniquery", "train", "my data/a b.yaml", "--set", "x=[1, 2]"]
    monkeypatch.setattr(sys, "orig_argv", given)
    console = Console(file=io.StringIO(), width=40)
    config = load_config(small_config(tmp_path, scenes), ["train.steps=4", "model.score_threshold=0"])
    loop.train(config, console=console)
    lines = console.file.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step 2/4 ")]
    term, rest = r"[a-z]+ \d+\.\d{3}", r"[\d.]+ s/step \(data [\d.]+\)  lr [\de.-]+  ETA 0:\d\d:\d\d"
    assert len(steps) == 1
    assert re.fullmatch(rf"step 2/4  loss \d\.\d{{3}} \({term}(, {term})*\)  {rest}", steps[0])
    assert all(name in steps[0] for name in ("class", "box", "centerness", "mask"))
    best = [line for line in lines if "new best AP" in line]
    assert best[0].startswith("step 2: new best AP ")
    assert best[0].endswith(f", saved in {config.folder / 'best'}")
    command = json.loads((config.folder / "environment.json").read_text())["command"]
    assert shlex.split(command) == given


def test_a_score_that_is_not_better_is_not_announced(scenes, tmp_path, monkeypatch):
    console = Console(file=io.StringIO(), width=200)
    config = load_config(small_config(tmp_path, scenes), ["train.steps=4", "optim.lr=1.0e-12", "train.ema=null"])
    loop.train(config, console=console)
    assert console.file.getvalue().count("new best") == 1  # the first; the same weights once more are no better


def test_training_from_python_leaves_a_report(scenes, tmp_path):
    folder = uniquery.train(load_config(small_config(tmp_path, scenes), ["train.steps=1"]))
    assert "<svg" in (folder / "report.html").read_text()
