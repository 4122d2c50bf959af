"""Early stopping after evaluations without a new best."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from helpers.coco_files import assert_one_sentence
from helpers.killed_runs import run_content
from helpers.small_runs import small_config
from uniquery.errors import ConfigError
from uniquery.training import loop, validation
from uniquery.training.config import load_config

SETTINGS = ["train.steps=8", "train.eval_every=1", "train.save_every=3", "train.ema=null"]


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture
def scores(monkeypatch):
    """What the evaluations after steps 1, 2, … find, whatever the model does."""
    values: list[float | None] = []
    real = validation._score

    def scored(run, val, results):
        metrics, not_scored = real(run, val, results)
        metrics.values["AP"] = values[run.step - 1]
        return metrics, not_scored

    monkeypatch.setattr(validation, "_score", scored)
    return values


def train(config, **options) -> str:
    """What it prints."""
    console = Console(file=io.StringIO(), width=200)
    loop.train(config, console=console, **options)
    return console.file.getvalue()


def last_step(config) -> int:
    return json.loads((config.folder / "last" / "trainer.json").read_text())["step"]


def test_it_stops_after_evaluations_without_a_new_best(scenes, tmp_path, scores):
    scores += [0.1, 0.3, 0.3, 0.2]
    config = load_config(small_config(tmp_path, scenes), [*SETTINGS, "train.patience=2"])
    printed = train(config)
    assert last_step(config) == 4
    assert "step 4: no new best in 2 evaluations (train.patience): training stops here instead of at step 8." in printed
    again = train(config, resume=True)
    assert "it stopped early. To train on, raise train.patience." in again
    assert last_step(config) == 4


def test_a_new_best_starts_the_count_anew(scenes, tmp_path, scores):
    scores += [0.1, 0.0, 0.2, 0.0, 0.3]
    config = load_config(small_config(tmp_path, scenes), [*SETTINGS, "train.patience=2", "train.steps=5"])
    assert "patience" not in train(config)
    assert last_step(config) == 5


def test_evaluations_that_measure_nothing_do_not_count(scenes, tmp_path, scores):
    scores += [None] * 3
    config = load_config(small_config(tmp_path, scenes), [*SETTINGS, "train.patience=1", "train.steps=3"])
    train(config)
    assert last_step(config) == 3


def test_a_resumed_run_stops_at_the_same_step(scenes, tmp_path, scores, monkeypatch):
    """The checkpoint it resumes from is that of step 3, after which the third evaluation had been counted."""
    scores += [0.1, 0.3, 0.2, 0.2, 0.2, 0.9, 0.9, 0.9]
    whole = load_config(small_config(tmp_path, scenes), [*SETTINGS, "train.patience=3", "name=whole"])
    train(whole)
    assert last_step(whole) == 5
    broken = load_config(small_config(tmp_path, scenes), [*SETTINGS, "train.patience=3", "name=broken"])
    real = loop.Trainer.step

    def dying(trainer, batches):
        if trainer.run.step == 4:
            raise Killed
        real(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", dying)
        with pytest.raises(Killed):
            train(broken)
    train(broken, resume=True)
    assert run_content(broken.folder) == run_content(whole.folder)


def test_patience_may_be_raised_on_resume(scenes, tmp_path, scores):
    scores += [0.5, 0.1, 0.1, 0.1, 0.1]
    path = small_config(tmp_path, scenes)
    train(load_config(path, [*SETTINGS, "train.patience=1"]))
    config = load_config(path, [*SETTINGS, "train.patience=2"])
    train(config, resume=True)
    assert last_step(config) == 3


def test_it_needs_evaluations(scenes, tmp_path):
    path = small_config(tmp_path, scenes)
    with pytest.raises(ConfigError, match="eval_every"):
        load_config(path, ["train.eval_every=null", "train.patience=2"])
    with pytest.raises(ConfigError) as caught:
        train(load_config(path, ["data.val=null", "train.patience=2"]))
    assert_one_sentence(caught.value)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_stop_after_the_same_step(scenes, tmp_path):
    """Only the first knows the scores: here all are 0, so the second evaluation brings no new best."""
    settings = [*SETTINGS, "train.patience=1", "train.batch_size=1", "optim.lr=1.0e-9"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sets = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        [*launcher, "-m", "uniquery", "train", str(small_config(tmp_path, scenes)), *sets],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "step 2: no new best in 1 evaluation (train.patience)" in done.stdout
    assert json.loads((tmp_path / "runs" / "small" / "last" / "trainer.json").read_text())["step"] == 2
