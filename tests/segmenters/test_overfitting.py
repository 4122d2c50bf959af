"""Every segmenter of the table learns what it is shown."""

import pytest
import torch

from helpers.small_segmenters import drawn, small
from uniquery.querying import UniqueQuerying
from uniquery.segmenters import SEGMENTERS
from uniquery.structures import Images, Targets, grid_locations


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEGMENTERS))
def test_two_images_are_learned_by_heart(name):
    images, targets = two_scenes()
    model = small(name)
    steps, rate = 200, 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.stack(list(UniqueQuerying(model)(images, targets).values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        predictions = model.eval().predict(model(images), images.sizes)
    for instances, target in zip(predictions, targets, strict=True):
        confident = instances[instances.scores > 0.5]
        for mask, label in zip(target.masks, target.labels, strict=True):
            found = confident[confident.labels == label].masks
            iou = (found & mask).sum((1, 2)) / (found | mask).sum((1, 2))
            assert iou.numel()
            assert iou.max() > 0.8


def two_scenes() -> tuple[Images, list[Targets]]:
    """Three large shapes each, apart from each other: ellipses, and one rectangle."""
    images, targets = drawn(((128, 128),) * 2, (0, 0))
    boxes = torch.tensor(
        [
            [(8, 8, 60, 56), (70, 10, 120, 70), (20, 75, 100, 120)],
            [(10, 20, 50, 110), (62, 6, 120, 50), (66, 64, 118, 116)],
        ]
    ).float()
    colors = torch.tensor([[220, 40, 40], [40, 200, 60], [50, 60, 230]], dtype=torch.uint8)
    at = grid_locations(128, 128, 1).view(128, 128, 1, 2) + 0.5
    for i, of_image in enumerate(boxes):
        offset = (2 * at - of_image[:, :2] - of_image[:, 2:]) / (of_image[:, 2:] - of_image[:, :2])  # −1..1 inside
        masks = (offset.square().sum(3) < 1).permute(2, 0, 1)
        masks[0] = offset[:, :, 0].abs().amax(2) < 1
        for mask, color in zip(masks, colors, strict=True):
            images.pixels[i, :, mask] = color[:, None]
        targets[i] = Targets(torch.arange(3), of_image, masks, image_id=i)
    return images, targets
