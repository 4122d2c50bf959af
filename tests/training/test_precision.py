import pytest
import torch

import uniquery
from helpers.small_runs import small_config
from uniquery.training.config import load_config, parse_config
from uniquery.training.precision import has_bfloat16, with_chosen_precision
from uniquery.training.run_folder import RunFolder

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def config(precision, backbone):
    values = {"model": "solov2", "backbone": backbone, "train": {"steps": 1, "precision": precision}}
    return parse_config(values, where="here")


@pytest.mark.parametrize(
    ("backbone", "device", "has_instructions", "expected"),
    [
        ("resnet50", CPU, True, "bfloat16"),
        ("swin_tiny", CPU, True, "bfloat16"),
        ("resnet50", CPU, False, "float32"),
        ("resnet50", GPU, True, "float32"),
        ("efficientnet_lite0", CPU, True, "float32"),
    ],
)
def test_auto_is_what_was_measured_to_be_faster(monkeypatch, backbone, device, has_instructions, expected):
    monkeypatch.setattr("uniquery.training.precision.has_bfloat16", lambda: has_instructions)
    assert with_chosen_precision(config("auto", backbone), device).train.precision == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_choice_stays(monkeypatch, precision):
    monkeypatch.setattr("uniquery.training.precision.has_bfloat16", lambda: precision == "float32")
    chosen = config(precision, "resnet50")
    assert with_chosen_precision(chosen, CPU) == chosen


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 avx512vl\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("flags\t\t: fpu avx2\n", False),
        ("Features\t: fp asimd\n", False),
    ],
)
def test_instructions_of_a_cpu(tmp_path, text, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{text}\n")
    assert has_bfloat16(cpuinfo) is expected


def test_a_system_that_does_not_say(tmp_path):
    assert not has_bfloat16(tmp_path / "missing")


def test_a_run_stores_what_was_chosen_and_resumes(scenes, tmp_path):
    chosen = load_config(small_config(tmp_path, scenes), ["train.precision=auto", "train.steps=1"])
    folder = RunFolder(uniquery.train(chosen))
    assert folder.read_config().train.precision == "float32"  # its backbone is small
    uniquery.train(chosen, resume=True)
