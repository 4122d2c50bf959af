"""Whether and how a run resumes: from an intact checkpoint, with the same configuration, data and weights."""

from __future__ import annotations

import zlib
from typing import Literal

import torch
from rich.console import Console

from uniquery.data.dataset import Dataset
from uniquery.data.sampling import images_per_epoch
from uniquery.errors import CheckpointError, ConfigError, UserError
from uniquery.parallel import any_rank, broadcast_from_first, choose_device, get_rank, synchronize
from uniquery.settings import flatten
from uniquery.training.checkpoint import load_last, move_damaged
from uniquery.training.config import Config
from uniquery.training.run import TrainingRun, count_steps, images_per_step
from uniquery.training.run_folder import RunFolder
from uniquery.weights.model_file import ModelInfo

Resume = bool | Literal["auto"]

# The data may be in another place; its checksum is compared instead.
MAY_DIFFER_ON_RESUME = (
    "name",
    "output",
    "data.workers",
    "data.on_unreadable",
    "data.train.annotations",
    "data.train.images",
    "data.val.annotations",
    "data.val.images",
    "data.train.panoptic_pngs",
    "data.val.panoptic_pngs",
    "train.steps",  # may be more; compared when the checkpoint is loaded
    "train.epochs",
    "train.batch_size",  # the images per step are compared when the checkpoint is loaded
    "train.accumulate",
    "train.patience",
    "train.log_every",
    "train.save_every",
    "train.save_minutes",
    "train.keep_last",
    "train.skip_nonfinite",
    "train.device",
    "train.tensorboard",
)
_NOT_SET = "not set"


def should_resume(config: Config, resume: Resume) -> bool:
    """Whether a run starts from a checkpoint; all processes get the same answer, or one raises.

    Raises:
        UserError: a new run would overwrite another, or there is nothing to resume.
        ConfigError: the configuration has changed.
        CheckpointError: another process found a checkpoint and this one did not.
    """
    is_resumed = _should_resume(config, resume)
    # Waits for all processes: none may create the folder before all have looked at it.
    if any_rank(is_resumed, choose_device(config.train.device)) and not is_resumed:
        raise CheckpointError(
            f"Another process found a checkpoint in {config.folder} and this one did not: all processes must see the "
            "same folder."
        )
    return is_resumed


def _should_resume(config: Config, resume: Resume) -> bool:
    folder = RunFolder(config.folder)
    has_config, has_checkpoint = folder.config_file.is_file(), bool(folder.checkpoints())
    is_started = has_checkpoint or (has_config and folder.best.exists())
    if not resume:
        if is_started:
            raise UserError(f"{folder} already holds a run: continue it with --resume, or choose another --name.")
        return False
    if not has_config and (resume != "auto" or has_checkpoint):
        raise UserError(f"Nothing to resume: {folder.config_file} is missing. Train without --resume first.")
    if resume != "auto" or is_started:
        _check_config_unchanged(config, folder)
    return resume != "auto" or has_checkpoint


def _check_config_unchanged(config: Config, folder: RunFolder) -> None:
    before, now = (flatten(c.model_dump(mode="json")) for c in (folder.read_config(), config))
    keys = [k for k in {**before, **now} if not k.startswith(MAY_DIFFER_ON_RESUME)]
    changed = [k for k in keys if before.get(k, _NOT_SET) != now.get(k, _NOT_SET)]
    if changed:
        changes = ", ".join(f"{k} was {before.get(k, _NOT_SET)} and is {now.get(k, _NOT_SET)}" for k in changed[:5])
        raise ConfigError(
            f"--resume of {folder} with another configuration: {changes}. Use another name for a new run."
        )


def resume_run(run: TrainingRun, data: Dataset, console: Console) -> None:
    """Loads the newest intact checkpoint into a run.

    Raises:
        CheckpointError: there is none, or it does not fit the data or this version.
        ConfigError: the run would be shorter than before.
    """
    folder = run.folder
    before = folder.read_config()
    steps_before = count_steps(before.train, images_per_epoch(data, before.data.sampling), images_per_step(run.config))
    if run.steps < steps_before:
        raise ConfigError(
            f"--resume of {folder} with {run.steps} steps, but it was started with {steps_before}: train.steps and "
            "train.epochs can be raised, not lowered."
        )
    info, saved, checkpoint = load_last(folder, console)
    synchronize()  # no folder is moved before all processes have read
    if get_rank() == 0:
        move_damaged(folder, checkpoint)
    _check_classes_unchanged(info, data)
    try:
        _check_data_unchanged(saved.values["data_checksums"], run.data_checksums)
        run.load_trainer_state(saved)
    except (RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The checkpoint of {folder} does not fit this version of uniquery: {reason}.") from None
    more = ": it is already complete. To train on, raise train.steps or train.epochs." if run.step == run.steps else ""
    if run.step < run.steps and run.is_out_of_patience:
        more = ": it stopped early. To train on, raise train.patience."
    console.print(f"Resuming {folder} from step {run.step}{more}")
    if run.steps > steps_before:
        console.print(
            f"The run has {run.steps} steps instead of {steps_before}; from here on, the learning rate is that of the "
            "longer schedule."
        )


def _check_classes_unchanged(info: ModelInfo, data: Dataset) -> None:
    before, now = [c.name for c in info.categories], data.classes
    if before != now:
        raise CheckpointError(
            f"{data.annotations} has the classes {', '.join(now)}, but the checkpoint was trained on "
            f"{', '.join(before)}: start a new run, with train.init_from to use its weights."
        )


def _check_data_unchanged(before: dict[str, int], now: dict[str, int]) -> None:
    for split in {**now, **before}:
        if before.get(split) != now.get(split):
            raise CheckpointError(
                f"The images or instances of data.{split} are not those of the checkpoint: use the same data, or start "
                "a new run, with train.init_from to use its weights."
            )


def check_same_start(run: TrainingRun) -> None:
    """Compares step and weights with rank 0: processes that see other files would train other weights.

    Raises:
        CheckpointError: they differ.
    """
    checksum = 0
    for tensor in run.eval_state_dict().values():
        checksum = zlib.crc32(tensor.cpu().numpy().tobytes(), checksum)
    own = torch.tensor([run.step, checksum], device=run.device)
    first = own.clone()
    broadcast_from_first([first])
    if not torch.equal(first, own):
        raise CheckpointError(
            f"Process {get_rank()} starts from step {run.step} and process 0 from step {int(first[0])}, or their "
            f"weights differ: all processes must see the same {run.folder} and train.init_from."
        )
