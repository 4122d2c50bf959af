"""Checkpoints: safetensors and json, nothing that can run code.

`model.safetensors` is a complete model: its header holds the architecture and the classes. `trainer.safetensors` and
`trainer.json` hold what else a resumed run needs, `checksums.json` the checksums of all of them.
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

from uniquery.errors import CheckpointError, UserError
from uniquery.files import replace_folder
from uniquery.training.log import MetricsLog
from uniquery.training.run_folder import RunFolder
from uniquery.weights.checksummed import TensorFile, read_json, read_safetensors, write_checksummed
from uniquery.weights.model_file import MODEL_FILE, ModelInfo, read_model_info

if TYPE_CHECKING:
    from uniquery.training.run import TrainingRun

TENSORS_FILE, VALUES_FILE = "trainer.safetensors", "trainer.json"


@dataclass(frozen=True)
class TrainerState:
    """What a resumed run needs beside the model.

    Attributes:
        tensors: tensors by name.
        values: numbers and text by name.
        model_prefix: the prefix under which the tensors of the model file belong to `tensors`; they are written once.
    """

    tensors: dict[str, Tensor]
    values: dict[str, Any]
    model_prefix: str


def add_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under names with a prefix."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def strip_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names have a prefix, under names without it.

    >>> import torch
    >>> strip_prefix({"model/weight": torch.zeros(1), "ema/weight": torch.zeros(2)}, "model/")
    {'weight': tensor([0.])}
    """
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def save_checkpoint(
    folder: Path, state: Mapping[str, Tensor], info: ModelInfo, trainer: TrainerState | None = None, *, keep: int = 0
) -> None:
    """Replaces a checkpoint folder atomically, and keeps some of the older versions.

    Raises:
        UserError: it cannot be written; the old checkpoint is unchanged.
    """
    files: dict[str, TensorFile | str] = {MODEL_FILE: TensorFile(state, info.to_metadata())}
    if trainer is not None:
        files[TENSORS_FILE] = TensorFile(trainer.tensors)
        files[VALUES_FILE] = json.dumps({**trainer.values, "model_prefix": trainer.model_prefix})
    with replace_folder(folder, keep=keep) as temporary:
        write_checksummed(temporary, files)


def load_trainer_state(folder: Path) -> TrainerState:
    """The trainer state of a checkpoint, including the tensors of its model file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    values = read_json(folder / VALUES_FILE)
    prefix = values.pop("model_prefix", "")
    tensors = read_safetensors(folder / TENSORS_FILE)
    if prefix:
        tensors |= add_prefix(read_safetensors(folder / MODEL_FILE), prefix)
    return TrainerState(tensors, values, prefix)


class Saver:
    """Writes the checkpoint `last` every so many steps or minutes, and never the same state twice.

    Args:
        run: the training run.
        log: its log, which is flushed to disk before each checkpoint.
    """

    def __init__(self, run: TrainingRun, log: MetricsLog) -> None:
        self.run, self.log = run, log
        self._saved_steps = self._steps()
        self._saved_time = time.monotonic()

    def is_due(self) -> bool:
        """Whether enough steps or minutes have passed."""
        settings = self.run.config.train
        minutes = (time.monotonic() - self._saved_time) / 60
        return self.run.step % settings.save_every == 0 or (settings.save_minutes or float("inf")) <= minutes

    def save(self) -> None:
        """Writes a checkpoint unless this state was already written or was just loaded.

        Raises:
            UserError: it cannot be written; the checkpoint before is intact.
        """
        if self._steps() == self._saved_steps:
            return
        run, saved_step = self.run, self._saved_steps[0]
        is_same_step = run.step == saved_step  # evaluated since then: replace that checkpoint
        try:
            self.log.sync()
            save_checkpoint(
                run.folder.last,
                run.eval_state_dict(),
                run.info,
                run.trainer_state(),
                keep=0 if is_same_step else run.config.train.keep_last - 1,
            )
        except UserError as error:
            before = f"the checkpoint of step {saved_step} is intact" if saved_step else "there is no checkpoint yet"
            raise UserError(
                f"{error} Training stopped at step {run.step}; {before}. Free some disk space, then continue with "
                "--resume auto."
            ) from None
        self._saved_steps, self._saved_time = self._steps(), time.monotonic()

    def _steps(self) -> tuple[int, int]:
        return self.run.step, self.run.eval_step


def load_last(folder: RunFolder, console: Console) -> tuple[ModelInfo, TrainerState, Path]:
    """The newest intact checkpoint of a run, and its folder; prints a warning if newer ones are damaged.

    Raises:
        CheckpointError: there is none.
    """
    checkpoints = folder.checkpoints()
    if not checkpoints:
        raise CheckpointError(f"Nothing to resume: there is no checkpoint in {folder}.")
    errors = []
    for checkpoint in checkpoints:
        try:
            state, info = load_trainer_state(checkpoint), read_model_info(checkpoint)
        except CheckpointError as error:
            errors.append(str(error))
            continue
        if errors:
            instead = f"Using {checkpoint} of step {state.values['step']} instead."
            console.print(f"[yellow]warning:[/] {errors[0]} {instead}", soft_wrap=True)
        return info, state, checkpoint
    raise CheckpointError(f"No checkpoint of {folder} is intact: {' '.join(errors)}")


def move_damaged(folder: RunFolder, intact: Path) -> None:
    """Moves the checkpoints that are newer than the intact one away, so that the next save does not keep them."""
    for checkpoint in folder.checkpoints():
        if checkpoint == intact:
            return
        shutil.rmtree(folder.damaged, ignore_errors=True)
        checkpoint.rename(folder.damaged)
