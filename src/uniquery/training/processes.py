"""One run in several processes, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from uniquery.errors import ConfigError
from uniquery.parallel import process_count


def local_rank() -> int:
    """Which process of this machine it is; each has a GPU of its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_first_process() -> bool:
    """Whether this is the process that writes and talks, also before and after all have met."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def joined_processes(device: torch.device) -> Iterator[None]:
    """Meets the other processes that torchrun started; alone, does nothing.

    Raises:
        ConfigError: there are more processes on the machine than GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        if local_rank() >= torch.cuda.device_count():
            raise ConfigError(
                f"There is no GPU for process {local_rank()} of this machine, which has {torch.cuda.device_count()}: "
                "lower torchrun's --nproc-per-node, or set train.device=cpu."
            )
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    yield  # after an error there is nobody to take leave of: torchrun ends the others
    dist.destroy_process_group()


def averaging(objective: nn.Module) -> nn.Module:
    """The objective, with gradients averaged over the processes; itself if it is alone."""
    return DistributedDataParallel(objective) if process_count() > 1 else objective


def unaveraged(objective: nn.Module) -> AbstractContextManager[None]:
    """Leaves the averaging to a later backward, inside the block."""
    return objective.no_sync() if isinstance(objective, DistributedDataParallel) else nullcontext()
