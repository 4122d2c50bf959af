"""Reading a run folder: what is tolerated, what is an error and how it reads."""

import json

import pytest

from uniquery.errors import UserError
from uniquery.report.runs import load_run


def train(step, **changes):
    seconds = {"data": 0.1, "forward": 0.3}
    line = {"kind": "train", "step": step, "images": step * 2, "losses": {"cls": 1.0, "mask": 0.5}, "lr": 0.01}
    return line | {"grad_norm": None, "seconds": seconds} | changes


def evaluation(step, ap, weights="ema"):
    return {"kind": "eval", "step": step, "weights": weights, "metrics": {"AP": ap}, "per_class": {}, "instances": {}}


@pytest.fixture
def folder(tmp_path):
    def write(*lines, tail=""):
        text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        (tmp_path / "metrics.jsonl").write_text(text + tail)
        return tmp_path

    return write


def test_reads_everything(folder):
    path = folder(train(10), evaluation(10, 30.0), train(20, losses={"cls": 2.0, "mask": None}))
    (path / "config.yaml").write_text("optimizer:\n  lr: 0.01\n")
    (path / "environment.json").write_text('{"torch": "2.6", "gpus": 1}')
    run = load_run(path)
    assert (run.name, run.steps, run.images) == (path.name, 20, 40)
    assert run.config == {"optimizer.lr": "0.01"}
    assert run.environment == {"torch": "2.6", "gpus": "1"}
    assert [line.total for line in run.train] == [1.5, None]
    assert run.phase_seconds() == pytest.approx({"data": 2.0, "forward": 6.0})


def test_a_given_total_is_not_added_up(folder):
    assert load_run(folder(train(1, losses={"total": 3.0, "cls": 1.0}))).train[0].total == 3.0


def test_config_and_environment_may_be_missing(folder):
    run = load_run(folder(train(1)))
    assert (run.config, run.config_text, run.environment) == ({}, "", {})


def test_missing_metrics_name_the_file(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.jsonl: no such file"):
        load_run(tmp_path / "nowhere")


@pytest.mark.parametrize("tail", ['{"kind": "tra', "\0\0\0", '{"kind": "train", "step": 3, "losses": {"caf\xe9'])
def test_truncated_last_line_is_tolerated(folder, tail):
    assert [line.step for line in load_run(folder(train(1), train(2), tail=tail)).train] == [1, 2]


def test_broken_middle_line_names_file_and_line(folder):
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not json"):
        load_run(folder(train(1), '{"kind": "tra\n', train(3)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"step": 1}, "line 2 has no 'kind'"),
        ([1, 2], "line 2 has no 'kind'"),
        (train("soon"), "line 2: 'step' is wrong"),
        (train(1, losses={"cls": "low"}), "line 2: 'losses.cls' is wrong"),
        (evaluation(1, 3.0, weights="other"), "line 2: 'weights' is wrong"),
    ],
)
def test_wrong_line_names_line_and_field(folder, line, message):
    with pytest.raises(UserError, match=message) as error:
        load_run(folder(train(1), line, train(3)))
    assert "\n" not in str(error.value)


def test_lines_of_other_kinds_are_passed_over(folder):
    assert load_run(folder({"kind": "note", "text": "hello"}, {"kind": ["odd"]}, train(1))).steps == 1


def test_a_resumed_run_replaces_what_it_repeats(folder):
    first = [train(10, lr=1.0), train(20, lr=1.0), evaluation(20, 5.0), train(30, lr=1.0), evaluation(30, 6.0)]
    run = load_run(folder(*first, train(20, lr=2.0), evaluation(20, 7.0)))
    assert [(line.step, line.lr) for line in run.train] == [(10, 1.0), (20, 2.0)]
    assert [(e.step, e.metric("AP")) for e in run.evals] == [(20, 7.0)]


def test_skipped_steps_are_read_and_repeated_ones_left_out(folder):
    skipped = {"kind": "skipped", "losses": {"cls": "nan"}, "grad_norm": "inf", "image_ids": [4]}
    run = load_run(folder(train(1), skipped | {"step": 2}, skipped | {"step": 3}, skipped | {"step": 2}))
    assert [(line.step, line.image_ids) for line in run.skipped] == [(2, [4])]
    with pytest.raises(UserError, match=r"line 1: 'image_ids.0' is wrong"):
        load_run(folder(skipped | {"step": 1, "image_ids": ["x"]}))


def test_final_prefers_averaged_weights_and_best_is_the_highest(folder):
    run = load_run(folder(evaluation(1, 9.0, "model"), evaluation(2, 5.0, "ema"), evaluation(2, 6.0, "model")))
    assert run.final is not None
    assert run.best is not None
    assert (run.final.step, run.final.weights) == (2, "ema")
    assert (run.best.step, run.best.weights) == (1, "model")


def test_an_unmeasured_ap_is_never_the_best(folder):
    run = load_run(folder(evaluation(1, 0.0), evaluation(2, None), evaluation(3, float("nan"))))
    assert run.best is not None
    assert run.best.step == 1


def test_empty_run_has_nothing(folder):
    run = load_run(folder())
    assert (run.final, run.best, run.steps, run.phase_seconds()) == (None, None, 0, {})


@pytest.mark.parametrize(
    ("name", "text"), [("config.yaml", "a: [1"), ("environment.json", "{"), ("config.yaml", "- 1")]
)
def test_broken_side_files_are_named(folder, name, text):
    path = folder(train(1))
    (path / name).write_text(text)
    with pytest.raises(UserError, match=name):
        load_run(path)
