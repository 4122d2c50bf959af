"""When a run is saved, and from which checkpoint it goes on."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from rich.console import Console

from uniquery.errors import CheckpointError, UserError
from uniquery.files import kept_folders, recover_folder
from uniquery.training.checkpoint import ModelCard, TrainerState, load_trainer_state, read_card, save_checkpoint
from uniquery.training.log import MetricsLog
from uniquery.training.run import Run, trainer_state

LAST = "last"


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
                trainer_state(run),
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
