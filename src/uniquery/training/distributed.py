"""One run in several processes that torchrun started."""

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
from uniquery.parallel import get_local_rank, get_world_size, synchronize

_CONFIRM_TIMEOUT = timedelta(seconds=1)


def is_main_process() -> bool:
    """Whether this process writes files and prints; works without a process group too."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """A process group of all processes that torchrun started; with one process it does nothing.

    Raises:
        ConfigError: the machine has more processes than GPUs.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        if get_local_rank() >= torch.cuda.device_count():
            raise ConfigError(
                f"There is no GPU for local rank {get_local_rank()}: the machine has {torch.cuda.device_count()}; "
                "lower torchrun's --nproc-per-node, or set train.device=cpu."
            )
        torch.cuda.set_device(device)
    store, rank, count = next(rendezvous("env://"))
    store = restart_safe_store(store, rank, count)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=count)
    yield  # after an error there is no barrier: torchrun ends the other processes
    synchronize()
    dist.destroy_process_group()


def restart_safe_store(store: Store, rank: int, count: int) -> Store:
    """A key prefix in torchrun's store that only the processes of this start use.

    torchrun's store keeps its keys when it restarts processes: restarted processes would read the addresses of the
    killed ones, and wait for them forever. So rank 0 creates a new id on every start, and all keys go under that id.
    The other ranks read the id, which may still be the old one: they write their own id under it and wait until rank 0
    confirms. An old rank 0 never confirms; after a timeout they read the id again.
    """
    own_id = uuid4().hex
    if rank == 0:
        store.set("uniquery/first", own_id)
        for other in range(1, count):
            other_id = store.get(f"{own_id}/{other}").decode()
            store.set(f"{own_id}/{other_id}", "confirmed")
        return PrefixStore(own_id, store)
    while True:
        first_id = store.get("uniquery/first").decode()
        store.set(f"{first_id}/{rank}", own_id)
        try:
            store.wait([f"{first_id}/{own_id}"], _CONFIRM_TIMEOUT)
        except dist.DistStoreError:
            continue
        return PrefixStore(first_id, store)


def wrap_ddp(objective: nn.Module) -> nn.Module:
    """The objective in DistributedDataParallel; the objective itself with one process."""
    return DistributedDataParallel(objective) if get_world_size() > 1 else objective


def no_sync(objective: nn.Module) -> AbstractContextManager[None]:
    """DistributedDataParallel's `no_sync`: gradients inside the block are averaged in a later backward."""
    return objective.no_sync() if isinstance(objective, DistributedDataParallel) else nullcontext()


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error of torch or gloo says that another process has ended."""
    messages = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")
    return isinstance(error, dist.DistError) or (get_world_size() > 1 and any(m in str(error) for m in messages))
