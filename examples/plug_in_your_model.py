"""The method in somebody else's model and loop, on one page: a toy segmenter that finds discs.

    python examples/plug_in_your_model.py

Your model needs two things: dense pixel embeddings, and one embedding (query) per instance whose dot product with the
pixels is a mask. Everything from uniquery is marked with its equation.
"""

import torch
from torch import Tensor, nn

from uniquery.masks.geometry import mask_boxes
from uniquery.masks.losses import dice
from uniquery.querying import (
    EquivarianceLoss,
    InterSceneLoss,
    PixelMemory,
    PixelSampling,
    RandomTransform,
    sample_pixels,
    view_of,
)
from uniquery.structures import Images, PixelMap, Queries, Targets, index_in_batch

SIZE, STRIDE = 96, 4  # crops are whole cells of 32 pixels


class Toy(nn.Module):
    """Pixel embeddings at stride 4; the query of an instance is read off at its center."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(5, channels, 5, stride=2, padding=2), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=4, dilation=4), nn.ReLU(),
        )  # fmt: skip
        self.pixels = nn.Conv2d(channels, channels, 1)
        self.query = nn.Conv2d(channels, channels, 1)

    def forward(self, images: Images, targets: list[Targets]) -> tuple[PixelMap, Queries]:
        x = images.pixels.float() / 255
        steps = torch.linspace(-1, 1, x.shape[-1])
        place = torch.stack(torch.meshgrid(steps, steps, indexing="ij")).expand(len(x), -1, -1, -1)
        features = self.trunk(torch.cat([x, place], dim=1))
        image = torch.cat([torch.full((len(t),), i) for i, t in enumerate(targets)])
        target = torch.cat([torch.arange(len(t)) for t in targets])
        center = torch.cat([t.boxes for t in targets]).view(-1, 2, 2).mean(1).div(STRIDE).long()
        queries = self.query(features)[image, :, center[:, 1], center[:, 0]]
        return PixelMap(self.pixels(features), STRIDE), Queries(queries, image, target)


def decode(queries: Queries, pixels: PixelMap) -> Tensor:
    """⟨q, I⟩ as (Q, h, w) logits, each query on its own image."""
    return torch.einsum("qd,qdhw->qhw", queries.embeddings, pixels.embeddings[queries.image])


def mask_loss(logits: Tensor, queries: Queries, targets: list[Targets]) -> Tensor:
    """Dice with the mask that each query owns."""
    masks = torch.cat([t.masks for t in targets])[:, STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE]
    return dice(logits.sigmoid(), masks[index_in_batch(targets, queries.image, queries.target)]).mean()


def discs(ids: range) -> tuple[Images, list[Targets]]:
    """Two colored discs on noise, side by side."""
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    pixels = torch.randint(0, 60, (len(ids), 3, SIZE, SIZE), dtype=torch.uint8)
    targets = []
    for image, i in zip(pixels, ids, strict=True):
        cx, cy, r = (
            torch.tensor([24, 72]) + torch.randint(-6, 7, (2,)),
            torch.randint(20, 76, (2,)),
            torch.randint(8, 16, (2,)),
        )
        masks = (x - cx[:, None, None]) ** 2 + (y - cy[:, None, None]) ** 2 < r[:, None, None] ** 2
        for mask in masks:
            image[:, mask] = torch.randint(80, 256, (3, 1), dtype=torch.uint8)
        targets.append(Targets(torch.zeros(2, dtype=torch.int64), mask_boxes(masks), masks, i))
    return Images(pixels, ((SIZE, SIZE),) * len(ids)), targets


def main(steps: int = 200, batch: int = 8) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    memory = PixelMemory(capacity=10_000)  # 𝓜
    inter_scene = InterSceneLoss(dot_product_scale=1.0)  # Eq. 5
    equivariance = EquivarianceLoss(decode, mask_loss)  # Eq. 8
    group = RandomTransform(flip=0.5, crop=(0.6, 1.0))  # G
    history = []
    for step in range(steps):
        images, targets = discs(range(step * batch, (step + 1) * batch))
        pixels, queries = model(images, targets)
        losses = {"mask": mask_loss(decode(queries, pixels), queries, targets)}

        memory.push(sample_pixels(pixels, targets, PixelSampling(count=20)))
        ids = torch.tensor([t.image_id for t in targets])[queries.image]
        losses["inter"] = inter_scene(queries, ids, memory.read())

        transforms = group.draw(images.sizes)  # g, one for each image
        view, view_targets = view_of(images, targets, transforms)
        _, view_queries = model(view, view_targets)
        losses["equi"] = 3 * equivariance(view_queries, view_targets, pixels, transforms)

        optimizer.zero_grad()
        sum(losses.values()).backward()
        optimizer.step()
        history.append({name: loss.item() for name, loss in losses.items()})
        if step % 20 == 0:
            print(f"step {step:3d}  " + "  ".join(f"{name} {value:.3f}" for name, value in history[-1].items()))
    return history


if __name__ == "__main__":
    main()
