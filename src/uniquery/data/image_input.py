"""An image as callers have it: a file, a PIL image, an array or a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from uniquery.data.images import read_image, rgb_array
from uniquery.errors import DataError

ImageInput = str | Path | Image.Image | npt.NDArray[Any] | Tensor


def as_rgb_array(image: ImageInput, bit_depth: int | None = None) -> npt.NDArray[np.uint8]:
    """(H, W, 3) uint8 RGB of an image in any form.

    Args:
        image: a path, a PIL image of any mode, an (H, W, 3) or (H, W) uint8 array, or a (3, H, W) uint8 tensor.
            Files and PIL images are turned upright by their EXIF orientation.
        bit_depth: of 16-bit files and PIL images, as for `read_image`.

    Raises:
        DataError: the file cannot be read, or the array or tensor has another shape or dtype.

    >>> as_rgb_array(torch.zeros(3, 2, 5, dtype=torch.uint8)).shape
    (2, 5, 3)
    """
    if isinstance(image, str | Path):
        return read_image(Path(image), bit_depth)
    if isinstance(image, Image.Image):
        return _from_pil(image, bit_depth)
    if isinstance(image, Tensor):
        return _from_tensor(image)
    if isinstance(image, np.ndarray):
        return _from_array(image)
    raise DataError(f"An image is a path, a PIL image, a numpy array or a tensor, not {type(image).__name__}.")


def _from_pil(image: Image.Image, bit_depth: int | None) -> npt.NDArray[np.uint8]:
    try:
        rgb = rgb_array(image, bit_depth)
    except Exception as error:  # pillow decodes on first use, and raises whatever it meets in a broken file
        raise DataError(f"The PIL image cannot be read: {error}.") from None
    return _not_empty(rgb)


def _from_tensor(image: Tensor) -> npt.NDArray[np.uint8]:
    shape = tuple(image.shape)
    if image.dtype != torch.uint8:
        hint = "(image * 255).round().to(torch.uint8) if its values are in 0..1"
        raise DataError(f"An image tensor is uint8 in 0..255, not {str(image.dtype)[6:]}: convert it, {hint}.")
    if len(shape) == 3 and shape[0] == 3:
        return _not_empty(np.ascontiguousarray(image.detach().cpu().permute(1, 2, 0).numpy()))
    if len(shape) == 4:
        hint = ": give the images of a batch as a list"
    elif len(shape) == 3 and shape[2] == 3:
        hint = ": use image.permute(2, 0, 1)"
    else:
        hint = ""
    raise DataError(f"An image tensor has the shape (3, H, W), not {shape}{hint}.")


def _from_array(image: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    shape = image.shape
    if image.dtype != np.uint8:
        hint = "(image * 255).round().astype(np.uint8) if its values are in 0..1"
        raise DataError(f"An image array is uint8 in 0..255, not {image.dtype}: convert it, {hint}.")
    if len(shape) == 2:
        return _not_empty(np.repeat(image[..., None], 3, axis=2))
    if len(shape) == 3 and shape[2] == 3:
        return _not_empty(np.ascontiguousarray(image))
    if len(shape) == 4:
        hint = ": give the images of a batch as a list"
    elif len(shape) == 3 and shape[2] == 4:
        hint = ": leave the fourth channel out with image[..., :3]"
    elif len(shape) == 3 and shape[0] == 3:
        hint = ": use image.transpose(1, 2, 0)"
    else:
        hint = ""
    raise DataError(f"An image array has the shape (H, W, 3) or (H, W), not {shape}{hint}.")


def _not_empty(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if not image.size:
        raise DataError(f"An image of {image.shape[0]} × {image.shape[1]} pixels is empty.")
    return image
