"""The response of a query on its own image and on others, drawn as heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uniquery.errors import UserError
from uniquery.evaluation.diagnose import ProbedImage
from uniquery.querying import Segmenter
from uniquery.report.drawings import grid
from uniquery.report.text_labels import Picture

OTHERS = 8
"""How many other images the picture shows."""


@torch.inference_mode()
def response_picture(model: Segmenter[Any, Any, Any], images: Sequence[ProbedImage]) -> Picture:
    """The best-matched query of the first image that has one, on its own image and on others.

    Raises:
        UserError: none of the images has a matched query.
    """
    own = next((image for image in images if len(image.queries)), None)
    if own is None:
        raise UserError("There is no picture to draw: none of the images has a matched query.")
    query = own.queries[own.own_response.argmax()[None]]
    others = [image for image in images if image is not own][:OTHERS]
    pictures, titles = [], []
    for image in [own, *others]:
        pixels = model(image.batch.images).pixels
        response = model.similarity(query, pixels.of_image(0)).sigmoid().view(1, 1, *pixels.embeddings.shape[-2:])
        pictures.append(_heat_map(image, response))
        titles.append("own image" if image is own else f"another, at most {response.max():.2f}")
    return grid(pictures, 3, titles)


def _heat_map(image: ProbedImage, response: Tensor) -> Picture:
    """The image in gray, with the response (1, 1, h, w) in red over it."""
    pixels, (height, width) = image.batch.images.pixels, image.batch.images.sizes[0]
    full = torch.nn.functional.interpolate(response, size=pixels.shape[-2:], mode="bilinear")
    heat = full[0, 0, :height, :width, None].cpu()
    gray = pixels[0, :, :height, :width].float().mean(0)[..., None].cpu()
    picture = gray * 0.7 * (1 - heat) + torch.tensor([255.0, 40.0, 20.0]) * heat
    return picture.round().clamp(0, 255).to(torch.uint8).numpy()
