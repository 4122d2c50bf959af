"""How the time and the peak memory of a training step grow, as exponents: 1 is linear, 0 does not grow.

    python benchmarks/scaling.py [--model condinst --axis instances]

A segmenter with its own heads and losses on a small random backbone, so that what grows is not hidden behind a large
network. Each point runs in a fresh process, which gives its peak memory, on one thread. Its processor time counts: it
hardly depends on what else the machine does. Freed memory is kept, as in a training. An exponent is the slope of a line
through all points in log-log; beside it is the slope between the last two points, which shows growth that a constant
part hides at the beginning. Image sides count as pixels. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from measure import peak_gb
from uniquery.backbones import BackboneConfig, build_backbone
from uniquery.masks.geometry import mask_boxes
from uniquery.parallel import keep_freed_memory
from uniquery.querying import InstancePixels, InterSceneSettings, UniqueQuerying
from uniquery.segmenters import SEGMENTERS
from uniquery.structures import Images, Targets

LIMIT = 1.1  # a larger exponent is reported as more than linear; timings vary by some percent
IMAGES_IN_MEMORY = 1000


@dataclass(frozen=True)
class Point:
    """One training step; a capacity of 0 is a step without L_inter."""

    instances: int = 20
    side: int = 256
    capacity: int = 0
    classes: int = 80


AXES: dict[str, list[Point]] = {
    "instances": [Point(side=512, instances=n) for n in (5, 50, 300, 600)],
    "side": [Point(side=n) for n in (256, 512, 1024)],
    "capacity": [Point(capacity=n) for n in (10_000, 100_000, 1_000_000)],
    "classes": [Point(classes=n) for n in (1, 80, 1203)],
}


def size_of(axis: str, point: Point) -> int:
    """What the axis counts."""
    value: int = getattr(point, axis)
    return value**2 if axis == "side" else value


def training_step(model: str, point: Point) -> Callable[[], None]:
    torch.manual_seed(0)
    backbone = build_backbone(BackboneConfig(name="tiny", weights="random"))
    segmenter = SEGMENTERS[model](backbone, point.classes)
    inter = InterSceneSettings(capacity=point.capacity) if point.capacity else None
    objective = UniqueQuerying(segmenter, inter=inter).train()
    side = point.side
    images = Images(torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8), ((side, side),))
    targets = [discs(point)]
    if inter:
        fill_memory(objective, images, point)

    def step() -> None:
        objective.zero_grad()
        torch.stack(list(objective(images, targets).values())).sum().backward()

    return step


def discs(point: Point) -> Targets:
    """Discs of many sizes; the more there are, the smaller they are, as in real images."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(point.side), torch.arange(point.side), indexing="ij")
    masks = torch.zeros(point.instances, point.side, point.side, dtype=torch.bool)
    for mask in masks:
        y, x, size = torch.rand(3, generator=generator).tolist()
        radius = max(2.0, point.side * (0.1 + 0.4 * size) / math.sqrt(point.instances))
        mask |= (columns - x * point.side) ** 2 + (rows - y * point.side) ** 2 < radius**2
    labels = torch.randint(0, point.classes, (point.instances,), generator=generator)
    return Targets(labels, mask_boxes(masks), masks, image_id=0)


@torch.no_grad()
def fill_memory(objective: UniqueQuerying, images: Images, point: Point) -> None:
    """With pixels of other images, in parts, so that no second memory is ever held."""
    channels = objective.segmenter(images).pixels.embeddings.shape[1]
    for start in range(0, point.capacity, 10_000):
        ids = torch.arange(start, start + 10_000) % IMAGES_IN_MEMORY + 1
        locations = torch.rand(len(ids), 2) * point.side
        objective.memory.push(InstancePixels(torch.randn(len(ids), channels), locations, ids, ids * 0, ids > 0))


def measure(model: str, point: Point, repeats: int) -> tuple[float, float]:
    """Of a fresh process: processor seconds of a step, and its peak memory in GB, above what the imports take."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (model, point, repeats))


def _measure(model: str, point: Point, repeats: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    keep_freed_memory(torch.device("cpu"))
    before = peak_gb()
    step = training_step(model, point)
    step()
    return statistics.median(cpu_seconds(step) for _ in range(repeats)), peak_gb() - before


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def exponents(sizes: list[int], values: list[float]) -> tuple[float, float]:
    """The slope of the best line in log-log, and that between the last two points.

    >>> exponents([1, 10, 100], [2.0, 20.0, 200.0])
    (1.0, 1.0)
    """
    x, y = np.log(sizes), np.log(values)
    slope, last = np.polyfit(x, y, 1)[0], (y[-1] - y[-2]) / (x[-1] - x[-2])
    return round(float(slope), 2), round(float(last), 2)


def measure_axis(model: str, axis: str, repeats: int) -> dict[str, list[float]]:
    points = AXES[axis]
    figures = [measure(model, point, repeats) for point in points]
    sizes = [size_of(axis, point) for point in points]
    times, peaks = ([figure[i] for figure in figures] for i in range(2))
    return {
        "seconds": times,
        "peak_gb": peaks,
        "time": list(exponents(sizes, times)),
        "memory": list(exponents(sizes, peaks)),
    }


def rows(model: str, figures: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    """Lines of the table: a segmenter and an axis each."""
    for axis, f in figures.items():
        values = " / ".join(str(getattr(point, axis)) for point in AXES[axis])
        cells = [model, f"{'pixels, side' if axis == 'side' else axis} {values}"]
        for name, unit, digits in (("time", "seconds", 2), ("memory", "peak_gb", 2)):
            fit, last = f[name]
            mark = " (more than linear)" if max(fit, last) > LIMIT else ""
            cells += [" / ".join(f"{value:.{digits}f}" for value in f[unit]), f"{fit:.2f}, {last:.2f}{mark}"]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SEGMENTERS), action="append", help="by default each")
    parser.add_argument("--axis", choices=list(AXES), action="append", help="by default each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    print("| segmenter | grows | processor seconds a step | exponent | peak memory, GB | exponent |")
    print("| --- | --- | --- | --- | --- | --- |")
    figures: dict[str, dict[str, dict[str, list[float]]]] = {}
    for model in args.model or SEGMENTERS:
        figures[model] = {}
        for axis in args.axis or AXES:
            figures[model][axis] = measure_axis(model, axis, args.repeats)
            print(*rows(model, {axis: figures[model][axis]}), sep="\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
