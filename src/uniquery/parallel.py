"""What a loss needs to know of other processes. Without a process group, everything is its own mean."""

import torch.distributed as dist
from torch import Tensor


def mean_over_processes(value: Tensor) -> Tensor:
    """The mean of a tensor over all processes, without gradient.

    Normalisers (numbers of positives, of masks) pass through here, so that gradients averaged by DDP equal those of
    one process on the whole batch.
    """
    value = value.detach().clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value
