"""The html page of run folders: reads the runs, analyzes and draws their predictions, writes the file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from uniquery.errors import DataError, UserError
from uniquery.evaluation.inference import Progress, part_of
from uniquery.report.analysis import error_tables, score_section
from uniquery.report.differences import differing_images
from uniquery.report.drawings import LabeledMask
from uniquery.report.evaluated import EvaluatedRun, read_evaluated
from uniquery.report.page import Example, render, run_labels, write_report
from uniquery.report.runs import load_run
from uniquery.report.verdicts import Verdict, compare_sides
from uniquery.training.run_folder import RunFolder

NUM_EXAMPLES = 12
NUM_DIFFERENT = 6


def build_report(
    folders: Sequence[Path],
    page: Path | None = None,
    *,
    against: Sequence[Path] = (),
    intro: str = "",
    warn: Callable[[str], object] = warnings.warn,
    progress: Progress = lambda *_: None,
) -> Path:
    """Writes the page of one run, or of several that are compared.

    Args:
        folders: run folders.
        page: the file to write, by default report.html in the first folder.
        against: run folders that those of `folders` are compared with, paired by seed; if there are none, each run is
            compared with the first.
        intro: a paragraph below the heading.
        warn: called with a sentence if the predictions of a run cannot be analyzed.
        progress: called with how many parts are done, and how many there are.

    Returns:
        The file.

    Raises:
        UserError: a folder holds no run, runs cannot be paired by seed, or the file cannot be written.
    """
    page = RunFolder(folders[0]).report_file if page is None else page
    everything = [*against, *folders]
    records = [load_run(folder) for folder in everything]
    evaluated = [read_evaluated(folder, warn=warn) for folder in everything]
    labels = run_labels(records)
    html = render(
        [(record, examples_of(run) if run else []) for record, run in zip(records, evaluated, strict=True)],
        title=_title(folders, against),
        intro=intro,
        analysis=_analysis(evaluated, labels, len(against), progress),
    )
    write_report(page, html)
    return page


def _analysis(
    evaluated: Sequence[EvaluatedRun | None], labels: Sequence[str], controls: int, progress: Progress
) -> dict[str, Sequence[Any]]:
    """What the template `analysis` shows."""
    named = [(label, run) for label, run in zip(labels, evaluated, strict=True) if run and not run.is_panoptic]
    parts: dict[str, Callable[[Progress], Sequence[Any]]] = {
        "verdicts": lambda progress: _verdicts(evaluated, labels, controls, progress),
        "different": lambda _: _different(evaluated, labels, controls),
        "errors": lambda _: error_tables(named),
        "scores": lambda _: [score_section(label, run) for label, run in named],
    }
    found: dict[str, Sequence[Any]] = {}
    for number, (name, part) in enumerate(parts.items()):
        progress(number, len(parts))
        found[name] = part(part_of(progress, number, len(parts)))
    return found


def _title(folders: Sequence[Path], against: Sequence[Path]) -> str:
    sides = [" and ".join(folder.resolve().name for folder in side) for side in (folders, against) if side]
    return " against ".join(sides)


def _pairs(evaluated: Sequence[EvaluatedRun | None], controls: int) -> list[tuple[int, int]]:
    """(control, variant) that are compared image by image: all with the first, or the first of each side."""
    return [(0, controls)] if controls else [(0, other) for other in range(1, len(evaluated))]


def _verdicts(
    evaluated: Sequence[EvaluatedRun | None], labels: Sequence[str], controls: int, progress: Progress
) -> list[Verdict]:
    if controls:
        missing = [label for label, run in zip(labels, evaluated, strict=True) if run is None]
        if missing:
            raise UserError(
                f"{missing[0]} has no predictions on validation data that can be read: it has no difference."
            )
        runs = [run for run in evaluated if run is not None]
        names = [_side_name(labels[:controls]), _side_name(labels[controls:])]
        verdicts = [compare_sides(runs[:controls], runs[controls:], (names[0], names[1]), progress)]
    else:
        pairs = _pairs(evaluated, controls)
        verdicts = [
            compare_sides([before], [after], (labels[first], labels[second]), part_of(progress, number, len(pairs)))
            for number, (first, second) in enumerate(pairs)
            if (before := evaluated[first]) and (after := evaluated[second]) and after.shares_data_with(before)
        ]
    return [verdict for verdict in verdicts if verdict.metrics]


def _side_name(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"


def _different(evaluated: Sequence[EvaluatedRun | None], labels: Sequence[str], controls: int) -> list[dict[str, Any]]:
    """The images on which two runs differ most."""
    pictures = []
    for first, second in _pairs(evaluated, controls):
        before, after = evaluated[first], evaluated[second]
        if before and after and after.shares_data_with(before):
            sides, captions = [before.predictions, after.predictions], (labels[first], labels[second])
            pictures += differing_images(after.data, sides, captions, NUM_DIFFERENT)
    return pictures


def examples_of(run: EvaluatedRun) -> list[Example]:
    """Some validation images, spread over the data, with ground truth and predictions; those that can be read."""
    val, least = run.data, run.score_thresholds
    names = {category.id: category.name for category in val.categories}
    by_image: dict[int, list[dict[str, Any]]] = {}
    for result in run.results:
        if result["score"] >= least[result["category_id"]]:
            by_image.setdefault(result["image_id"], []).append(result)
    examples = []
    for index in range(0, len(val), max(1, len(val) // NUM_EXAMPLES))[:NUM_EXAMPLES]:
        try:
            image, instances = val.read(index), val.instances(index)
        except DataError:  # the evaluation left it out, with a warning
            continue
        truth = [LabeledMask(mask, val.classes[label]) for label, mask in instances]
        predicted = [
            LabeledMask(result["segmentation"], names[result["category_id"]], result["score"])
            for result in by_image.get(int(val.image_ids[index]), ())
        ]
        examples.append(Example(val.path(index).name, image, truth, predicted))
    return examples
