"""The whole path from an image file to COCO results at 800×1333, for every segmenter, and against Hugging Face's.

    python benchmarks/inference.py [--model mask2former --repeats 5]

An R50 with random weights and a JPEG file of 800×480 pixels: reading, resizing, forward, masks at the size of the file,
run lengths. The number of detections decides what the masks cost, and random scores are all about the same. So a
constant is added to the class logits, chosen such that about 50 detections remain; Mask2Former and SOLQ have no score
threshold and always give 100, and SparseInst's random scores are so alike that it gives 100 or none. Random masks
spread over the whole image, which is the most expensive case.

Mask2Former is compared with Hugging Face's processor, model and post-processing on the same weights, in turns; memory
is that of a fresh process for each. Their post-processing thresholds masks at 384×384 pixels, so for equality the
logits of their network go through our post-processing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn

from measure import interleaved, peak_gb
from step_time import tame
from uniquery.backbones.resnet import ResNet
from uniquery.data.images import read_image
from uniquery.evaluation.inference import predict_image
from uniquery.masks import rle
from uniquery.masks.paste import resize_matrices
from uniquery.segmenters import SEGMENTERS
from uniquery.segmenters.mask2former import MASK_STRIDE, Mask2FormerConfig
from uniquery.segmenters.set_prediction import best_instances
from uniquery.structures import Images, Instances

CLASSES, SHORT, LONGEST = 80, 800, 1333
FILE_SIZE = (480, 800)  # becomes 800×1333
DETECTIONS = 50
BARS = {"time": 0.7, "memory": 0.6}  # that ours may take of Hugging Face's
THEIRS = "Hugging Face's"
Results = list[dict[str, Any]]


def write_image(path: Path) -> None:
    """Blocks of color under some noise, so that the file is as large as a photograph's."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 200, (FILE_SIZE[0] // 40, FILE_SIZE[1] // 40, 3)).repeat(40, 0).repeat(40, 1)
    pixels = blocks + rng.integers(0, 56, (*FILE_SIZE, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(path, quality=90)


def our_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = SEGMENTERS[name](tame(ResNet(50, norm="frozen")), CLASSES).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and not parameter.any():  # SOLQ's masks would all be empty
            nn.init.normal_(parameter, std=0.01)
    return model


def their_weights() -> nn.Module:
    """Hugging Face's Mask2Former; imported here, so that its memory does not count as ours."""
    from mask2former_hf import theirs

    return theirs("frozen").eval()


def our_mask2former(state: dict[str, torch.Tensor]) -> nn.Module:
    """Ours with their weights; padding counts as image, as in theirs."""
    backbone = ResNet(50, norm="frozen")
    model = SEGMENTERS["mask2former"](backbone, CLASSES, Mask2FormerConfig(attend_padding=True)).eval()
    model.load_state_dict(state)
    return model


def our_path(model: nn.Module, path: Path) -> Callable[[], Results]:
    ids = list(range(1, CLASSES + 1))
    return lambda: predict_image(model, read_image(path), SHORT, LONGEST).to_coco(1, ids)


def their_path(model: nn.Module, path: Path) -> Callable[[], Results]:
    from transformers import Mask2FormerImageProcessorPil

    processor = Mask2FormerImageProcessorPil(size={"shortest_edge": SHORT, "longest_edge": LONGEST})

    @torch.inference_mode()
    def work() -> Results:
        with Image.open(path) as image:
            inputs = processor(image.convert("RGB"), return_tensors="pt")
        (found,) = processor.post_process_instance_segmentation(
            model(**inputs), threshold=0.0, target_sizes=[FILE_SIZE], return_binary_maps=True
        )
        return [
            {
                "image_id": 1,
                "category_id": segment["label_id"] + 1,
                "score": segment["score"],
                "segmentation": rle.encode(mask.numpy().astype(np.uint8)),
            }
            for segment, mask in zip(found["segments_info"], found["segmentation"], strict=True)
        ]

    return work


def shift_logits(model: nn.Module, shift: float) -> None:
    """Adds a constant to the class logits."""
    model.register_forward_hook(lambda _, __, outputs: replace(outputs, logits=outputs.logits + shift))


@torch.inference_mode()
def shift_that_keeps(count: int, model: nn.Module, path: Path) -> float:
    """What to add to the class logits such that about so many detections remain."""
    seen: list[Any] = []
    handle = model.register_forward_hook(lambda _, __, outputs: seen.append(outputs))
    our_path(model, path)()
    handle.remove()
    low, high, found = -12.0, 12.0, {}
    for _ in range(12):
        shift = (low + high) / 2
        found[shift] = len(model.predict(replace(seen[0], logits=seen[0].logits + shift), [FILE_SIZE])[0])
        low, high = (low, shift) if found[shift] > count else (shift, high)
    return min(found, key=lambda shift: (found[shift] == 0, abs(found[shift] - count)))


def check_equal(ours: nn.Module, theirs: nn.Module, path: Path) -> float:
    """The share of pixels in which the masks differ; raises if classes, scores or masks are not the same."""
    seen: list[Images] = []
    handle = ours.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    expected = predict_image(ours, read_image(path), SHORT, LONGEST)
    handle.remove()
    with torch.inference_mode():
        found = their_instances(ours, theirs, seen[0])
    first, second = (sorted_rows(instances) for instances in (expected, found))
    torch.testing.assert_close(first[0], second[0], rtol=1e-3, atol=1e-4)
    masks = [torch.from_numpy(np.stack([rle.decode(r) for r in instances.rles])) for instances in (expected, found)]
    apart = (masks[0][first[1]] != masks[1][second[1]]).float().mean().item()
    if len(expected) != len(found) or apart > 1e-3:
        raise AssertionError(f"{len(expected)} and {len(found)} detections, of whose pixels {apart:.1%} differ")
    return apart


def their_instances(ours: nn.Module, theirs: nn.Module, images: Images) -> Instances:
    """The logits of their network on the same pixels, through our post-processing."""
    outputs = theirs(pixel_values=ours.normalize(images))
    masks, (size,) = outputs.masks_queries_logits[0], images.sizes
    matrices = resize_matrices((masks.shape[1], masks.shape[2]), MASK_STRIDE, size, FILE_SIZE)
    return best_instances(
        outputs.class_queries_logits[0].softmax(1)[:, :-1],
        lambda queries: (masks[queries], matrices),
        FILE_SIZE,
        max_detections=100,
        logit_threshold=0.0,
    )


def sorted_rows(instances: Instances) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 2) class and score, and the order by class and area: rounding changes the order of equal scores."""
    areas = torch.tensor([rle.area(r) for r in instances.rles], dtype=torch.float64)
    order = (instances.labels * 1e9 + areas).argsort()
    return torch.stack([instances.labels.double(), instances.scores.double()], dim=1)[order], order


def peaks(name: str, path: Path, prepared: Path | float | None = None) -> tuple[float, float]:
    """Of a fresh process: how far its peak rises when it predicts, and the peak, in GB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peaks, (name, path, prepared))


