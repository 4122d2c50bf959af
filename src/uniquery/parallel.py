"""What a loss needs to know of other processes. Without a process group, a process is alone."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def get_world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if _is_distributed() else 1


def get_rank() -> int:
    """Which of them this is."""
    return dist.get_rank() if _is_distributed() else 0


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
    """Whether the flag is set in any process; all get the same answer."""
    if not _is_distributed():
        return flag
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def gather_lists(items: list[T]) -> list[T]:
    """The items of all processes in the first one, in the order of their ranks; the others get none."""
    if not _is_distributed():
        return items
    lists: list[list[T] | None] | None = [None] * get_world_size() if get_rank() == 0 else None
    dist.gather_object(items, lists)
    return [item for part in lists or [] for item in part or []]


def broadcast_from_first(tensors: Iterable[Tensor]) -> None:
    """Overwrites tensors by those of the first process."""
    if _is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def synchronize() -> None:
    """Returns when every process has come here."""
    if _is_distributed():
        dist.barrier()


def normalizer(count: Tensor) -> Tensor:
    """What a sum over `count` things is divided by, so that gradients averaged over processes equal those of one.

    It is the mean count of a process, and at least one thing in all.
    """
    return all_reduce_mean(count).clamp(min=1 / get_world_size())


def gather_rows(columns: Sequence[Tensor]) -> list[Tensor]:
    """Columns of equally many rows → the same columns with the rows of all processes, in the order of their ranks.

    Processes may have different numbers of rows, or none. Without gradient.
    """
    if not _is_distributed():
        return list(columns)
    rows = torch.tensor([len(columns[0])], device=columns[0].device)
    counts = [torch.zeros_like(rows) for _ in range(get_world_size())]
    dist.all_gather(counts, rows)
    lengths = [int(count) for count in counts]
    return [_gather(column.detach(), lengths) for column in columns]


def _gather(column: Tensor, lengths: Sequence[int]) -> Tensor:
    sent = column.to(torch.uint8) if column.dtype == torch.bool else column  # not every backend sends flags
    padded = sent.new_zeros(max(lengths), *sent.shape[1:])
    padded[: len(sent)] = sent
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).to(column.dtype)
