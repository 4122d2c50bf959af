"""What the two parts of the algorithm do on a small scale: five objectives, several seeds, equal image forwards.

    python benchmarks/effect.py --data data/nuclei --output runs/effect

Trains `nuclei/condinst_small` once per objective and seed on six sevenths of the training images, scores the final
(averaged) weights on the rest half-way and at the end, and `diagnose`s them on the validation images. What is done is
skipped, so that an interrupted study goes on; the table is of what is there. One core is enough: OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

INTER = "inter: {max_queries: 128, negatives_per_step: 4096}"
ROWS = {
    "base": "",
    "paired views, λ = 0": "equivariance: {weight: 0}",
    "+ inter": INTER,
    "+ equi": "equivariance: {}",
    "+ inter + equi": f"{INTER}, equivariance: {{}}",
}


def split(data: Path, output: Path) -> None:
    """Every seventh training image is for tuning."""
    content = json.loads((data / "annotations/train.json").read_text())
    output.mkdir(parents=True, exist_ok=True)
    for name, wanted in (("train", False), ("tuning", True)):
        images = [image for i, image in enumerate(content["images"]) if (i % 7 == 0) is wanted]
        ids = {image["id"] for image in images}
        annotations = [a for a in content["annotations"] if a["image_id"] in ids]
        (output / f"{name}.json").write_text(json.dumps({**content, "images": images, "annotations": annotations}))


def study(data: Path, output: Path, row: str, seed: int, settings: Sequence[str]) -> None:
    """One run and its figures."""
    name = f"row{list(ROWS).index(row)}-seed{seed}"
    figures = output / name / "figures.json"
    if figures.is_file():
        return
    images, querying = str(data / "images"), f"querying={{{ROWS[row]}}}"
    splits = [
        a for s, file in (("train", "train"), ("val", "tuning")) for a in (f"--{s}", output / f"{file}.json", images)
    ]
    command = ["uniquery", "train", "nuclei/condinst_small", "--name", name, "--output", output, *splits]
    changes = [a for setting in (querying, f"seed={seed}", *settings) for a in ("--set", setting)]
    subprocess.run([*command, *changes, "--resume=auto"], check=True)
    val = [data / "annotations/val.json", images]
    subprocess.run(
        ["uniquery", "diagnose", output / name / "last", "--images", "16", "--data", *val, "--json", figures],
        check=True,
    )


def read_sweep(folder: Path) -> dict[str, float]:
    """AP on the validation images by mask threshold."""
    found = json.loads((folder / "figures.json").read_text())
    return {threshold: metrics["AP"] for threshold, metrics in found["sweep"].items()}


def read(folder: Path) -> dict[str, float]:
    """The figures of a finished run, by column."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    ap = {line["step"]: line["metrics"]["AP"] for line in lines if line["kind"] == "eval"}
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    sweep = read_sweep(folder)
    cross, errors = found["cross_scene"], found["equivariance"]
    return {
        "tuning AP half-way": ap[max(ap) // 2],
        "tuning AP": ap[max(ap)],
        "val AP": sweep["0.5"],
        "val AP, best of the sweep": max(sweep.values()),
        "best threshold": float(max(sweep, key=lambda t: sweep[t])),
        "own %": 100 * cross["own"],
        "cross %": 100 * cross["mean"],
        "cross > 0.5 %": 100 * cross["above_half"],
        "flip error %": 100 * errors["flip"]["mask_error"],
        "crop error %": 100 * errors["crop"]["mask_error"],
        "feature error, flip %": 100 * errors["flip"]["feature_error"],
    }


def table(output: Path, columns_of: Callable[[Path], dict[str, float]]) -> str:
    """Mean ± standard deviation over the seeds, in markdown."""
    lines = []
    for i, row in enumerate(ROWS):
        runs = [columns_of(f.parent) for f in sorted(output.glob(f"row{i}-seed*/figures.json"))]
        if not runs:
            continue
        if not lines:
            lines = [f"| objective | seeds | {' | '.join(runs[0])} |", "| --- " * (len(runs[0]) + 2) + "|"]
        columns = [[run[name] for run in runs] for name in runs[0]]
        cells = [f"{statistics.mean(c):.2f} ± {statistics.stdev(c) if len(c) > 1 else 0:.2f}" for c in columns]
        lines.append(f"| {row} | {len(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/nuclei"))
    parser.add_argument("--output", type=Path, default=Path("runs/effect"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="which objectives")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `uniquery train`")
    parser.add_argument("--table", action="store_true", help="train nothing, only print the table")
    args = parser.parse_args()
    if not args.table:
        split(args.data, args.output)
        for seed in range(args.seeds):
            for row in args.rows:
                study(args.data, args.output, row, seed, args.set)
    print(table(args.output, read), table(args.output, read_sweep), sep="\n\n")


if __name__ == "__main__":
    main()