def _peaks(name: str, path: Path, prepared: Path | float | None) -> tuple[float, float]:
    if isinstance(prepared, Path):
        work = our_path(our_mask2former(load_file(prepared)), path)
    elif prepared is None:
        work = their_path(their_weights(), path)
    else:
        model = our_model(name)
        shift_logits(model, prepared)
        work = our_path(model, path)
    before = peak_gb()
    work()
    return peak_gb() - before, peak_gb()


def profile(work: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        work()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=40))


def against_hugging_face(path: Path, repeats: int, with_profile: bool) -> dict[str, float | list[float]]:
    from uniquery.weights.foreign.mask2former import hf_mask2former_names

    theirs = their_weights()
    state = hf_mask2former_names(theirs.state_dict())
    state_file = path.with_suffix(".safetensors")
    save_file({name: value.contiguous() for name, value in state.items()}, state_file)
    ours = our_mask2former(state)
    apart = check_equal(ours, theirs, path)
    works = {"ours": our_path(ours, path), THEIRS: their_path(theirs, path)}
    times = interleaved(works, repeats)
    if with_profile:
        profile(works["ours"])
    ratios = sorted(a / b for a, b in zip(times["ours"], times[THEIRS], strict=True))
    (our_rise, our_peak), (their_rise, their_peak) = peaks("mask2former", path, state_file), peaks(THEIRS, path)
    return {
        "seconds": statistics.median(times["ours"]),
        "their_seconds": statistics.median(times[THEIRS]),
        "time_ratio": statistics.median(ratios),
        "time_spread": [ratios[0], ratios[-1]],
        "peak_gb": our_peak,
        "their_peak_gb": their_peak,
        "peak_ratio": our_peak / their_peak,
        "rise_gb": our_rise,
        "their_rise_gb": their_rise,
        "rise_ratio": our_rise / their_rise,
        "pixels_apart": apart,
    }


def comparison_table(f: dict[str, Any]) -> Table:
    table = Table("Mask2Former", "ours", THEIRS, "ratio", "bar", title="image file → COCO results, same weights")
    low, high = f["time_spread"]
    spread = f"{f['time_ratio']:.2f}× ({low:.2f}–{high:.2f})"
    table.add_row("time, s", f"{f['seconds']:.2f}", f"{f['their_seconds']:.2f}", spread, f"{BARS['time']}×")
    for key, meaning in (("peak", "peak of the process, GB"), ("rise", "peak above what was there before, GB")):
        ours, theirs, ratio = (f[name] for name in (f"{key}_gb", f"their_{key}_gb", f"{key}_ratio"))
        table.add_row(meaning, f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}×", f"{BARS['memory']}×")
    table.caption = f"{f['pixels_apart']:.1e} of the pixels differ if their logits go through our post-processing"
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SEGMENTERS), action="append", help="by default each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print the largest operators of each path")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    names = args.model or list(SEGMENTERS)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.jpg"
        write_image(path)
        models = {name: our_model(name) for name in names}
        shifts = {name: shift_that_keeps(DETECTIONS, model, path) for name, model in models.items()}
        for name, model in models.items():
            shift_logits(model, shifts[name])
        works = {name: our_path(model, path) for name, model in models.items()}
        times = interleaved(works, args.repeats)
        table = Table(
            "segmenter", "seconds", "detections", "peak, GB", title="image file → COCO results, 800×1333, R50"
        )
        for name, work in works.items():
            _, peak = peaks(name, path, shifts[name])
            seconds, detections = statistics.median(times[name]), len(work())
            figures[name] = {"seconds": seconds, "detections": detections, "peak_gb": peak}
            table.add_row(name, f"{seconds:.2f}", str(detections), f"{peak:.2f}")
            if args.profile:
                profile(work)
        Console().print(table)
        del models, works
        if "mask2former" in names:
            figures[THEIRS] = against_hugging_face(path, args.repeats, args.profile)
            Console().print(comparison_table(figures[THEIRS]))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
