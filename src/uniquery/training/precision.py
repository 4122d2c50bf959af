"""What `train.precision: auto` means on a device."""

from __future__ import annotations

from pathlib import Path

import torch

from uniquery.parallel import any_rank, choose_device
from uniquery.training.config import Config
from uniquery.training.resume import Resume
from uniquery.training.run_folder import RunFolder

_CPU_INFO = Path("/proc/cpuinfo")
_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}  # instructions that multiply bfloat16


def resolve_precision(config: Config, resume: Resume) -> Config:
    """The same configuration without `auto`: a resumed run keeps the precision that it began with."""
    if config.train.precision != "auto":
        return config
    device = choose_device(config.train.device)
    precision = "float32" if any_rank(not has_fast_bfloat16(device), device) else "bfloat16"
    folder = RunFolder(config.folder)
    if resume and folder.config_file.is_file():
        precision = folder.read_config().train.precision
    return config.model_copy(update={"train": config.train.model_copy(update={"precision": precision})})


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; always false for CPUs outside Linux, which do not say so."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type != "cpu" or not _CPU_INFO.is_file():
        return False
    return bool(_CPU_FLAGS & set(_CPU_INFO.read_text().split()))
