"""One run in several processes, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from uniquery.errors import ConfigError
from uniquery.parallel import get_world_size, synchronize

_PATIENCE = timedelta(seconds=1)  # with a first process that may be gone


def local_rank() -> int:
    """Which process of this machine it is; each has a GPU of its own."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_main_process() -> bool:
    """Whether this is the process that writes and talks, also before and after all have met."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
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
    store, rank, count = next(rendezvous("env://"))
    place = fresh_store(store, rank, count)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=place, rank=rank, world_size=count)
    yield  # after an error there is nobody to take leave of: torchrun ends the others
    synchronize()  # none leaves while another still works
    dist.destroy_process_group()


def fresh_store(store: Store, rank: int, count: int) -> Store:
    """A part of the store that only the processes of this start have written to.

    torchrun's store outlives its restarts: in it, restarted processes would find where those before them listened, and
    wait for them for ever. So all gather under a name that the first has just made up; one that was made up earlier
    welcomes nobody any more.
    """
    me = uuid4().hex
    if rank == 0:
        store.set("uniquery/first", me)
        for other in range(1, count):
            store.set(f"{me}/{store.get(f'{me}/{other}').decode()}", "welcome")
        return PrefixStore(me, store)
    while True:
        first = store.get("uniquery/first").decode()
        store.set(f"{first}/{rank}", me)
        try:
            store.wait([f"{first}/{me}"], _PATIENCE)
        except dist.DistStoreError:
            continue
        return PrefixStore(first, store)


def wrap_ddp(objective: nn.Module) -> nn.Module:
    """The objective, with gradients averaged over the processes; itself if it is alone."""
    return DistributedDataParallel(objective) if get_world_size() > 1 else objective


def no_sync(objective: nn.Module) -> AbstractContextManager[None]:
    """Leaves the averaging to a later backward, inside the block."""
    return objective.no_sync() if isinstance(objective, DistributedDataParallel) else nullcontext()


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error says that another process has gone, in the words of torch or gloo."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    return isinstance(error, dist.DistError) or (get_world_size() > 1 and any(word in str(error) for word in words))
