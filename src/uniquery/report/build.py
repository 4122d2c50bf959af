"""The html page of run folders: reads the runs, draws some of their validation images, writes the file."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from uniquery.data.dataset import Dataset
from uniquery.errors import UserError
from uniquery.report.drawings import LabeledMask
from uniquery.report.page import Example, render, write_report
from uniquery.report.runs import load_run
from uniquery.training.batches import open_validation_data
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import read_model_info

NUM_EXAMPLES = 12
MIN_SCORE = 0.5  # smallest score of a prediction that is drawn


def build_report(
    folders: Sequence[Path], page: Path | None = None, *, warn: Callable[[str], object] = warnings.warn
) -> Path:
    """Writes the page of one run, or of several compared with the first.

    Args:
        folders: run folders.
        page: the file to write, by default report.html in the first folder.
        warn: called with a sentence if the images of a run cannot be drawn.

    Returns:
        The file.

    Raises:
        UserError: a folder holds no run, or the file cannot be written.
    """
    page = RunFolder(folders[0]).report_file if page is None else page
    runs = [(load_run(folder), read_examples(folder, warn=warn)) for folder in folders]
    write_report(page, render(runs, " and ".join(folder.resolve().name for folder in folders)))
    return page


def read_examples(folder: Path, *, warn: Callable[[str], object] = warnings.warn) -> list[Example]:
    """Validation images of a run with ground truth and predictions; none if its data is no longer there."""
    run = RunFolder(folder)
    if not run.config_file.is_file() or not run.predictions_file.is_file():
        return []
    try:
        split = run.read_config().data.val
        if split is None:
            return []
        classes = [category.name for category in read_model_info(folder).categories]
        return _examples(open_validation_data(split, classes), run.read_predictions())
    except (UserError, ValueError, KeyError) as error:  # data, predictions or the version have changed since
        warn(f"The report of {folder} has no pictures: {error}")
        return []


def _examples(val: Dataset, results: Sequence[dict[str, Any]]) -> list[Example]:
    by_image: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_image[result["image_id"]].append(result)
    names = {category.id: category.name for category in val.categories}
    examples = []
    for index in range(0, len(val), max(1, len(val) // NUM_EXAMPLES))[:NUM_EXAMPLES]:
        truth = [LabeledMask(mask, val.classes[label]) for label, mask in val.instances(index)]
        predicted = [
            LabeledMask(result["segmentation"], names[result["category_id"]], result["score"])
            for result in by_image[int(val.image_ids[index])]
            if result["score"] >= MIN_SCORE
        ]
        examples.append(Example(val.path(index).name, val.read(index), truth, predicted))
    return examples
