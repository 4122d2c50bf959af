"""Cost of L_inter against its naive form and against the bare matrix products, in one run.

    python benchmarks/inter_loss.py

Taken twice: on the machine as it is, and beside two other processes that compute without a pause.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from measure import busy_processes, extra_gb, interleaved
from uniquery.backbones import BackboneConfig
from uniquery.querying import InstancePixels, InterSceneLoss
from uniquery.segmenters import build_segmenter
from uniquery.segmenters.condinst import CondInstConfig, CondInstQueries
from uniquery.structures import Queries

ALPHA, GAMMA = 0.1, 2.5
PER_IMAGE = 350  # stored pixels of an image: seven instances, fifty pixels each


def stored(pixels: int, channels: int) -> InstancePixels:
    torch.manual_seed(0)
    return InstancePixels(
        torch.randn(pixels, channels) / channels**0.5,
        torch.rand(pixels, 2) * 800,
        torch.arange(pixels) // PER_IMAGE,
        torch.zeros(pixels, dtype=torch.int64),
        torch.ones(pixels, dtype=torch.bool),
    )


def newest_images(memory: InstancePixels, queries: int) -> torch.Tensor:
    """Queries of a step of sixteen images, whose pixels were just pushed."""
    return memory.image_ids[-1] - torch.arange(queries) % 16


def naive(logits: torch.Tensor, ids: torch.Tensor, memory: InstancePixels) -> torch.Tensor:
    """All pairs at once, left to autograd."""
    other = ids[:, None] != memory.image_ids
    loss = (1 - ALPHA) * logits.sigmoid() ** GAMMA * F.softplus(logits) * other
    return (loss.sum(1) / other.sum(1)).mean()


def dot_product(form: str, queries: int, pixels: int, channels: int) -> Callable[[], object]:
    memory = stored(pixels, channels)
    embeddings = torch.randn(queries, channels, requires_grad=True)
    ids = newest_images(memory, queries)
    loss = InterSceneLoss(dot_product_scale=1.0)

    def work() -> None:
        embeddings.grad = None
        if form == "ours":
            loss(Queries(embeddings, ids, ids), ids, memory).backward()
        elif form == "naive":
            naive(embeddings @ memory.embeddings.T, ids, memory).backward()
        else:
            with torch.no_grad():
                (embeddings @ memory.embeddings.T) @ memory.embeddings

    return work


def filters(form: str, queries: int, pixels: int) -> Callable[[], object]:
    memory = stored(pixels, 8)
    model = build_segmenter(CondInstConfig(), BackboneConfig(name="tiny", weights="random"), 1)
    embeddings = torch.randn(queries, 169, requires_grad=True)
    ids = newest_images(memory, queries)
    located = CondInstQueries(embeddings, ids, ids, torch.rand(queries, 2) * 800, torch.full((queries,), 64.0))
    loss = InterSceneLoss()

    def work() -> None:
        embeddings.grad = None
        if form == "ours":
            loss(located, ids, memory, model.similarity).backward()
        else:
            naive(model.similarity(located, memory), ids, memory).backward()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    dots = {f: dot_product(f, 200, 100_000, 256) for f in ("ours", "naive", "two products")}
    nets = {f: filters(f, 128, 100_000) for f in ("ours", "naive")}
    figures: dict[str, dict[str, float]] = {}
    for title, works in (("200 × 100 000 × 256, dot product", dots), ("128 × 100 000, CondInst filters", nets)):
        times = interleaved(works, args.repeats)
        figures[title] = {f"{name}, s": statistics.median(t) for name, t in times.items()}
        with busy_processes(2):
            times = interleaved(works, args.repeats)
        figures[title] |= {f"{name}, s beside 2 busy processes": statistics.median(t) for name, t in times.items()}
    first, second = figures
    for name in ("ours", "naive"):
        figures[first][f"{name}, extra GB"] = extra_gb(dot_product, name, 200, 100_000, 256)
        figures[second][f"{name}, extra GB"] = extra_gb(filters, name, 128, 100_000)
    figures[first]["ours at 1 000 000 pixels, extra GB"] = extra_gb(dot_product, "ours", 200, 1_000_000, 256)
    for title, values in figures.items():
        table = Table("", "figure", "against ours", title=title)
        for name, value in values.items():
            unit = name.rsplit(", ", 1)[1]
            table.add_row(name, f"{value:.3f}", f"{values[f'ours, {unit}'] / value:.2f}×" if value else "")
        Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
