"""`train.precision: auto`: what it becomes, where that is stored, and that a resumed run keeps it."""

import pytest
import torch

from helpers.small_runs import small_config
from uniquery.training import loop, precision
from uniquery.training.config import load_config
from uniquery.training.precision import has_fast_bfloat16
from uniquery.training.run_folder import RunFolder


@pytest.fixture
def cpu_flags(tmp_path, monkeypatch):
    """Sets the flags of the CPU."""
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(precision, "_CPU_INFO", file)
    return lambda flags: file.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} avx2\n")


@pytest.mark.parametrize(
    ("flags", "expected"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f avx512bw", False)]
)
def test_cpus_with_and_without_instructions_for_bfloat16(cpu_flags, flags, expected):
    cpu_flags(flags)
    assert has_fast_bfloat16(torch.device("cpu")) is expected


def test_a_cpu_that_says_nothing_and_other_devices_have_none(cpu_flags):
    assert not has_fast_bfloat16(torch.device("cpu"))
    cpu_flags("avx512_bf16")
    assert not has_fast_bfloat16(torch.device("mps"))


@pytest.mark.parametrize("chosen", ["float32", "bfloat16"])
def test_a_chosen_precision_is_not_changed(scenes, tmp_path, cpu_flags, chosen):
    cpu_flags("avx512_bf16")
    config = load_config(small_config(tmp_path, scenes), [f"train.precision={chosen}"])
    assert precision.resolve_precision(config, resume=False) == config


def test_a_run_stores_what_auto_became_and_a_resumed_one_keeps_it(scenes, tmp_path, cpu_flags, capsys):
    changes = ["train.precision=auto", "train.steps=2", "train.save_every=1", "model.levels=4"]
    config = load_config(small_config(tmp_path, scenes), changes)
    cpu_flags("avx512_bf16")
    loop.train(config)
    assert "in bfloat16" in capsys.readouterr().out
    assert RunFolder(config.folder).read_config().train.precision == "bfloat16"
    cpu_flags("")
    assert precision.resolve_precision(config, resume=False).train.precision == "float32"
    loop.train(config, resume=True)
    assert RunFolder(config.folder).read_config().train.precision == "bfloat16"
