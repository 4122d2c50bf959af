"""Results in the form that the evaluation server of COCO takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

from uniquery.data.dataset import Row
from uniquery.files import write_atomically

_KEYS = ("image_id", "category_id", "segmentation", "score")  # with a 'bbox', areas would be those of boxes
_SERVER_NAME = re.compile(r"detections_[^_]+_[^_]+_results")


def submission_name(annotations: Path, name: str) -> str:
    """The name that the server asks for: detections_<split>_<algorithm>_results.

    Args:
        annotations: the json of the images; its name ends with that of the split.
        name: of the algorithm, or already in that form.

    >>> submission_name(Path("image_info_test-dev2017.json"), "solov2_r50")
    'detections_test-dev2017_solov2-r50_results'
    >>> submission_name(Path("image_info_test-dev2017.json"), "detections_test-dev2017_mine_results")
    'detections_test-dev2017_mine_results'
    """
    if _SERVER_NAME.fullmatch(name):
        return name
    split = annotations.stem.rpartition("_")[2]
    return f"detections_{split}_{name.replace('_', '-')}_results"


def write_submission(path: Path, results: Sequence[Row], annotations: Path) -> Path:
    """Writes masks as a zip with one json, both with the server's name, and returns the path of the zip.

    Args:
        path: a zip; its folder is where it is written, its name that of the algorithm.
        results: COCO results.
        annotations: the json of the images.

    Raises:
        UserError: the file cannot be written.
    """
    name = submission_name(annotations, path.stem)
    content = BytesIO()
    with ZipFile(content, "w", ZIP_DEFLATED) as archive, archive.open(f"{name}.json", "w", force_zip64=True) as file:
        for index, row in enumerate(results):
            text = json.dumps({key: row[key] for key in _KEYS})
            file.write(f"{',' if index else '['}{text}".encode())
        file.write(b"]" if results else b"[]")
    zipped = path.with_name(f"{name}.zip")
    write_atomically(zipped, content.getvalue())
    return zipped
