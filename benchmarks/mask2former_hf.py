"""A training step of our Mask2Former against Hugging Face's, on the same weights, in the same run.

    python benchmarks/mask2former_hf.py [--case 384 --repeats 5]

R50, 100 queries, 80 classes, two unpadded images. A step is forward, loss and backward. First both are held to the same
outputs (with the statistics of the weights) and to the same loss (but for its random points). Times are taken in turns;
memory is that of a fresh process for each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Mask2FormerConfig as TheirConfig
from transformers import Mask2FormerForUniversalSegmentation, ResNetConfig

from measure import interleaved, peak_gb
from uniquery.backbones.resnet import ResNet
from uniquery.masks.geometry import mask_boxes
from uniquery.querying import UniqueQuerying
from uniquery.segmenters.mask2former import Mask2Former
from uniquery.structures import Images, Targets
from uniquery.weights.foreign.mask2former import hf_mask2former_names

CLASSES = 80
CASES = {"384": (384, (10, 40)), "640": (640, (60, 120))}  # side of the images, instances of each
BARS = {"384": (0.85, 0.8), "640": (0.7, 0.7)}  # time and memory that ours may take of theirs


def theirs(norm: str) -> Mask2FormerForUniversalSegmentation:
    torch.manual_seed(0)
    backbone = ResNetConfig(out_features=["stage1", "stage2", "stage3", "stage4"])
    model = Mask2FormerForUniversalSegmentation(TheirConfig(backbone_config=backbone, num_labels=CLASSES)).train()
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):  # random weights would fade or grow over fifty layers
            nn.init.constant_(module.weight, 0.2 if ".layer.2." in name else 1.0)
            if norm == "frozen":
                freeze(module)
        if isinstance(module, nn.Linear) and "mask_embedder" in name:  # else all masks are about one half everywhere
            module.weight.data.mul_(4)
    return model


def freeze(module: nn.BatchNorm2d) -> None:
    """Statistics and affine map stay as they came; the module stays so when the model is set to train."""
    module.requires_grad_(False).eval()
    module.train = lambda *_: module


def ours(norm: str) -> Mask2Former:
    torch.manual_seed(0)
    return Mask2Former(ResNet(50, norm=norm), CLASSES).train()


def batch(case: str) -> tuple[Images, list[Targets]]:
    """Discs of many sizes on noise."""
    side, counts = CASES[case]
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    targets = []
    for i, count in enumerate(counts):
        centers = torch.rand(count, 2, generator=generator) * side
        radii = side * (0.02 + 0.1 * torch.rand(count, generator=generator))
        masks = torch.stack([(x - cx) ** 2 + (y - cy) ** 2 < r**2 for (cx, cy), r in zip(centers, radii, strict=True)])
        targets.append(Targets(torch.randint(0, CLASSES, (count,), generator=generator), mask_boxes(masks), masks, i))
    pixels = torch.randint(0, 256, (len(counts), 3, side, side), generator=generator, dtype=torch.uint8)
    return Images(pixels, ((side, side),) * len(counts)), targets


def their_loss(model: Mask2FormerForUniversalSegmentation, case: str) -> Callable[[], Tensor]:
    """Their annotations are made before, as their data loaders do."""
    images, targets = batch(case)
    pixels = colors(images)
    masks, labels = [t.masks.float() for t in targets], [t.labels for t in targets]

    def loss() -> Tensor:
        return model(pixel_values=pixels, mask_labels=masks, class_labels=labels).loss.squeeze()

    return loss


def our_loss(model: Mask2Former, case: str) -> Callable[[], Tensor]:
    images, targets = batch(case)
    objective = UniqueQuerying(model)
    return lambda: torch.stack(list(objective(images, targets).values())).sum()


def colors(images: Images) -> Tensor:
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)))
    return (images.pixels - mean) / std


def step(model: nn.Module, loss: Callable[[], Tensor]) -> Callable[[], None]:
    def work() -> None:
        model.zero_grad()
        loss().backward()

    return work


def peaks(name: str, case: str, norm: str) -> tuple[float, float]:
    """Of a fresh process: how far its peak rises in one step, and the peak, in GB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_peaks, (name, case, norm))


