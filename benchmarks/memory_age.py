"""How strongly the queries of a run fire on the pixels of its memory, by their age, and on pixels embedded now.

    python benchmarks/memory_age.py studies/NAME/runs/* --output benchmarks/results/memory_age.json

If L_inter made queries unique, they would respond to all pixels of other images alike. A response that falls with the
age of a pixel means that embeddings have moved on, queries and features together, and that old pixels no longer match.
Queries are those of the run's validation images that own an instance. Runs are those of studies; runs without a memory
are left out. `evidence.py` writes the table of the page from the json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from uniquery.evaluation.diagnose import ProbedImage, diagnose
from uniquery.querying import InstancePixels
from uniquery.training.checkpoint import load_trainer_state
from uniquery.training.model_and_data import open_model_and_data
from uniquery.training.run_folder import RunFolder

AGES = [0, 10, 40, 80, 1_000_000]  # in steps
MEMORY = "algorithm/memory/"


def measure(run: Path, count: int) -> list[float | None] | None:
    """The response to stored pixels of each age, and to validation pixels, embedded now; None without a memory."""
    state = load_trainer_state(RunFolder(run).last).tensors
    if MEMORY + "pushed_at" not in state:
        return None
    trained = open_model_and_data(RunFolder(run).last, None, torch.device("cpu"))
    diagnosis = diagnose(trained.model, trained.data, trained.info.test_size, count)
    stored = InstancePixels(**{f.name: state[MEMORY + f.name] for f in fields(InstancePixels)})
    age = state[MEMORY + "pushed_at"].max() - state[MEMORY + "pushed_at"]
    groups = [stored[((low <= age) & (age < high)).nonzero().flatten()] for low, high in pairwise(AGES)]
    now = diagnosis.cross_scene
    return [*(mean_response(trained.model, diagnosis.images, pixels) for pixels in groups), now.mean if now else None]


@torch.inference_mode()
def mean_response(model: Any, images: Sequence[ProbedImage], pixels: InstancePixels) -> float | None:
    if not len(pixels):
        return None
    queries = [image.queries for image in images if len(image.queries)]
    return torch.cat([model.similarity(each, pixels).sigmoid().flatten() for each in queries]).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders STUDY/runs/DATA--VARIANT--SEED of studies")
    parser.add_argument("--images", type=int, default=48, help="validation images")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    ages = [*(f"{low} to {high} steps old" for low, high in pairwise(AGES[:-1])), f"{AGES[-2]} or more"]
    rows = []
    for run in args.runs:
        responses = measure(run, args.images)
        if responses is None:
            continue
        rows.append({"study": run.parent.parent.name, "run": run.name, "responses": responses})
        print(run.name, *("–" if value is None else f"{value:.3f}" for value in responses), flush=True)
    result = {"images": args.images, "columns": [*ages, "embedded now"], "rows": rows}
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
