"""How fast the page of `uniquery explore` is in a real browser, and how much memory its server takes.

    python benchmarks/explore_page.py runs/base runs/ours
    python benchmarks/explore_page.py [runs/base] --images 10000

Needs playwright and a chromium. With runs and their own data it also times the query view, and a plain forward of all
images, which the cached maps save.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright

import uniquery

DRAWN = "() => document.querySelectorAll('.tile').length > 0 && !document.querySelector('.tile:not([data-drawn])')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--images", type=int, help="a drawn data set of so many images instead of the runs' own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = data_of(Path(folder), args.images, args.runs[:1]) if args.images else []
        started = time.perf_counter()
        server = subprocess.Popen(
            [sys.executable, "-m", "uniquery", "explore", *map(str, [*args.runs, *data])],
            stdout=subprocess.PIPE,
            text=True,
        )
        address = next(line.split()[1] for line in server.stdout if line.startswith("Open "))
        print(f"server ready after {time.perf_counter() - started:.1f} s")
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium") or shutil.which("google-chrome"), args=["--no-sandbox"]
                )
                page = browser.new_page(viewport={"width": 1280, "height": 720})
                measure_gallery(page, address)
                if args.runs and not args.images:
                    measure_query(page, address)
                print(
                    f"memory of the server: {memory(server.pid):.0f} MB, at most {memory(server.pid, 'VmHWM'):.0f} MB"
                )
        finally:
            server.terminate()
            server.wait()
    if args.runs and not args.images:
        time_forwards(args.runs[0])


def data_of(folder: Path, count: int, run: list[Path]) -> list[str | Path]:
    """Small images with a few instances each, of the first class of the run."""
    name = uniquery.load(run[0]).classes[0] if run else "a"
    rng = np.random.default_rng(0)
    images, rows, annotations = folder / "images", [], []
    images.mkdir()
    for i in range(count):
        Image.fromarray(rng.integers(0, 255, (96, 128, 3), dtype=np.uint8)).save(images / f"{i:06d}.jpg", quality=50)
        rows.append({"id": i, "file_name": f"{i:06d}.jpg", "height": 96, "width": 128})
        for x, y in rng.integers(0, 80, (7, 2)).tolist():
            square = [[x, y, x + 14, y, x + 14, y + 12, x, y + 12]]
            annotations.append({"id": len(annotations) + 1, "image_id": i, "category_id": 1, "segmentation": square})
    file = folder / "data.json"
    file.write_text(json.dumps({"images": rows, "annotations": annotations, "categories": [{"id": 1, "name": name}]}))
    return ["--data", file, images]


def measure_gallery(page: Page, address: str) -> None:
    times = []
    for _ in range(5):
        page.goto("about:blank")
        start = time.perf_counter()
        page.goto(address)
        poll(page, DRAWN)
        times.append(time.perf_counter() - start)
    print("gallery with all tiles in sight:", " ".join(f"{t:.2f}" for t in times), "s (the first without any cache)")
    start = time.perf_counter()
    page.eval_on_selector(".grid", "grid => { grid.scrollTop = grid.scrollHeight / 2; }")
    page.wait_for_timeout(30)
    poll(page, DRAWN)
    print(f"scrolled to the middle: {time.perf_counter() - start:.2f} s, {page.locator('.tile').count()} tiles exist")


def measure_query(page: Page, address: str) -> None:
    while any(run["maps"][0] < run["maps"][1] for run in page.request.get(f"{address}api/state").json()["runs"]):
        page.wait_for_timeout(500)
    ids = page.request.get(f"{address}api/start").json()["images"]["id"]
    times = []
    for image in ids[:: max(1, len(ids) // 6)][:6]:
        page.goto(f"{address}#image/{image}")
        page.wait_for_selector(".instances button")
        page.wait_for_timeout(1500)  # a person looks at it
        start = time.perf_counter()
        page.evaluate(f"location.hash = '#query/{image}/truth/0'")
        poll(page, "() => !document.querySelector('.panel:not([data-loaded])')")
        times.append(time.perf_counter() - start)
    searched = page.locator("p.note", has_text="searched").first.text_content()
    print("query view, all runs:", " ".join(f"{t:.2f}" for t in times), f"s. {searched}")


def poll(page: Page, condition: str) -> None:
    """Waits for a condition; the page's policy forbids what playwright's own function needs."""
    while not page.evaluate(condition):
        page.wait_for_timeout(5)


def memory(process: int, field: str = "VmRSS") -> float:
    """Of a process, in MB."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def time_forwards(run: Path) -> None:
    import torch

    from uniquery.data.batch import EvaluationSamples
    from uniquery.evaluation.inference import forward_passes
    from uniquery.training.model_and_data import open_model_and_data

    trained = open_model_and_data(run)
    size = trained.info.test_size
    start = time.perf_counter()
    with torch.inference_mode():
        for _ in forward_passes(trained.model, EvaluationSamples(trained.data, size.short, size.longest)):
            pass
    print(f"a plain forward of the {len(trained.data)} images: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
