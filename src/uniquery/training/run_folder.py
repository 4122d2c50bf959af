"""The folder of a run: every file and folder in it, written and read in one place."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from uniquery.errors import DataError, UserError
from uniquery.files import folder_versions, make_folder, restore_folder, write_atomically
from uniquery.training.config import Config, parse_config, to_yaml
from uniquery.training.config_files import Override, read_yaml
from uniquery.training.log import Line, read_metrics
from uniquery.weights.model_file import BEST, LAST

REPORT_FILE = "report.html"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: the folder.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def of_model(cls, path: Path) -> RunFolder | None:
        """The run that a run folder, a checkpoint folder or a model file belongs to, if any."""
        return next((run for p in (path, path.parent, path.parent.parent) if (run := cls(p)).is_run()), None)

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def environment_file(self) -> Path:
        """Versions, device, seed and command."""
        return self.path / "environment.json"

    @property
    def metrics_file(self) -> Path:
        """Losses and metrics, one json object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The TensorBoard log."""
        return self.path / "tensorboard"

    @property
    def best(self) -> Path:
        """The model with the best metric."""
        return self.path / BEST

    @property
    def last(self) -> Path:
        """The last checkpoint; `last.1` is the one before."""
        return self.path / LAST

    @property
    def damaged(self) -> Path:
        """The newest checkpoint that was found damaged."""
        return self.path / f"{LAST}.damaged"

    @property
    def predictions_file(self) -> Path:
        """COCO results of the best model on the validation data."""
        return self.path / "predictions.json"

    @property
    def final_predictions_file(self) -> Path:
        """COCO results of the last checkpoint on the validation data, which studies compare."""
        return self.path / "final_predictions.json"

    @property
    def report_file(self) -> Path:
        """The html page."""
        return self.path / REPORT_FILE

    @property
    def diagnosis_file(self) -> Path:
        """The figures of `uniquery diagnose`."""
        return self.path / "diagnose.json"

    @property
    def response_file(self) -> Path:
        """The picture of `uniquery diagnose`: a query's response on its own and on other images."""
        return self.path / "diagnose.png"

    def non_finite_step(self, rank: int) -> Path:
        """A step with a non-finite loss or gradient, as files that can be replayed; one folder per process."""
        return self.path / (f"non_finite_step-{rank}" if rank else "non_finite_step")

    def is_run(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file() and self.metrics_file.is_file()

    def checkpoints(self) -> list[Path]:
        """The last checkpoint and those before it, newest first; some may be damaged."""
        restore_folder(self.last)
        return folder_versions(self.last)

    def create(self, config: Config, environment: dict[str, Any] | None) -> None:
        """Makes the folder and writes the configuration, and the environment if one is given.

        Raises:
            UserError: the folder cannot be written.
        """
        make_folder(self.path)
        write_atomically(self.config_file, to_yaml(config))
        if environment is not None:
            write_atomically(self.environment_file, json.dumps(environment, indent=2))

    def read_config(self) -> Config:
        """The configuration of the run.

        Raises:
            ConfigError: the file is missing or wrong.
        """
        return parse_config(read_yaml(self.config_file), where=str(self.config_file))

    def config_to_resume(self, overrides: Sequence[Override] = ()) -> Config:
        """The configuration of the run as it continues, in the folder where it is now.

        Raises:
            ConfigError: the file is missing or wrong, or an override is.
        """
        path = self.path if self.path.name not in ("", "..") else self.path.resolve()
        place: list[Override] = [("output", str(path.parent)), ("name", path.name)]
        return parse_config(read_yaml(self.config_file), [*place, *overrides], where=str(self.config_file))

    def config_text(self) -> str:
        """`config.yaml` as text, empty if there is none."""
        return _read_text(self.config_file)

    def config_tables(self) -> dict[str, Any]:
        """`config.yaml` as tables, not validated: it may be of another version. Empty if there is none."""
        return _read_table(self.config_file, yaml.safe_load)

    def read_environment(self) -> dict[str, Any]:
        """`environment.json`, empty if there is none."""
        return _read_table(self.environment_file, json.loads)

    def read_metrics(self) -> list[Line]:
        """The lines of `metrics.jsonl`.

        Raises:
            UserError: the file is missing, or a line is wrong.
        """
        return read_metrics(self.metrics_file)

    def write_predictions(self, results: list[dict[str, Any]]) -> None:
        """Writes COCO results."""
        write_atomically(self.predictions_file, json.dumps(results))

    def read_predictions(self) -> list[dict[str, Any]]:
        """The COCO results.

        Raises:
            DataError: the file is missing or not json.
        """
        try:
            results: list[dict[str, Any]] = json.loads(self.predictions_file.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{self.predictions_file} cannot be read: {error}.") from None
        return results

    def write_diagnosis(self, figures: dict[str, Any]) -> None:
        """Writes the figures of `uniquery diagnose`."""
        write_atomically(self.diagnosis_file, json.dumps(figures, indent=2))

    def read_diagnosis(self) -> dict[str, Any]:
        """The figures of `uniquery diagnose`, empty if there are none."""
        return _read_table(self.diagnosis_file, json.loads)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def _read_table(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    text = _read_text(path)
    if not text.strip():
        return {}
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path} cannot be parsed: {' '.join(str(error).split())}.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold keys and values, and holds {type(value).__name__}.")
    return value
