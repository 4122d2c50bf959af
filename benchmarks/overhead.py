"""What the algorithm costs in a whole training step, against the base objective on as many forwards, in one run.

    python benchmarks/overhead.py [--model condinst --height 800 --width 1344]

An R50, a batch of two forwards, seven instances an image, a full memory of 100 000 pixels. The base sees two
images; `paired` sees one image and its view.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from measure import extra_gb, interleaved
from step_time import tame
from uniquery.backbones.resnet import ResNet
from uniquery.masks.geometry import mask_boxes
from uniquery.querying import EquivarianceSettings, InstancePixels, InterSceneSettings, UniqueQuerying
from uniquery.segmenters import SEGMENTERS
from uniquery.structures import Images, Targets

INSTANCES, CAPACITY = 7, 100_000
CHANNELS = {  # of a pixel embedding
    "condinst": 8,
    "solov2": 256,
    "sotr": 256,
    "mask2former": 256,
    "sparseinst": 128,
    "solq": 384,
}
FLIP: dict[str, Any] = {"flip": 1.0, "crop": None}
FORMS: dict[str, tuple[int, Callable[[], dict[str, object]]]] = {
    "base": (2, dict),
    "inter": (2, lambda: {"inter": InterSceneSettings(capacity=CAPACITY)}),
    "paired, flip": (1, lambda: {"equivariance": EquivarianceSettings(**FLIP)}),
    "both, flip": (
        1,
        lambda: {"inter": InterSceneSettings(capacity=CAPACITY), "equivariance": EquivarianceSettings(**FLIP)},
    ),
    "both, flip + crop": (
        1,
        lambda: {"inter": InterSceneSettings(capacity=CAPACITY), "equivariance": EquivarianceSettings()},
    ),
    "both, extra": (
        2,
        lambda: {
            "inter": InterSceneSettings(capacity=CAPACITY),
            "equivariance": EquivarianceSettings(**FLIP, views="extra"),
        },
    ),
}


def scene(height: int, width: int, image_id: int) -> Targets:
    """Discs of COCO-like sizes, spread over the image."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    masks = []
    for i in range(INSTANCES):
        cy, cx, r = height * (0.2 + 0.6 * (i % 3) / 2), width * (i + 1) / (INSTANCES + 1), height * (0.03 + 0.03 * i)
        masks.append((y - cy) ** 2 + (x - cx) ** 2 < r**2)
    stacked = torch.stack(masks)
    return Targets(torch.arange(INSTANCES), mask_boxes(stacked), stacked, image_id)


def step(model: str, form: str, height: int, width: int) -> Callable[[], object]:
    torch.manual_seed(0)
    images, settings = FORMS[form]
    backbone = tame(ResNet(50, norm="frozen", stride_in_1x1=True))
    backbone.freeze(2)
    objective = UniqueQuerying(SEGMENTERS[model](backbone, 80), **settings()).train()
    ids = torch.arange(CAPACITY) % 1000 + 10
    if objective.inter:
        embeddings, locations = torch.randn(CAPACITY, CHANNELS[model]), torch.rand(CAPACITY, 2) * width
        objective.memory.push(InstancePixels(embeddings, locations, ids, ids * 0, ids > 0))
    pixels = torch.randint(0, 256, (images, 3, height, width), dtype=torch.uint8)
    batch = Images(pixels, ((height, width),) * images)
    targets = [scene(height, width, i) for i in range(images)]

    def work() -> None:
        objective.zero_grad()
        sum(objective(batch, targets).values()).backward()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CHANNELS), default="condinst")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS), metavar="FORM")
    parser.add_argument("--height", type=int, default=800)
    parser.add_argument("--width", type=int, default=1344)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = (args.height, args.width)
    forms = ["base", *(form for form in args.forms if form != "base")]
    times = interleaved({form: step(args.model, form, *size) for form in forms}, args.repeats)
    peaks = {form: extra_gb(step, args.model, form, *size) for form in forms}
    table = Table(
        "objective",
        "time",
        "spread",
        "fastest against fastest",
        "peak memory",
        title=f"{args.model} R50, two forwards of {size[0]}×{size[1]}",
    )
    figures = {}
    for form, taken in times.items():
        ratios = sorted(t / b for t, b in zip(taken, times["base"], strict=True))
        # On a noisy machine the fastest of many says more than the median: disturbances only ever add.
        fastest = min(taken) / min(times["base"])
        figures[form] = {"time": statistics.median(ratios), "fastest": fastest, "memory": peaks[form] / peaks["base"]}
        time, _, memory = (f"{value:.3f}×" for value in figures[form].values())
        table.add_row(form, time, f"{ratios[0]:.2f}–{ratios[-1]:.2f}", f"{fastest:.3f}×", memory)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