def _peaks(name: str, case: str, norm: str) -> tuple[float, float]:
    if name == "ours":
        our_model = ours(norm)
        work = step(our_model, our_loss(our_model, case))
    else:
        their_model = theirs(norm)
        work = step(their_model, their_loss(their_model, case))
    before = peak_gb()
    work()
    return peak_gb() - before, peak_gb()


@torch.no_grad()
def check(our_model: Mask2Former, their_model: Mask2FormerForUniversalSegmentation, case: str) -> dict[str, float]:
    """How far the outputs of the last layer and the losses are apart; raises if that is more than rounding.

    Outputs are compared in float64: in float32, rounding moves a mask over the threshold that says where a query looks.
    """
    images, _ = batch(case)
    our_model.eval().double(), their_model.eval().double()
    outputs, expected = our_model(images), their_model(pixel_values=colors(images).double())
    masks = torch.einsum("bnd,bdhw->bnhw", outputs.embeddings[-1], outputs.pixels.embeddings)
    torch.testing.assert_close(outputs.logits[-1], expected.class_queries_logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(masks, expected.masks_queries_logits, rtol=1e-6, atol=1e-6)
    our_model.float(), their_model.float()
    torch.manual_seed(0)
    losses = [our_loss(our_model, case)().item(), their_loss(their_model, case)().item()]
    our_model.train(), their_model.train()
    apart = abs(losses[0] / losses[1] - 1)
    if apart > 0.02:
        raise AssertionError(f"the losses are {losses[0]:.3f} and {losses[1]:.3f}: more than random points explain")
    return {"masks_apart": (masks - expected.masks_queries_logits).abs().max().item(), "losses_apart": apart}


def measure(case: str, norm: str, repeats: int) -> dict[str, float | list[float]]:
    their_model, our_model = theirs(norm), ours(norm)
    our_model.load_state_dict(hf_mask2former_names(their_model.state_dict()))
    agreement = check(our_model, their_model, case)
    works = {
        "ours": step(our_model, our_loss(our_model, case)),
        "theirs": step(their_model, their_loss(their_model, case)),
    }
    times = interleaved(works, repeats)
    ratios = sorted(a / b for a, b in zip(times["ours"], times["theirs"], strict=True))
    (our_rise, our_peak), (their_rise, their_peak) = (peaks(name, case, norm) for name in works)
    return {
        **agreement,
        "our_seconds": statistics.median(times["ours"]),
        "their_seconds": statistics.median(times["theirs"]),
        "time_ratio": statistics.median(ratios),
        "time_spread": [ratios[0], ratios[-1]],
        "our_rise_gb": our_rise,
        "their_rise_gb": their_rise,
        "rise_ratio": our_rise / their_rise,
        "our_peak_gb": our_peak,
        "their_peak_gb": their_peak,
        "peak_ratio": our_peak / their_peak,
    }


def table(case: str, norm: str, figures: dict[str, float | list[float]]) -> Table:
    title = f"Mask2Former R50 ({norm} norm), 2 × {case}², {' + '.join(map(str, CASES[case][1]))} instances"
    low, high = figures["time_spread"]
    (time_bar, memory_bar), f = BARS[case], figures
    rows = Table("", "ours", "Hugging Face's", "ratio", "bar", title=title)
    spread = f"{f['time_ratio']:.2f}× ({low:.2f}–{high:.2f})"
    rows.add_row("step, s", f"{f['our_seconds']:.2f}", f"{f['their_seconds']:.2f}", spread, f"{time_bar}×")
    for name, meaning in (
        ("rise", "peak above what was there before the step, GB"),
        ("peak", "peak of the process, GB"),
    ):
        ours, theirs, ratio = (f[key] for key in (f"our_{name}_gb", f"their_{name}_gb", f"{name}_ratio"))
        rows.add_row(meaning, f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.2f}×", f"{memory_bar}×")
    rows.caption = f"masks agree to {f['masks_apart']:.1e}, losses to {100 * f['losses_apart']:.2f} %"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="side of the images; by default each")
    parser.add_argument(
        "--norm", choices=["batch", "frozen"], default="batch", help="of the backbone, in both: learned, or as it came"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    figures = {}
    for case in args.case or CASES:
        figures[case] = measure(case, args.norm, args.repeats)
        Console().print(table(case, args.norm, figures[case]))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
