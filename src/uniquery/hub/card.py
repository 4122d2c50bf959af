"""The page of a published model: what it finds, how well, with which settings and data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from uniquery.training.log import EvalLine, finite
from uniquery.weights.model_file import ModelInfo


@dataclass(frozen=True)
class CardContent:
    """What the page of a model says.

    Attributes:
        repository: `user/name`.
        info: the header of the model file.
        evaluation: the evaluation of this model on validation data, if its run has one.
        config: the settings of its run without paths, empty if there is no run.
        data_checksums: of the images and annotations of each split, empty if there is no run.
        version: of uniquery.
    """

    repository: str
    info: ModelInfo
    evaluation: EvalLine | None
    config: Mapping[str, Any]
    data_checksums: Mapping[str, int]
    version: str


def model_card(content: CardContent) -> str:
    """The page as Markdown, with a yaml header for the Hub."""
    sections = [_introduction(content), _metrics(content), _classes(content), _data(content), _settings(content)]
    header = yaml.safe_dump(_header(content), sort_keys=False, allow_unicode=True)
    return f"---\n{header}---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def _header(content: CardContent) -> dict[str, Any]:
    header: dict[str, Any] = {
        "library_name": "uniquery",
        "pipeline_tag": "image-segmentation",
        "tags": ["instance-segmentation", content.info.model.name, content.info.backbone.name],
    }
    if content.evaluation is None:
        return header
    values = {name: finite(value) for name, value in content.evaluation.metrics.items()}
    figures = [{"type": name, "value": round(value, 2)} for name, value in values.items() if value is not None]
    result = {
        "task": {"type": "image-segmentation"},
        "dataset": {"type": "custom", "name": "validation data"},
        "metrics": figures,
    }
    name = content.repository.partition("/")[2]
    return {**header, "model-index": [{"name": name, "results": [result]}]} if figures else header


def _introduction(content: CardContent) -> str:
    count = len(content.info.categories)
    return f"""# {content.repository.partition("/")[2]}

An instance segmenter, {content.info.model.name} on {content.info.backbone.name}, for {count} \
class{"es" if count != 1 else ""}. Trained with uniquery {content.version}.

```python
import uniquery  # pip install 'uniquery[hub]'

model = uniquery.load("hf://{content.repository}")
instances = model.predict("photo.jpg")
```"""


def _metrics(content: CardContent) -> str:
    line = content.evaluation
    if line is None:
        return "## Metrics\n\nIt was not evaluated."
    rows = [(name, _percent(value)) for name, value in line.metrics.items()]
    return (
        f"## Metrics\n\nOn the validation data, in percent, after {line.step} steps"
        f"{', EMA of the weights' if line.weights == 'ema' else ''}.\n\n{_table(('metric', 'value'), rows)}"
    )


def _classes(content: CardContent) -> str:
    chosen, line = content.info.thresholds, content.evaluation
    columns: dict[str, list[str]] = {
        "label": [str(label) for label in range(len(content.info.categories))],
        "class": [category.name for category in content.info.categories],
        "category id": [str(category.id) for category in content.info.categories],
    }
    if line is not None and line.per_class:
        columns[line.headline] = [_percent(line.per_class.get(name)) for name in columns["class"]]
    sentence = "No thresholds were chosen."
    if chosen is not None:
        columns["score ≥"] = [f"{score:.3f}" for score in chosen.scores]
        sentence = (
            f"Thresholds by {chosen.rule} on the validation data, which predictions use by default. A pixel belongs to "
            f"a mask from a probability of {chosen.mask:g}."
        )
    rows = list(zip(*columns.values(), strict=True))
    return f"## Classes and thresholds\n\n{sentence}\n\n{_table(tuple(columns), rows)}"


def _data(content: CardContent) -> str:
    if not content.data_checksums:
        return ""
    rows = [(split, f"`{checksum:08x}`") for split, checksum in content.data_checksums.items()]
    return (
        "## Data\n\nCRC-32 of what training reads from the annotations of each split, image names included."
        f"\n\n{_table(('split', 'checksum'), rows)}"
    )


def _settings(content: CardContent) -> str:
    if not content.config:
        return ""
    text = yaml.safe_dump(dict(content.config), sort_keys=False, allow_unicode=True).rstrip()
    return f"## Settings\n\nAlso in `config.json`; paths are left out.\n\n```yaml\n{text}\n```"


def _percent(value: float | None) -> str:
    return "n/a" if finite(value) is None else f"{value:.1f}"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; names are text, whatever characters they have."""
    lines = [titles, ["---"] * len(titles), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
