"""Gradient checkpointing [Chen et al., 2016]: forget what a module computed, compute it again to go backward."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    """`module(x)`, of which autograd keeps x alone.

    The second run draws the same random numbers as the first and leaves batch statistics as the first left them, so
    values, gradients and state are those of `module(x)`. The module must not change x in place.
    """
    out: Tensor = checkpoint(
        module, x, use_reentrant=False, context_fn=lambda: (nullcontext(), FrozenBatchStatistics(module))
    )
    return out


class FrozenBatchStatistics:
    """Inside, batch normalizations of `module` move the statistics of copies, which are thrown away on leaving.

    Can be entered again, as the backward pass of a retained graph does.

    >>> import torch
    >>> norm = nn.BatchNorm1d(1)
    >>> with FrozenBatchStatistics(norm):
    ...     _ = norm(torch.tensor([[1.0], [3.0]]))
    >>> norm.running_mean.item(), norm.num_batches_tracked.item()
    (0.0, 0)
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [part for part in module.modules() if isinstance(part, _BATCH_NORMS)]
        self.kept = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]

    def __enter__(self) -> None:
        for norm, name, buffer in self.kept:
            setattr(norm, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for norm, name, buffer in self.kept:
            setattr(norm, name, buffer)
