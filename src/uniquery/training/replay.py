"""A training step as files, and that step once more: the same batch, weights, random numbers and memory.

python -c "from uniquery.training.replay import replay; print(replay('runs/cells/astray'))"
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uniquery.data.batch import Batch
from uniquery.errors import CheckpointError
from uniquery.files import folder_replaced, recover_folder
from uniquery.parallel import get_rank
from uniquery.querying import UniqueQuerying
from uniquery.structures import Images, Targets
from uniquery.training.config import Config, parse_config, to_yaml
from uniquery.training.config_files import read_yaml
from uniquery.training.log import PhaseClock
from uniquery.training.run import Run, part
from uniquery.training.step import Gradients, forward_and_backward, gradient_norm, seed_step
from uniquery.weights.checksummed import TensorFile, read_tensors, read_values, write_checksummed
from uniquery.weights.model_file import MODEL_FILE, load_model

BATCH_FILE, STATE_FILE, STEP_FILE, CONFIG_FILE = "batch.safetensors", "state.safetensors", "step.json", "config.yaml"
_FIELDS = ("labels", "boxes", "masks", "valid", "things")


@dataclass(frozen=True)
class Replayed:
    """A step that was run again.

    Attributes:
        step: which.
        losses: mean of each term over the step's forwards.
        gradient_norm: of all gradients together.
        recorded_losses: what the losses were when the step was kept.
        recorded_norm: what the norm was.
        objective: with the model, whose parameters carry the gradients of the step.
    """

    step: int
    losses: dict[str, float]
    gradient_norm: float
    recorded_losses: dict[str, float]
    recorded_norm: float
    objective: UniqueQuerying

    def __str__(self) -> str:
        rows = [(name, loss, self.recorded_losses[name]) for name, loss in self.losses.items()]
        rows.append(("gradient norm", self.gradient_norm, self.recorded_norm))
        lines = [f"  {name:<16} {now:<12.6g} (then {then:.6g})" for name, now, then in rows]
        return "\n".join([f"step {self.step}", *lines])


def python_line(folder: Path) -> str:
    """The line of python that runs a kept step again."""
    return f'python -c "from uniquery.training.replay import replay; print(replay({str(folder)!r}))"'


def keep_step(folder: Path, run: Run, batches: Sequence[Batch], found: Gradients) -> None:
    """Writes a step that has not changed the weights yet, from a run that is back at its beginning.

    Raises:
        UserError: the system refuses.
    """
    state = {f"algorithm/{name}": tensor for name, tensor in run.objective.algorithm_state().items()}
    values = {
        "step": run.step + 1,
        "process": get_rank(),
        "losses": {name: as_number(loss.item()) for name, loss in found.losses.items()},
        "gradient_norm": as_number(found.norm.item()),
        "forwards": [_batch_values(batch) for batch in batches],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": str(run.device),
        "again": python_line(folder),
    }
    with folder_replaced(folder) as temporary:
        write_checksummed(
            temporary,
            {
                MODEL_FILE: TensorFile(run.model.state_dict(), run.card.to_metadata()),
                STATE_FILE: TensorFile(state),
                BATCH_FILE: TensorFile({k: v for i, b in enumerate(batches) for k, v in _batch_tensors(i, b).items()}),
                STEP_FILE: json.dumps(values, indent=1),
                CONFIG_FILE: to_yaml(run.config),
            },
        )


def replay(folder: str | Path, device: torch.device | str = "cpu") -> Replayed:
    """Runs the forwards and backwards of a kept step again; on the same machine and threads, bit for bit.

    Of several processes it is one's own part, alone: what losses are divided by is then its own number, too.

    Inside `torch.autograd.detect_anomaly()` it names the operation that goes wrong.

    Args:
        folder: that a run left, `astray` in its own.
        device: where to run.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    folder, device = Path(folder), torch.device(device)
    recover_folder(folder)
    values, state = read_values(folder / STEP_FILE), read_tensors(folder / STATE_FILE)
    batches = _read_batches(folder, values)
    config = _read_config(folder)
    model, _ = load_model(folder / MODEL_FILE, device)
    objective = config.querying.build(model, config.seed).train()
    objective.load_algorithm_state(part(state, "algorithm/"), device)
    seed_step(config, values["step"] - 1, values["process"])
    totals: dict[str, Tensor] = {}
    for batch in batches:
        losses = forward_and_backward(objective, batch.to(device), config, PhaseClock(device))
        totals = {name: totals.get(name, 0) + loss / config.train.accumulate for name, loss in losses.items()}
    return Replayed(
        values["step"],
        {name: loss.item() for name, loss in totals.items()},
        gradient_norm(objective).item(),
        {name: float(loss) for name, loss in values["losses"].items()},
        float(values["gradient_norm"]),
        objective,
    )


def as_number(value: float) -> float | str:
    """The number, or its name where json has no number for it.

    >>> as_number(0.5), as_number(float("nan"))
    (0.5, 'nan')
    """
    return value if math.isfinite(value) else str(value)


def _read_config(folder: Path) -> Config:
    if not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(f"{folder / CONFIG_FILE} is missing.")
    return parse_config(read_yaml(folder / CONFIG_FILE), where=str(folder / CONFIG_FILE))


def _batch_values(batch: Batch) -> dict[str, Any]:
    return {
        "images": [target.image_id for target in batch.targets],
        "sizes": batch.images.sizes,
        "original_sizes": batch.original_sizes,
    }


def _batch_tensors(index: int, batch: Batch) -> dict[str, Tensor]:
    tensors = {f"{index}/pixels": batch.images.pixels}
    for i, target in enumerate(batch.targets):
        named = {name: getattr(target, name) for name in _FIELDS}
        tensors |= {f"{index}/{i}/{name}": tensor for name, tensor in named.items() if tensor is not None}
    return tensors


def _read_batches(folder: Path, values: dict[str, Any]) -> list[Batch]:
    tensors = read_tensors(folder / BATCH_FILE)
    batches = []
    for index, told in enumerate(values["forwards"]):
        sizes = tuple((int(height), int(width)) for height, width in told["sizes"])
        targets = [
            Targets(**part(tensors, f"{index}/{i}/"), image_id=image_id) for i, image_id in enumerate(told["images"])
        ]
        images = Images(tensors[f"{index}/pixels"], sizes)
        batches.append(Batch(images, targets, [(int(h), int(w)) for h, w in told["original_sizes"]]))
    return batches
