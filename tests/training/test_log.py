"""`metrics.jsonl`: the writer and the reader agree on every line."""

import json
import math

import pytest
from pydantic import ValidationError

from uniquery.training.log import EvalLine, MetricsLog, SilentLog, SkippedStepLine, TrainLine, json_number, read_metrics

LINES = [
    TrainLine(step=1, images=4, losses={"loss_mask": 0.1 + 0.2}, lr=1e-3, grad_norm=2.5, seconds={"data": 0.5}),
    TrainLine(step=2, images=8, losses={}, lr=None, querying={"memory_fill": 3.0, "memory_age": None}),
    SkippedStepLine(step=3, losses={"loss_mask": "nan", "loss_class": 1.0}, grad_norm="-inf", image_ids=[5, 7]),
    EvalLine(step=3, weights="ema", metrics={"AP": 12.5, "APs": None}, per_class={"cell": 3.0}, instances={"cell": 2}),
]


def test_what_is_written_is_read(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for line in LINES:
        log.write(line)
    log.sync()
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == LINES
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert list(first)[:2] == ["kind", "step"]
    assert first["losses"] == {"loss_mask": 0.1 + 0.2}


def test_a_resumed_log_continues(tmp_path):
    for last, lines in ((0, LINES[:2]), (1, [LINES[1]])):
        log = MetricsLog(tmp_path / "metrics.jsonl", last_step=last)
        for line in lines:
            log.write(line)
        log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == LINES[:2]


def test_a_silent_log_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = SilentLog()
    log.write(LINES[0])
    log.sync()
    log.close()
    assert not list(tmp_path.iterdir())


def test_keys_of_a_newer_version_are_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 1, "weights": "ema", "metrics": {}, "new": 3}\n')
    assert read_metrics(tmp_path / "metrics.jsonl") == [EvalLine(step=1, weights="ema", metrics={})]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.25])
def test_json_numbers_come_back_as_floats(value):
    text = json.dumps({"x": json_number(value)}, allow_nan=False)
    assert float(json.loads(text)["x"]) == pytest.approx(value, nan_ok=True)


def test_a_skipped_step_needs_all_its_fields():
    with pytest.raises(ValidationError):
        SkippedStepLine(step=1, losses={}, grad_norm=1.0)
