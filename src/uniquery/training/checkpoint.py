"""Checkpoints: safetensors and json, nothing that can run code.

`model.safetensors` is a model on its own: its header says the architecture and the classes. `trainer.safetensors` and
`trainer.json` beside it hold what a resumed run needs more, `checksums.json` what all of them were when written.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from torch import Tensor

from uniquery.data.dataset import Dataset
from uniquery.errors import CheckpointError, UserError
from uniquery.files import folder_replaced, kept_folders, recover_folder
from uniquery.training.log import MetricsLog
from uniquery.weights.checksummed import TensorFile, read_tensors, read_values, write_checksummed
from uniquery.weights.model_file import MODEL_FILE, ModelCard, read_card

if TYPE_CHECKING:
    from uniquery.training.run import Run

TENSORS_FILE, STATE_FILE = "trainer.safetensors", "trainer.json"
LAST = "last"


@dataclass(frozen=True)
class TrainerState:
    """What a resumed run needs beside the model: tensors by name, and plain values.

    Attributes:
        tensors: by name.
        values: plain numbers and text.
        model_is: the prefix under which the tensors of the model file are a part of it too; they are written once.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    model_is: str


def save_checkpoint(
    folder: Path, state: Mapping[str, Tensor], card: ModelCard, trainer: TrainerState | None = None, *, keep: int = 0
) -> None:
    """Replaces a checkpoint folder as a whole, and keeps some of its predecessors.

    Raises:
        UserError: the system refuses; the checkpoint that was there is untouched.
    """
    files: dict[str, TensorFile | str] = {MODEL_FILE: TensorFile(state, card.to_metadata())}
    if trainer is not None:
        files[TENSORS_FILE] = TensorFile(trainer.tensors)
        files[STATE_FILE] = json.dumps({**trainer.values, "model_is": trainer.model_is})
    with folder_replaced(folder, keep=keep) as temporary:
        write_checksummed(temporary, files)


def load_trainer_state(folder: Path) -> TrainerState:
    """What a run left to resume from, with the tensors of its model file among the others.

    Raises:
        CheckpointError: a file is missing, or not what was written.
    """
    values = read_values(folder / STATE_FILE)
    model_is = values.pop("model_is", "")
    tensors = read_tensors(folder / TENSORS_FILE)
    if model_is:
        tensors |= {f"{model_is}{name}": tensor for name, tensor in read_tensors(folder / MODEL_FILE).items()}
    return TrainerState(tensors, values, model_is)


def check_classes_unchanged(card: ModelCard, data: Dataset) -> None:
    """Raises if a run's data no longer has the classes that its checkpoint was trained on."""
    before, now = [c.name for c in card.categories], data.classes
    if before != now:
        raise CheckpointError(
            f"{data.annotations} has the classes {', '.join(now)}, but the checkpoint was trained on "
            f"{', '.join(before)}: start a new run, with train.init_from if its weights are to be used."
        )


class Saver:
    """Writes `last` when it is time, by steps or by the clock, and never the same state twice.

    Args:
        run: what is saved.
        folder: of the run.
        log: whose lines must be on the disk first.
    """

    def __init__(self, run: Run, folder: Path, log: MetricsLog) -> None:
        self.run, self.folder, self.log = run, folder, log
        self._saved = self._now()
        self._time = time.monotonic()

    def is_due(self) -> bool:
        """Whether enough steps or minutes have passed."""
        settings = self.run.config.train
        minutes = (time.monotonic() - self._time) / 60
        return self.run.step % settings.save_every == 0 or (settings.save_minutes or float("inf")) <= minutes

    def save(self) -> None:
        """Writes a checkpoint unless this very state was written or read.

        Raises:
            UserError: the system refuses; the checkpoint before is intact.
        """
        if self._now() == self._saved:
            return
        run = self.run
        is_same_step = run.step == self._saved[0]  # evaluated since: it takes the place of the one before
        try:
            self.log.sync()
            save_checkpoint(
                self.folder / LAST,
                run.evaluated_state(),
                run.card,
                run.trainer_state(),
                keep=0 if is_same_step else run.config.train.keep_last - 1,
            )
        except UserError as error:
            before = f"the checkpoint of step {self._saved[0]} is intact" if self._saved[0] else "there is none before"
            raise UserError(
                f"{error} Training stopped at step {run.step}; {before}. Make room, then go on with --resume auto."
            ) from None
        self._saved, self._time = self._now(), time.monotonic()

    def _now(self) -> tuple[int, int]:
        return self.run.step, self.run.evaluated


def has_checkpoint(folder: Path) -> bool:
    """Whether a run has anything to go on from, whole or not."""
    recover_folder(folder / LAST)
    return bool(kept_folders(folder / LAST))


def load_last(folder: Path, console: Console) -> tuple[ModelCard, TrainerState, Path]:
    """The newest checkpoint of a run that is whole, and where it lies; says so if it is not the last.

    Raises:
        CheckpointError: there is none.
    """
    recover_folder(folder / LAST)
    places = kept_folders(folder / LAST)
    if not places:
        raise CheckpointError(f"Nothing to resume: there is no checkpoint in {folder}.")
    errors = []
    for place in places:
        try:
            state, card = load_trainer_state(place), read_card(place)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if errors:
            console.print(
                f"[yellow]warning:[/] {errors[0]} Going on from {place}, which is whole: step {state.values['step']}."
            )
        return card, state, place
    raise CheckpointError(f"No checkpoint of {folder} is whole: {' '.join(errors)}")


def set_aside_damaged(folder: Path, whole: Path) -> None:
    """Moves checkpoints newer than the whole one to `last.damaged`: the next save must not take them for good ones."""
    damaged = folder / f"{LAST}.damaged"
    for place in kept_folders(folder / LAST):
        if place == whole:
            return
        shutil.rmtree(damaged, ignore_errors=True)
        place.rename(damaged)
