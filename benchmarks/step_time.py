"""Time and memory of one training step, in units of a yardstick measured in the same run.

The yardstick Y is forward + backward of a plain ResNet-50 trunk (frozen normalization as scale and shift, nothing
frozen, mean of the last stage as loss) on the same input. Y and steps are interleaved, so that a noisy machine
disturbs both.

    python benchmarks/step_time.py [--model condinst] [--profile]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from measure import peak_gb, seconds
from uniquery.backbones.resnet import ResNet
from uniquery.layers.norm import ConvNorm
from uniquery.querying import UniqueQuerying
from uniquery.segmenters import SEGMENTERS
from uniquery.structures import Images, Targets

# the public originals on the same input
ORIGINAL = {
    "condinst": {"Y": 2.2, "peak_gb": 1.25},
    "solov2": {"Y": 3.9, "peak_gb": 1.48},
    "sotr": {"Y": 13.2, "peak_gb": 3.45},
    "mask2former": {"Y": 4.7, "peak_gb": 2.84},
    "sparseinst": {"Y": 1.9, "peak_gb": 1.44},
    "solq": {"Y": 6.7, "peak_gb": 3.59},
}
INSTANCES = 5


class ScaleShiftConv(ConvNorm):
    """The usual frozen normalization: a pass over the activations of its own."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.norm.scale_and_shift()
        y = F.conv2d(x, self.weight, None, self.stride, self.padding)
        return y * scale[:, None, None] + shift[:, None, None]


def tame(backbone: nn.Module) -> nn.Module:
    """Random weights behind an identity normalization would grow over fifty layers: damp each block's last one."""
    for name, module in backbone.named_modules():
        if name.endswith("conv3"):
            module.norm.weight.fill_(0.2)
    return backbone


def yardstick(size: int) -> Callable[[], None]:
    trunk = tame(ResNet(50, norm="frozen", stride_in_1x1=True))
    for module in trunk.modules():
        if isinstance(module, ConvNorm):
            module.__class__ = ScaleShiftConv
    image = torch.randn(1, 3, size, size)

    def step() -> None:
        trunk.zero_grad()
        trunk(image)[32].mean().backward()

    return step


def training_step(model: str, size: int) -> Callable[[], None]:
    torch.manual_seed(0)
    is_caffe = model in ("condinst", "solov2", "sotr")  # these start from Caffe's weights
    backbone = tame(ResNet(50, norm="frozen", stride_in_1x1=is_caffe))
    backbone.freeze(
        0 if model in ("mask2former", "sparseinst") else 2
    )  # the others freeze the stem and the first stage
    objective = UniqueQuerying(SEGMENTERS[model](backbone, 80)).train()
    images = Images(torch.randint(0, 256, (1, 3, size, size), dtype=torch.uint8), ((size, size),))
    targets = [instances(size)]

    def step() -> None:
        objective.zero_grad()
        sum(objective(images, targets).values()).backward()

    return step


def instances(size: int) -> Targets:
    """Discs of several sizes, spread over the image."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    masks, boxes = [], []
    for i in range(INSTANCES):
        center, radius = size * (i + 1) / (INSTANCES + 1), size * (0.04 + 0.05 * i)
        masks.append((x - center) ** 2 + (y - center) ** 2 < radius**2)
        rows, columns = masks[-1].any(1).nonzero(), masks[-1].any(0).nonzero()
        boxes.append([columns[0].item(), rows[0].item(), columns[-1].item() + 1, rows[-1].item() + 1])
    return Targets(torch.arange(INSTANCES), torch.tensor(boxes, dtype=torch.float32), torch.stack(masks))


def peak_of_step(model: str, size: int) -> float:
    """Largest resident memory of a process that does nothing but this step."""
    command = [sys.executable, __file__, "--model", model, "--size", str(size), "--memory-only"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def profile(step: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=12, max_name_column_width=40))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SEGMENTERS), default="condinst")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--profile", action="store_true", help="print the largest operators of a step")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    step = training_step(args.model, args.size)
    if args.memory_only:
        step(), step()
        print(peak_gb())
        return
    unit = yardstick(args.size)
    step(), unit()
    pairs = [(seconds(unit), seconds(step)) for _ in range(args.repeats)]
    ratios = sorted(s / y for y, s in pairs)
    figures = {
        "model": args.model,
        "threads": torch.get_num_threads(),
        "Y_seconds": statistics.median(y for y, _ in pairs),
        "step_in_Y": statistics.median(ratios),
        "step_in_Y_spread": [ratios[0], ratios[-1]],
        "peak_gb": peak_of_step(args.model, args.size),
        "original": ORIGINAL[args.model],
    }
    table = Table(
        "", "ours", "original", title=f"{args.model} R50, one {args.size}×{args.size} image, {INSTANCES} instances"
    )
    low, high = figures["step_in_Y_spread"]
    table.add_row("step, in Y", f"{figures['step_in_Y']:.2f} ({low:.2f}–{high:.2f})", f"{ORIGINAL[args.model]['Y']}")
    table.add_row("peak memory, GB", f"{figures['peak_gb']:.2f}", f"{ORIGINAL[args.model]['peak_gb']}")
    Console().print(table, f"Y = {figures['Y_seconds']:.2f} s, {figures['threads']} threads, {args.repeats} repeats")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))
    if args.profile:
        profile(step)


if __name__ == "__main__":
    main()
