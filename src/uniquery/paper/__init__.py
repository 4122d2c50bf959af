"""The tables of the paper: their figures, and the configuration of each row."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from pydantic import Field, model_validator

from uniquery.errors import ConfigError, did_you_mean
from uniquery.settings import Settings, validate_settings
from uniquery.training.config_files import PAPER, read_yaml, shipped_configs

_FILE = Path(__file__).with_name("tables.yaml")


class PaperData(Settings):
    """A data set of the paper."""

    title: str
    train_images: int
    val_images: int
    classes: int


class PaperRow(Settings):
    """A row of a table."""

    row: str | None = Field(None, description="its name; None: a competitor, which has no configuration")
    method: str
    backbone: str | None = None
    epochs: float | None = None
    figures: tuple[float, ...]


class PaperTable(Settings):
    """A table: its rows have a figure for each metric."""

    title: str
    data: str
    test_dev: bool = Field(False, description="scored on COCO test-dev, whose annotations only a server has")
    metrics: tuple[str, ...]
    rows: tuple[PaperRow, ...]

    @model_validator(mode="after")
    def _is_complete(self) -> PaperTable:
        for row in self.rows:
            if len(row.figures) != len(self.metrics):
                raise ValueError(f"{row.method} has {len(row.figures)} figures for {len(self.metrics)} metrics")
        return self

    def format_figures(self, row: PaperRow) -> list[str]:
        """The figures of a row as text; all of a metric have the same number of decimals, as many as are needed."""
        columns = zip(*(each.figures for each in self.rows), strict=True)
        decimals = [max(len(f"{figure:.10g}".partition(".")[2]) for figure in column) for column in columns]
        return [f"{figure:.{digits}f}" for figure, digits in zip(row.figures, decimals, strict=True)]

    def row(self, name: str) -> PaperRow:
        """A row by its name.

        Raises:
            ConfigError: there is none.
        """
        rows = {row.row: row for row in self.rows if row.row is not None}
        if name not in rows:
            hint = did_you_mean(name, rows) or f" Its rows: {', '.join(rows)}."
            raise ConfigError(f"{self.title} has no row '{name}'.{hint}")
        return rows[name]


class Paper(Settings):
    """All tables."""

    data: dict[str, PaperData]
    tables: dict[str, PaperTable]

    def table(self, name: str) -> PaperTable:
        """A table by its name.

        Raises:
            ConfigError: there is none.
        """
        if name not in self.tables:
            hint = did_you_mean(name, self.tables) or f" Tables: {', '.join(self.tables)}."
            raise ConfigError(f"The paper has no table '{name}'.{hint}")
        return self.tables[name]


@cache
def read_paper() -> Paper:
    """The tables of the paper."""
    return validate_settings(Paper, read_yaml(_FILE), where=str(_FILE))


def config_name(table: str, row: str) -> str:
    """The name of a row's configuration.

    >>> config_name("table1", "solov2-r50")
    'paper/table1/solov2-r50'
    """
    return f"{PAPER}/{table}/{row}"


def our_figures(table: str, row: str) -> dict[str, float | None]:
    """What was measured for a row: the metrics of `uniquery eval --json`, in a file beside the row's configuration.

    Raises:
        ConfigError: the file is not what `uniquery eval --json` writes.
    """
    file = shipped_configs()[config_name(table, row)].with_suffix(".json")
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
        return dict((content.get("segm") or content["panoptic"])["metrics"])
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(f"{file} is not what 'uniquery eval --json' writes.") from None
