"""Hugging Face's model in a plain loop: it learns, and what it saves is theirs."""

import runpy
from pathlib import Path

import pytest
import torch

from uniquery.data.drawing import CLASS_NAMES

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_with_hf.py"


@pytest.fixture(scope="module")
def main():
    pytest.importorskip("transformers")
    return runpy.run_path(str(EXAMPLE))["main"]


def test_it_learns_and_goes_on_from_what_it_saved(main, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    history = main(["--out", str(tmp_path / "first"), "--steps", "10", "--lr", "3e-3"])
    names = ["loss_class", "loss_mask", "loss_dice", "loss_auxiliary", "loss_inter", "loss_equi"]
    assert all(list(line) == names for line in history)
    totals = [sum(line.values()) for line in history]
    assert all(total == total for total in totals)
    assert sum(totals[-3:]) < 0.95 * sum(totals[:3])
    assert "saved to" in capsys.readouterr().out

    saved = tmp_path / "first" / "model"
    model = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(saved, use_safetensors=True)
    assert list(model.config.id2label.values()) == list(CLASS_NAMES[:6])
    again = main(["--model", str(saved), "--out", str(tmp_path / "second"), "--steps", "1"])
    assert sum(again[0].values()) < totals[0]
    first = {name: value.clone() for name, value in model.state_dict().items()}
    second = transformers.Mask2FormerForUniversalSegmentation.from_pretrained(tmp_path / "second" / "model")
    assert list(second.state_dict()) == list(first)
    assert any(not torch.equal(value, first[name]) for name, value in second.state_dict().items())
