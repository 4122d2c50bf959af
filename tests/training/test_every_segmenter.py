"""Every segmenter with the whole algorithm on: trained, stopped, resumed, scored and diagnosed by the commands."""

import json
import math
import os
import signal

import pytest

from helpers.killed_runs import ALGORITHM, arguments, run_content
from helpers.small_runs import small_config
from helpers.small_segmenters import SMALL
from uniquery.cli import main
from uniquery.training import loop

TERMS = {
    "condinst": {"loss_class", "loss_box", "loss_centerness", "loss_mask"},
    "mask2former": {"loss_class", "loss_mask", "loss_dice", "loss_auxiliary"},
    "solov2": {"loss_class", "loss_mask"},
    "sotr": {"loss_class", "loss_mask"},
    "sparseinst": {"loss_class", "loss_mask", "loss_dice", "loss_objectness"},
    "solq": {"loss_class", "loss_box", "loss_giou", "loss_vector", "loss_auxiliary"},
}


def stop_in_step(monkeypatch, command, step: int) -> None:
    """Sends a signal while a step is taken; the command ends after it."""
    real = loop.Trainer.step

    def signaled(trainer, batches):
        if trainer.run.step + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        real(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", signaled)
        with pytest.raises(SystemExit, match="143"):
            main(command)


def all_lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def training_lines(run):
    return [line for line in all_lines(run) if line["kind"] == "train"]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_run_from_its_start_to_its_diagnosis(name, scenes, tmp_path, monkeypatch):
    config, runs = small_config(tmp_path, scenes, model=SMALL[name].model_dump(mode="json")), tmp_path / "runs"
    settings = [*ALGORITHM, "train.batch_size=4", "train.eval_every=4", "train.save_every=100"]
    assert main(arguments(config, *settings, "name=whole")) == 0
    command = arguments(config, *settings, "name=broken")
    stop_in_step(monkeypatch, command, 2)
    assert [line["step"] for line in training_lines(runs / "broken")] == [1, 2]
    assert main([*command, "--resume"]) == 0
    assert run_content(runs / "broken") == run_content(runs / "whole")
    lines = training_lines(runs / "broken")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert set(line["losses"]) == TERMS[name] | {"loss_inter", "loss_equi"}
        assert all(value > 0 for value in line["losses"].values())
        assert line["querying"]["memory_fill"] > 0
    results, figures, picture = (tmp_path / name for name in ("results.json", "figures.json", "picture.png"))
    run = str(runs / "broken")
    assert main(["eval", run, "--json", str(figures), "--save", str(results), "--workers", "0"]) == 0
    (scored,) = (line for line in all_lines(runs / "broken") if line["kind"] == "eval")
    assert json.loads(figures.read_text())["segm"]["metrics"] == scored["metrics"]
    assert json.loads(results.read_text()) == json.loads((runs / "broken" / "predictions.json").read_text())
    assert main(["diagnose", run, "--json", str(figures), "--picture", str(picture)]) == 0
    found = json.loads(figures.read_text())
    assert found["cross_scene"]["queries"] > 0
    assert found["sweep"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_mask2former_trains_in_bfloat16(scenes, tmp_path):
    config = small_config(tmp_path, scenes, model=SMALL["mask2former"].model_dump(mode="json"))
    assert main(arguments(config, *ALGORITHM, "train.batch_size=4", "train.precision=bfloat16", "train.steps=2")) == 0
    lines = training_lines(tmp_path / "runs" / "small")
    assert len(lines) == 2
    for line in lines:
        assert set(line["losses"]) == TERMS["mask2former"] | {"loss_inter", "loss_equi"}
        assert all(math.isfinite(value) and value > 0 for value in line["losses"].values())
