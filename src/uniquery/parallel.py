"""Devices and processes. Without a process group there is one process, and its rank is 0."""

import ctypes
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from uniquery.errors import ConfigError

T = TypeVar("T")


def get_world_size() -> int:
    """The number of processes."""
    return dist.get_world_size() if _is_distributed() else 1


def get_rank() -> int:
    """The rank of this process."""
    return dist.get_rank() if _is_distributed() else 0


def get_local_rank() -> int:
    """The rank of this process on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def choose_device(name: str) -> torch.device:
    """The device of a name: `auto` is a GPU if there is one; `cuda` without an index is this process's GPU.

    >>> choose_device("cpu")
    device(type='cpu')

    Raises:
        ConfigError: the device cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    name = f"cuda:{get_local_rank()}" if name == "cuda" else name
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"The device '{name}' cannot be used: {str(error).splitlines()[0].rstrip('.')}.") from None


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory(device: torch.device) -> None:
    """Lets this process keep the memory of freed tensors, for the next step, if it computes on a CPU.

    By default glibc gives tensors of more than 32 MB back at once, and the system clears each of their pages when the
    next step takes them again: a quarter of the time of a step on large images. Environment variables of glibc that say
    what to do are obeyed; another C library has its own way.
    """
    if device.type != "cpu" or sys.platform != "linux" or any(name in os.environ for name in _MALLOC_VARIABLES):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def all_reduce_mean(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes, without gradient."""
    value = value.detach().clone()
    if _is_distributed():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set in at least one process; all processes get the same answer."""
    if not _is_distributed():
        return flag
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def gather_lists(items: list[T]) -> list[T]:
    """The items of all processes on rank 0, in rank order; an empty list on the other ranks."""
    if not _is_distributed():
        return items
    lists: list[list[T] | None] | None = [None] * get_world_size() if get_rank() == 0 else None
    dist.gather_object(items, lists)
    return [item for rank_items in lists or [] for item in rank_items or []]


def broadcast_from_first(tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors in place with those of rank 0."""
    if _is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def synchronize() -> None:
    """Waits until every process has called it."""
    if _is_distributed():
        dist.barrier()


def loss_normalizer(count: Tensor) -> Tensor:
    """The divisor of a sum over `count` items, such that gradients averaged over processes equal those of one process.

    It is the mean count of a process; the total count is taken to be at least one.
    """
    return all_reduce_mean(count).clamp(min=1 / get_world_size())


def all_gather_rows(columns: Sequence[Tensor]) -> list[Tensor]:
    """Columns with equally many rows → the same columns with the rows of all processes, in rank order.

    Processes may have different numbers of rows, or none. Without gradient.

    Args:
        columns: tensors (N, ...) with the same N, which may differ between processes.
    """
    if not _is_distributed():
        return list(columns)
    length = torch.tensor([len(columns[0])], device=columns[0].device)
    lengths = [torch.zeros_like(length) for _ in range(get_world_size())]
    dist.all_gather(lengths, length)
    return [_all_gather(column.detach(), [int(n) for n in lengths]) for column in columns]


def _all_gather(column: Tensor, lengths: Sequence[int]) -> Tensor:
    sent = column.to(torch.uint8) if column.dtype == torch.bool else column  # not every backend can send bool
    padded = sent.new_zeros(max(lengths), *sent.shape[1:])
    padded[: len(sent)] = sent
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    return torch.cat([rows[:length] for rows, length in zip(received, lengths, strict=True)]).to(column.dtype)
