"""Pictures of the user: predicted, kept for a while, and offered as files."""

from __future__ import annotations

import io
import json
import warnings
from collections import OrderedDict
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from uniquery.data.image_input import as_rgb_array
from uniquery.data.images import FORMATS
from uniquery.errors import DataError, UserError
from uniquery.explore.pictures import LONGEST, jpeg_bytes
from uniquery.explore.runs import ExploredRun
from uniquery.explore.thresholds import Forward, packed
from uniquery.report.drawings import label_map, labeled_masks, overlay, png_bytes

MAX_BYTES = 32 * 2**20
MAX_PIXELS = 40_000_000
KEPT = 4
"""How many uploads are kept: each takes its pixels, its forward and its masks."""


@dataclass(frozen=True)
class Upload:
    """A picture and what the model of a run found in it.

    Attributes:
        image: (H, W, 3).
        run: whose model predicts.
        forward: of the model on the image.
    """

    image: npt.NDArray[np.uint8]
    run: ExploredRun
    forward: Forward

    def predictions_at(self, mask_threshold: float | None) -> list[list[Any]]:
        """[label, score, run lengths] of each instance at a mask threshold; None: the model's own."""
        with self.run.lock:
            return packed(self.forward.at(mask_threshold), range(len(self.forward.model.classes)))

    def file(self, name: str, score: float, mask_threshold: float | None) -> tuple[bytes, str]:
        """The content and the media type of a file, with the instances that reach the thresholds.

        Raises:
            UserError: there is no file of that name.
        """
        if name == "picture.jpg":
            return jpeg_bytes(self.image, LONGEST["picture"]), "image/jpeg"
        model = self.forward.model
        with self.run.lock:
            instances = self.forward.at(mask_threshold)
        instances = replace(instances[instances.scores >= score], classes=model.classes)
        masks = labeled_masks(instances)
        if name == "results.json":
            ids = [category.id for category in model.categories]
            return json.dumps(instances.to_coco(1, ids)).encode(), "application/json"
        if name == "labels.png":
            return png_bytes(label_map(masks, instances.size)), "image/png"
        if name == "overlay.png":
            return png_bytes(overlay(self.image, masks)), "image/png"
        raise UserError("An upload offers results.json, labels.png, overlay.png and picture.jpg.")


class Uploads:
    """The last few pictures of the user, in memory only."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Upload] = OrderedDict()
        self._numbers = count(1)

    def add(self, run: ExploredRun, content: bytes) -> dict[str, Any]:
        """Predicts a picture; ready for json.

        Raises:
            UserError: it is no image, or too large.
        """
        image = decode(content)
        with run.lock:
            upload = Upload(image, run, Forward.of(run.model(), image))
        number = next(self._numbers)
        self._kept[number] = upload
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return {
            "upload": number,
            "height": image.shape[0],
            "width": image.shape[1],
            "classes": list(upload.forward.model.classes),
            "predictions": upload.predictions_at(None),
        }

    def get(self, number: int) -> Upload:
        """An upload by its number.

        Raises:
            UserError: it is not kept any more.
        """
        if number not in self._kept:
            raise UserError("That picture is not kept any more: drop it again.")
        return self._kept[number]


def decode(content: bytes) -> npt.NDArray[np.uint8]:
    """(H, W, 3) of an image file.

    Raises:
        DataError: it is no image of a known format, is damaged, or has too many pixels.
    """
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"The picture has more than {MAX_PIXELS:,} pixels: scale it down first.")
            return as_rgb_array(image)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError):
        raise DataError(f"That is no picture: it is damaged, or none of {', '.join(FORMATS)}.") from None
