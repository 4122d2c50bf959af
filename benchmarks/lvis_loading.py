"""Time and memory of loading annotations of LVIS's size, and memory that each data worker adds.

python benchmarks/lvis_loading.py [--annotations 1300000] [--file lvis_size.json]

The json is drawn with LVIS's keys, in its order: 1203 classes, 100 000 images, 1.3 million polygons of about 45 points,
1.1 GB. It is made once and then reused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np

from measure import peak_gb
from uniquery.data.coco import CocoData

CLASSES, IMAGES, HEIGHT, WIDTH = 1203, 100_000, 480, 640


def write_annotations(path: Path, count: int) -> None:
    """Star-shaped polygons from a pool, with classes of a long tail."""
    rng = np.random.default_rng(0)
    classes = 1 + rng.permutation(CLASSES)[np.minimum(rng.zipf(1.4, count), CLASSES) - 1]
    pool = [json.dumps([_polygon(rng)]) for _ in range(5000)]
    with path.open("w") as stream:
        stream.write('{"info": {"version": "v1"}, "annotations": [')
        for number, category in enumerate(classes.tolist(), start=1):
            ids = f'"id": {number}, "image_id": {1 + number * 7 % IMAGES}, "category_id": {category}'
            shape = f'"bbox": [10.25, 10.5, 50.75, 50.0], "segmentation": {pool[number % len(pool)]}'
            stream.write(f'{", " if number > 1 else ""}{{"area": {500.5 + number}, {ids}, {shape}}}')
        stream.write('], "images": ')
        json.dump([_image(number, rng) for number in range(1, IMAGES + 1)], stream)
        categories = [{"id": i, "name": f"class {i}", "frequency": "rcf"[i % 3]} for i in range(1, CLASSES + 1)]
        stream.write(f', "licenses": [], "categories": {json.dumps(categories)}}}')


def _polygon(rng: np.random.Generator) -> list[float]:
    points = int(rng.integers(10, 80))
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False)
    radius = rng.uniform(5, 60) * rng.uniform(0.7, 1, points)
    xy = np.stack([np.cos(angle), np.sin(angle)], 1) * radius[:, None] + rng.uniform(60, (WIDTH - 60, HEIGHT - 60))
    return xy.round(2).flatten().tolist()


def _image(number: int, rng: np.random.Generator) -> dict[str, object]:
    lists = {"neg_category_ids": rng.integers(1, CLASSES + 1, 8).tolist(), "not_exhaustive_category_ids": []}
    url = f"http://images.cocodataset.org/train2017/{number:012d}.jpg"
    return {"id": number, "coco_url": url, "height": HEIGHT, "width": WIDTH, **lists}


def private_mb() -> float:
    """Memory of this process that no other process shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def read_as_worker(data: CocoData, seed: int, answers: multiprocessing.Queue[float]) -> None:
    """Reads the masks of random images, as a data worker does, and reports how much memory that has added."""
    before = private_mb()
    for index in np.random.default_rng(seed).integers(len(data), size=5000).tolist():
        data.instances(index)
        data.class_lists(index)
    answers.put(private_mb() - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--annotations", type=int, default=1_300_000)
    parser.add_argument("--file", type=Path, default=Path(tempfile.gettempdir()) / "lvis_size.json")
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    if not args.file.exists():
        write_annotations(args.file, args.annotations)
        print(f"{args.file} is written: run this again to load it, in a process that has not made it.")
        return
    start, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as images:
        data = CocoData(args.file, Path(images))
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{args.file.stat().st_size / 1e9:.2f} GB, {len(data)} images, {len(data.labels)} annotations")
    print(f"loaded in {seconds:.0f} s ({cpu:.0f} s of processor time), at most {peak_gb():.2f} GB")
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[float] = context.Queue()
    workers = [context.Process(target=read_as_worker, args=(data, seed, answers)) for seed in range(args.workers)]
    for worker in workers:
        worker.start()
    added = sorted(answers.get() for _ in workers)
    for worker in workers:
        worker.join()
    print(f"each of {len(workers)} workers adds {added[0]:.0f} to {added[-1]:.0f} MB")


if __name__ == "__main__":
    main()
