"""What `train.precision: auto` stands for."""

from __future__ import annotations

from pathlib import Path

import torch

from uniquery.training.config import Config

_INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}
_FASTER_IN_BFLOAT16 = ("resnet", "swin")  # small models on EfficientNet-Lite are slower


def with_chosen_precision(config: Config, device: torch.device) -> Config:
    """The same experiment, with bfloat16 or float32 instead of `auto`.

    bfloat16 on a CPU that has instructions for it, with a ResNet, where it was measured to be faster, or a Swin, which
    is assumed to be alike.
    """
    if config.train.precision != "auto":
        return config
    is_faster = config.backbone.name.startswith(_FASTER_IN_BFLOAT16) and device.type == "cpu" and has_bfloat16()
    train = config.train.model_copy(update={"precision": "bfloat16" if is_faster else "float32"})
    return config.model_copy(update={"train": train})


def has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions for bfloat16; where the system does not say so, no."""
    if not cpuinfo.is_file():
        return False
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return not _INSTRUCTIONS.isdisjoint(flags.split())
