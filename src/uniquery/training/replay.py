"""A training step saved as files, and replayed: the same batch, weights, random numbers and memory.

python -c "from uniquery.training.replay import replay; print(replay('runs/cells/non_finite_step'))"
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uniquery.data.batch import Batch
from uniquery.data.mirrored import mirrored_labels
from uniquery.errors import CheckpointError
from uniquery.files import replace_folder, restore_folder
from uniquery.parallel import get_rank
from uniquery.querying import UniqueQuerying
from uniquery.structures import Images, Targets
from uniquery.training.checkpoint import add_prefix, strip_prefix
from uniquery.training.config import to_yaml
from uniquery.training.log import json_number
from uniquery.training.phase_clock import PhaseClock
from uniquery.training.run import TrainingRun
from uniquery.training.run_folder import RunFolder
from uniquery.training.step import StepResult, forward_and_backward, gradient_norm, seed_step
from uniquery.weights.checksummed import TensorFile, read_json, read_safetensors, write_checksummed
from uniquery.weights.model_file import MODEL_FILE, load_model

BATCH_FILE, STATE_FILE, STEP_FILE = "batch.safetensors", "state.safetensors", "step.json"
_TARGET_FIELDS = ("labels", "boxes", "masks", "valid", "things", "negative_classes", "not_exhaustive_classes")


@dataclass(frozen=True)
class ReplayedStep:
    """The result of a replayed step, beside the recorded one.

    Attributes:
        step: its number.
        losses: mean of each term over the step's forwards.
        grad_norm: norm of all gradients together.
        recorded_losses: the losses when the step was saved.
        recorded_grad_norm: the norm when the step was saved.
        objective: the objective with its model, whose parameters hold the gradients of the step.
    """

    step: int
    losses: dict[str, float]
    grad_norm: float
    recorded_losses: dict[str, float]
    recorded_grad_norm: float
    objective: UniqueQuerying

    def __str__(self) -> str:
        rows = [(name, loss, self.recorded_losses[name]) for name, loss in self.losses.items()]
        rows.append(("gradient norm", self.grad_norm, self.recorded_grad_norm))
        lines = [f"  {name:<16} {value:<12.6g} (recorded: {recorded:.6g})" for name, value, recorded in rows]
        return "\n".join([f"step {self.step}", *lines])


def replay_command(folder: Path) -> str:
    """The shell command that replays a saved step."""
    return f'python -c "from uniquery.training.replay import replay; print(replay({str(folder)!r}))"'


def save_step(folder: Path, run: TrainingRun, batches: Sequence[Batch], result: StepResult) -> None:
    """Writes a step, from a run that was rolled back to the beginning of that step.

    Raises:
        UserError: the folder cannot be written.
    """
    values = {
        "step": run.step + 1,
        "rank": get_rank(),
        "losses": {name: json_number(loss.item()) for name, loss in result.losses.items()},
        "grad_norm": json_number(result.grad_norm.item()),
        "batches": [_batch_values(batch) for batch in batches],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(run.device),
        "replay": replay_command(folder),
    }
    batch_tensors = {k: v for i, batch in enumerate(batches) for k, v in _batch_tensors(i, batch).items()}
    with replace_folder(folder) as temporary:
        write_checksummed(
            temporary,
            {
                MODEL_FILE: TensorFile(run.model.state_dict(), run.info.to_metadata()),
                STATE_FILE: TensorFile(add_prefix(run.objective.algorithm_state(), "algorithm/")),
                BATCH_FILE: TensorFile(batch_tensors),
                STEP_FILE: json.dumps(values, indent=1),
                RunFolder(temporary).config_file.name: to_yaml(run.config),
            },
        )


def replay(folder: str | Path, device: torch.device | str = "cpu") -> ReplayedStep:
    """Runs the forwards and backwards of a saved step again; on the same machine and threads with identical bits.

    With several processes it replays one process alone, whose losses are then divided by its own counts.

    Inside `torch.autograd.detect_anomaly()` it names the operation that gives the first non-finite value.

    Args:
        folder: the `non_finite_step` folder of a run.
        device: where to run.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    folder, device = Path(folder), torch.device(device)
    restore_folder(folder)
    values, state = read_json(folder / STEP_FILE), read_safetensors(folder / STATE_FILE)
    batches = _read_batches(folder, values)
    step_folder = RunFolder(folder)
    if not step_folder.config_file.is_file():
        raise CheckpointError(f"{step_folder.config_file} is missing.")
    config = step_folder.read_config()
    model, info = load_model(folder / MODEL_FILE, device)
    mirrored = mirrored_labels(info.categories, config.data.flip_pairs)
    objective = UniqueQuerying(
        model, config.querying.inter, config.querying.equivariance, seed=config.seed, mirrored=mirrored
    ).train()
    objective.load_algorithm_state(strip_prefix(state, "algorithm/"), device)
    seed_step(config, values["step"] - 1, values["rank"])
    totals: dict[str, Tensor] = {}
    for batch in batches:
        losses = forward_and_backward(objective, batch.to(device), config, PhaseClock(device))
        totals = {name: totals.get(name, 0) + loss / config.train.accumulate for name, loss in losses.items()}
    return ReplayedStep(
        values["step"],
        {name: loss.item() for name, loss in totals.items()},
        gradient_norm(objective).item(),
        {name: float(loss) for name, loss in values["losses"].items()},
        float(values["grad_norm"]),
        objective,
    )


def _batch_values(batch: Batch) -> dict[str, Any]:
    return {
        "image_ids": [target.image_id for target in batch.targets],
        "sizes": batch.images.sizes,
        "original_sizes": batch.original_sizes,
    }


def _batch_tensors(index: int, batch: Batch) -> dict[str, Tensor]:
    tensors = {f"{index}/pixels": batch.images.pixels}
    for i, target in enumerate(batch.targets):
        fields = {name: getattr(target, name) for name in _TARGET_FIELDS}
        tensors |= {f"{index}/{i}/{name}": tensor for name, tensor in fields.items() if tensor is not None}
    return tensors


def _read_batches(folder: Path, values: dict[str, Any]) -> list[Batch]:
    tensors = read_safetensors(folder / BATCH_FILE)
    batches = []
    for index, batch in enumerate(values["batches"]):
        sizes = tuple((int(height), int(width)) for height, width in batch["sizes"])
        targets = [
            Targets(**strip_prefix(tensors, f"{index}/{i}/"), image_id=image_id)
            for i, image_id in enumerate(batch["image_ids"])
        ]
        images = Images(tensors[f"{index}/pixels"], sizes)
        batches.append(Batch(images, targets, [(int(h), int(w)) for h, w in batch["original_sizes"]]))
    return batches
