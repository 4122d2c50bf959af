"""A run as the page sees it: its model, its predictions, and a sentence if something is wrong with its folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

from uniquery.data.dataset import GroundTruth, Row
from uniquery.errors import UserError
from uniquery.evaluation.error_summary import results_by_image
from uniquery.explore.analysis import ImageAnalysis
from uniquery.model import Model, load
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import SCORE_THRESHOLD, find_model_file


@dataclass(eq=False)
class ExploredRun:
    """A run folder, a checkpoint folder or a model file.

    Attributes:
        path: as it was given.
        name: what the page calls it.
        device: where its model goes.
        predictions: COCO results by image id, best first; grows while images are predicted.
        analysis: by image id.
        version: changes whenever predictions are replaced.
        model_version: changes whenever the model is replaced.
        message: what is wrong with the folder; empty if nothing is.
        lock: held while the model computes.
    """

    path: Path
    name: str
    device: str = "cpu"
    predictions: dict[int, list[Row]] = field(default_factory=dict)
    analysis: dict[int, ImageAnalysis] = field(default_factory=dict)
    version: int = 0
    model_version: int = 0
    message: str = ""
    lock: RLock = field(default_factory=RLock)
    _model: Model | None = None
    _model_stamp: int | None = None
    _model_problem: str = ""
    _predictions_stamp: int | None = None

    @property
    def folder(self) -> RunFolder | None:
        """The run folder; None for a model file elsewhere."""
        return RunFolder.of_model(self.path)

    def model(self) -> Model:
        """The best model so far; loaded again if its file has changed, kept if the file is gone.

        Raises:
            CheckpointError: there is none, or it cannot be read.
        """
        with self.lock:
            try:
                stamp = find_model_file(self.path).stat().st_mtime_ns
                if stamp != self._model_stamp:
                    self._model, self._model_stamp = load(self.path, device=self.device), stamp
                    self.model_version += 1
                self._model_problem = ""
            except (UserError, OSError) as error:
                if self._model is None:
                    raise
                self._model_problem = f"{str(error).rstrip('.')}: the page uses the model that was read before."
            assert self._model is not None
            return self._model

    def check_model(self) -> str:
        """What is wrong with the model in the folder, in one sentence; empty if nothing is, or there is none yet.

        Raises:
            CheckpointError: it cannot be read, and none was read before.
        """
        if self.has_model:
            self.model()
        return self._model_problem

    @property
    def has_model(self) -> bool:
        """Whether there is a model, in memory or in the folder."""
        try:
            return self._model is not None or find_model_file(self.path).is_file()
        except (UserError, OSError):
            return False

    @property
    def has_own_predictions(self) -> bool:
        """Whether predictions were read from the folder."""
        return self._predictions_stamp is not None

    def predictions_file(self, annotations: Path) -> Path | None:
        """The run's predictions on a data set; None if it has none of its own."""
        folder = self.folder
        if folder is None or not folder.predictions_file.is_file():
            return None
        split = folder.read_config().data.val
        same = split is not None and split.annotations.resolve() == annotations.resolve()
        return folder.predictions_file if same else None

    def read_predictions(self, truth: GroundTruth) -> bool:
        """Reads the predictions in the folder if they are new; whether they were.

        Raises:
            UserError: the folder or a file in it is damaged or gone.
        """
        if not self.path.exists():
            raise UserError(f"{self.path} is gone: the page shows what was read before.")
        file = self.predictions_file(Path(truth.source))
        if file is None:
            return False
        stamp = file.stat().st_mtime_ns
        if stamp == self._predictions_stamp:
            return False
        folder = self.folder
        assert folder is not None
        found = results_by_image(folder.read_predictions(), truth, 0.0)
        self._predictions_stamp = stamp
        self.replace_predictions({image_id: found.get(image_id, []) for image_id in truth.images})
        return True

    def replace_predictions(self, predictions: dict[int, list[Row]]) -> None:
        """Takes new predictions; the analysis of the old ones is dropped."""
        self.predictions, self.analysis = predictions, {}
        self.version += 1

    def least_scores(self, category_names: Sequence[str]) -> list[float]:
        """The least score of an instance that counts, by the labels of a data set."""
        chosen = self._model.thresholds if self._model is not None else None
        if self._model is None or chosen is None:
            return [SCORE_THRESHOLD] * len(category_names)
        known = {name: label for label, name in enumerate(self._model.classes)}
        return [chosen.scores[known[name]] if name in known else SCORE_THRESHOLD for name in category_names]


def open_runs(paths: Sequence[Path], device: str) -> list[ExploredRun]:
    """The runs at some paths, with different names.

    Raises:
        UserError: there is neither a run nor a model.
    """
    for path in paths:
        if not RunFolder(path).is_run():
            find_model_file(path)
    names = [path.resolve().name for path in paths]
    return [
        ExploredRun(path, name if names.count(name) == 1 else str(path), device)
        for path, name in zip(paths, names, strict=True)
    ]
