"""The html page of run folders: reads the runs, draws some of their validation images, writes the file."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from uniquery.data.dataset import Dataset, is_panoptic
from uniquery.errors import UserError
from uniquery.evaluation.compare import ImageInterval, bootstrap_over_images
from uniquery.report.drawings import LabeledMask
from uniquery.report.page import MIN_SCORE, Example, render, write_report
from uniquery.report.runs import load_run
from uniquery.report.tables import format_interval
from uniquery.training.batches import open_validation_data
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import read_model_info

NUM_EXAMPLES = 12


def build_report(
    folders: Sequence[Path],
    page: Path | None = None,
    *,
    intro: str = "",
    warn: Callable[[str], object] = warnings.warn,
) -> Path:
    """Writes the page of one run, or of several compared with the first.

    Args:
        folders: run folders.
        page: the file to write, by default report.html in the first folder.
        intro: a paragraph below the heading.
        warn: called with a sentence if the images of a run cannot be drawn.

    Returns:
        The file.

    Raises:
        UserError: a folder holds no run, or the file cannot be written.
    """
    page = RunFolder(folders[0]).report_file if page is None else page
    runs = [(load_run(folder), read_examples(folder, warn=warn)) for folder in folders]
    title = " and ".join(folder.resolve().name for folder in folders)
    differences = [sentence for folder in folders[1:] if (sentence := _difference(folders[0], folder))]
    write_report(page, render(runs, title, intro=intro, differences=differences))
    return page


def difference_over_images(first: Path, second: Path) -> ImageInterval | None:
    """Mask AP of the second run's best weights minus that of the first's, on the validation images that both share.

    Returns:
        None if they were evaluated on different data, or if data or predictions are no longer there.
    """
    runs = RunFolder(first), RunFolder(second)
    try:
        configs = [run.read_config() for run in runs]
        split, classes = configs[0].data.val, [[c.name for c in read_model_info(run.path).categories] for run in runs]
        if split is None or split != configs[1].data.val or classes[0] != classes[1]:
            return None
        data = open_validation_data(split, classes[0])
        if is_panoptic(data.categories):  # the interval is of mask AP
            return None
        truth = data.ground_truth()
        results = [run.read_predictions() for run in runs]
    except (UserError, ValueError, KeyError):  # the examples of the page warn about it
        return None
    limits = [config.eval.max_detections for config in configs if config.eval.max_detections]
    return bootstrap_over_images(truth, *results, max_detections=min(limits, default=None))


def _difference(first: Path, second: Path) -> str | None:
    """The difference of two runs as a sentence."""
    interval = difference_over_images(first, second)
    if interval is None:
        return None
    difference = format_interval(interval.delta, interval.low, interval.high)
    return (
        f"{second.name} minus {first.name}, best weights of each: {difference} mask AP; the 95 % interval is over the "
        "validation images. It says nothing about other seeds: 'uniquery study' measures those."
    )


def read_examples(folder: Path, *, warn: Callable[[str], object] = warnings.warn) -> list[Example]:
    """Validation images of a run with ground truth and predictions; none if its data is no longer there."""
    run = RunFolder(folder)
    if not run.config_file.is_file() or not run.predictions_file.is_file():
        return []
    try:
        split = run.read_config().data.val
        if split is None:
            return []
        info = read_model_info(folder)
        classes = [category.name for category in info.categories]
        return _examples(open_validation_data(split, classes, info.bit_depth), run.read_predictions())
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
