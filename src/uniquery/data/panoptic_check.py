"""The PNG files of a panoptic data set, checked one by one, and its segments counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from uniquery.data.coco_json import Problem
from uniquery.data.dataset import Row
from uniquery.data.images import inside_root, is_file
from uniquery.data.json_values import has_size
from uniquery.data.panoptic_json import check_png_size, read_ids
from uniquery.errors import DataError


class SegmentCounter:
    """Checks PNG files, and collects the segments as rows of instance annotations, which have no masks.

    Args:
        entries: image id → its entry of 'annotations', without fatal problems.
        pngs: the folder of the PNG files.
        read_pixels: decode the files, to find unknown ids and to measure segments; otherwise only headers are read.

    Attributes:
        rows: the segments of the images checked so far.
        areas: id of such a row → its pixels; as the json says if files are not decoded.
    """

    def __init__(self, entries: dict[int, Row], pngs: Path, *, read_pixels: bool) -> None:
        self._entries, self._pngs, self._read_pixels = entries, pngs, read_pixels
        self.rows: list[Row] = []
        self.areas: dict[int, int] = {}

    def check(self, image: Row) -> Iterator[Problem]:
        """What is wrong with the PNG file of an image."""
        entry = self._entries.get(image["id"]) if has_size(image) else None
        if entry is None:  # the tables are wrong, which is reported already
            return
        path, size = inside_root(self._pngs, entry["file_name"]), (image["height"], image["width"])
        segments = entry["segments_info"]
        areas = [int(segment.get("area") or 0) for segment in segments]
        if not is_file(path):
            yield Problem("missing PNG file", f"Image {image['id']}: the panoptic PNG file {path} is missing.")
            return
        try:
            check_png_size(path, size, image["id"])
            if self._read_pixels:
                ids = read_ids(path, size, {segment["id"] for segment in segments}, image["id"])
                numbers, counts = np.unique(ids, return_counts=True)
                found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
                areas = [found.get(segment["id"], 0) for segment in segments]
        except DataError as error:
            yield Problem("unreadable PNG file", str(error))
            return
        for segment, area in zip(segments, areas, strict=True):
            about = {key: segment.get(key) for key in ("category_id", "iscrowd")}
            row = {"id": len(self.rows), "image_id": image["id"], **about}
            self.rows.append(row)
            self.areas[row["id"]] = area
            if self._read_pixels and not area:
                text = f"Segment {segment['id']} of image {image['id']} has no pixels; training ignores it."
                yield Problem("empty segment", text, fatal=False)
