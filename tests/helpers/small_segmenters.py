"""Segmenters and batches small enough for a test, and how each segmenter is made to speak or to be silent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uniquery.backbones import BackboneConfig
from uniquery.querying import Segmenter
from uniquery.segmenters import build_segmenter
from uniquery.segmenters.condinst import CondInstConfig
from uniquery.segmenters.mask2former import Mask2FormerConfig
from uniquery.segmenters.solov2 import SOLOv2Config
from uniquery.segmenters.solq import SOLQConfig
from uniquery.segmenters.sotr import SOTRConfig
from uniquery.segmenters.sparseinst import SparseInstConfig
from uniquery.structures import Images, Targets

NUM_CLASSES = 3
SMALL = {
    "condinst": CondInstConfig(channels=32, head_convs=1, mask_channels=32, mask_convs=1, score_threshold=0.0),
    "mask2former": Mask2FormerConfig(
        queries=24,
        channels=32,
        heads=4,
        encoder_layers=1,
        encoder_width=64,
        decoder_layers=3,
        decoder_width=64,
        points=512,
    ),
    "solov2": SOLOv2Config(
        channels=32,
        head_channels=32,
        head_convs=1,
        mask_channels=32,
        kernel_channels=32,
        grids=(12, 10, 8, 6, 4),
        size_ranges=((0, 24), (12, 36), (24, 48), (36, 72), (48, 2048)),
        score_threshold=0.0,
        final_threshold=0.0,
    ),
    "sotr": SOTRConfig(
        channels=32,
        layers=2,
        heads=4,
        mask_channels=32,
        kernel_channels=32,
        grids=(12, 10, 8, 6, 4),
        size_ranges=((0, 24), (12, 36), (24, 48), (36, 72), (48, 2048)),
        score_threshold=0.0,
        final_threshold=0.0,
    ),
    "sparseinst": SparseInstConfig(
        queries=30, channels=16, head_channels=16, head_convs=1, kernel_channels=16, score_threshold=0.0
    ),
    "solq": SOLQConfig(
        queries=48,
        channels=32,
        heads=4,
        encoder_layers=1,
        decoder_layers=3,
        width=64,
        mask_size=32,
        vector_length=64,
        vector_width=256,
    ),
}
SILENT: dict[str, dict[str, Any]] = {  # settings under which nothing is predicted
    "condinst": {"score_threshold": 1.0},
    "mask2former": {"mask_threshold": 1 - 1e-12},
    "solov2": {"score_threshold": 1.0},
    "sotr": {"score_threshold": 1.0},
    "sparseinst": {"score_threshold": 1.0},
    "solq": {"mask_threshold": 1 - 1e-12},
}

EXACT_GRADIENT: dict[str, dict[str, Any]] = {  # settings under which no gradient is stopped on purpose
    "solq": {"decoder_layers": 1}  # boxes are constants to the next layer
}


def small(name: str, *, seed: int = 0, **changes: Any) -> Segmenter[Any, Any, Any]:
    """A small segmenter whose weights are stirred, so that no output is a constant of its initialization."""
    torch.manual_seed(seed)
    config = type(SMALL[name])(**{**SMALL[name].model_dump(), **changes})
    model = build_segmenter(config, BackboneConfig(name="tiny", weights="random"), NUM_CLASSES)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def drawn(
    sizes: Sequence[tuple[int, int]], counts: Sequence[int], *, radii: tuple[int, int] = (8, 20), seed: int = 0
) -> tuple[Images, list[Targets]]:
    """Ellipses, each in a color of its own, on noise; padded to a multiple of 32."""
    generator = torch.Generator().manual_seed(seed)
    height, width = (-(-max(sides) // 32) * 32 for sides in zip(*sizes, strict=True))
    pixels = torch.zeros(len(sizes), 3, height, width, dtype=torch.uint8)
    targets = []
    for i, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        masks = ellipses(size, (height, width), count, radii, generator)
        pixels[i, :, : size[0], : size[1]] = torch.randint(90, 160, (3, *size), generator=generator)
        for mask in masks:
            pixels[i, :, mask] = torch.randint(0, 256, (3, 1), generator=generator, dtype=torch.uint8)
        labels = torch.randint(0, NUM_CLASSES, (count,), generator=generator)
        targets.append(Targets(labels, boxes_of(masks), masks, image_id=i))
    return Images(pixels, tuple(sizes)), targets


def ellipses(
    size: tuple[int, int], padded: tuple[int, int], count: int, radii: tuple[int, int], generator: torch.Generator
) -> Tensor:
    """(count, H, W) bool, none empty; radius 0 is a single pixel."""
    ys, xs = torch.arange(padded[0])[:, None], torch.arange(padded[1])
    masks = torch.zeros(count, *padded, dtype=torch.bool)
    for mask in masks:
        y, x = (int(torch.randint(0, side, (), generator=generator)) for side in size)
        ry, rx = (torch.randint(radii[0], radii[1] + 1, (2,), generator=generator) + 0.5).tolist()
        mask |= ((ys - y) / ry) ** 2 + ((xs - x) / rx) ** 2 < 1
        mask[size[0] :] = False
        mask[:, size[1] :] = False
    return masks


def boxes_of(masks: Tensor) -> Tensor:
    """(K, 4) x0 y0 x1 y1 of each mask, the far edge exclusive."""
    boxes = torch.zeros(len(masks), 4)
    for box, mask in zip(boxes, masks, strict=True):
        ys, xs = mask.nonzero(as_tuple=True)
        box[:] = torch.tensor([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
    return boxes
