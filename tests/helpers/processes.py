"""What tests run in several processes; in a module of its own, which a spawned process can import."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from helpers.small_segmenters import drawn, small
from uniquery.parallel import all_gather_rows, all_reduce_mean, broadcast_from_first
from uniquery.querying import EquivarianceSettings, InterSceneSettings, UniqueQuerying
from uniquery.structures import Images

SIZES = ((64, 64), (64, 48), (40, 64), (64, 64))
COUNTS = (3, 1, 0, 5)


def run_in_processes(task: Callable[[int], Any], count: int, folder: Path) -> list[Any]:
    """What `task(rank)` returns in each of `count` gloo processes."""
    mp.spawn(_process, (task, count, folder), nprocs=count)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(count)]


def _process(rank: int, task: Callable[[int], Any], count: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=count)
    torch.save(task(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()


def means_and_gradients(rank: int) -> dict[str, Any]:
    """The mean of values that differ by rank, and the gradients of each process's half of a batch under DDP."""
    value = torch.tensor([1.0 + 2 * rank, 10.0], requires_grad=True)
    mean = all_reduce_mean(value)
    result = {"mean": mean, "requires_grad": mean.requires_grad, "own": value.detach()}
    uneven = torch.arange(2 * rank * 3).view(-1, 3) + 100 * rank  # no row of the first process, two of the second
    gathered = all_gather_rows([uneven, uneven[:, 0] > 0])
    objective = DistributedDataParallel(whole_objective())
    trained = _gradients(objective, slice(2 * rank, 2 * rank + 2))
    memory = objective.module.memory.read()
    own = whole_objective(gather=False)
    _gradients(own, slice(2 * rank, 2 * rank + 2))
    taken = torch.full((2,), rank)
    broadcast_from_first([taken])
    return {
        **result,
        "gathered": gathered,
        "taken": taken,
        "stored": memory.image_ids.sort().values,
        "stored_without_gather": own.memory.read().image_ids.unique(),
        **trained,
    }


def whole_batch() -> dict[str, Any]:
    """The gradients of one process on the whole batch."""
    objective = whole_objective()
    trained = _gradients(objective, slice(None))
    return {"stored": objective.memory.read().image_ids.sort().values, **trained}


def whole_objective(gather: bool = True) -> UniqueQuerying:
    """With both parts; batch statistics would differ between halves and whole, group statistics do not."""
    model = small("condinst", mask_norm="group").double()
    return UniqueQuerying(model, InterSceneSettings(capacity=5000, gather=gather), EquivarianceSettings(rotate=(0, 30)))


def _gradients(objective: torch.nn.Module, part: slice) -> dict[str, Any]:
    images, targets = drawn(SIZES, COUNTS)
    losses = objective(Images(images.pixels[part], images.sizes[part]), targets[part])
    torch.stack(list(losses.values())).sum().backward()
    gradients = {name.removeprefix("module."): p.grad for name, p in objective.named_parameters()}
    return {"gradients": gradients, "losses": {name: loss.detach() for name, loss in losses.items()}}


def half_of_a_batch(name: str, changes: dict[str, Any], rank: int) -> dict[str, Any]:
    """The gradients of a segmenter's own losses under DDP, on each of two processes' half of a batch."""
    return _gradients(DistributedDataParallel(UniqueQuerying(small(name, **changes).double())), _half(rank))


def both_halves(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The gradients of one process on the whole batch."""
    return _gradients(UniqueQuerying(small(name, **changes).double()), slice(None))


def _half(rank: int) -> slice:
    return slice(2 * rank, 2 * rank + 2)
