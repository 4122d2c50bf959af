"""Prediction with SOLOv2 on 1203 classes against 80: processor time of an image, in turns, and peak memory.

python benchmarks/many_classes.py [--side 512] [--repeats 3]

The weights are random, so that every cell and class is above LVIS's score threshold: the most candidates there can be.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from measure import extra_gb
from uniquery.backbones import BackboneConfig
from uniquery.segmenters import build_segmenter
from uniquery.segmenters.solov2 import SOLOv2Config
from uniquery.structures import Images

LVIS = {"score_threshold": 1e-4, "final_threshold": 1e-4, "max_detections": 300}
MODELS = {
    "1203 classes, 300 detections": (1203, LVIS),
    "80 classes, 300 detections": (80, LVIS),
    "80 classes, 100 detections": (80, {**LVIS, "max_detections": 100}),
}


def prepare(classes: int, settings: dict[str, float], side: int):
    """A function that predicts on one image."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config, backbone = SOLOv2Config(**settings), BackboneConfig(name="resnet50", weights="random")
    model = build_segmenter(config, backbone, classes).eval()
    images = Images(torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8), ((side, side),))

    @torch.inference_mode()
    def predict() -> int:
        return len(model.predict(model(images), [(side, side)])[0])

    return predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--side", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    works = {name: prepare(*model, args.side) for name, model in MODELS.items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(args.repeats + 1):
        for name, work in works.items():
            start = time.process_time()
            found = work()
            if repeat:  # the first is a warm-up
                times[name].append(time.process_time() - start)
            else:
                print(f"{name}: {found} instances")
    first, *others = (statistics.median(values) for values in times.values())
    for name, seconds in zip(list(works)[1:], others, strict=True):
        print(f"1203 classes take {first / seconds:.2f} times as long as {name} ({first:.2f} s and {seconds:.2f} s)")
    del works
    for name, model in MODELS.items():
        print(f"{name}: {extra_gb(prepare, *model, args.side):.2f} GB more than the model")


if __name__ == "__main__":
    main()
