"""Gradient checkpointing [Chen et al., 2016]: activations are not kept, but recomputed in the backward pass."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    """Runs `module(x)` with activation checkpointing: autograd keeps only x.

    The second run draws the same random numbers as the first and does not update running statistics again, so values,
    gradients and state are those of `module(x)`. The module must not change x in place.
    """
    out: Tensor = checkpoint(
        module, x, use_reentrant=False, context_fn=lambda: (nullcontext(), FrozenRunningStats(module))
    )
    return out


class FrozenRunningStats:
    """A context in which batch normalizations of `module` do not change their running statistics.

    They update copies, which are dropped on exit. It can be entered again, as the backward pass of a retained graph
    does.

    >>> import torch
    >>> norm = nn.BatchNorm1d(1)
    >>> with FrozenRunningStats(norm):
    ...     _ = norm(torch.tensor([[1.0], [3.0]]))
    >>> norm.running_mean.item(), norm.num_batches_tracked.item()
    (0.0, 0)
    """

    def __init__(self, module: nn.Module) -> None:
        norms = [child for child in module.modules() if isinstance(child, _BATCH_NORMS)]
        self.buffers = [(norm, name, buffer) for norm in norms for name, buffer in norm.named_buffers(recurse=False)]

    def __enter__(self) -> None:
        for norm, name, buffer in self.buffers:
            setattr(norm, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for norm, name, buffer in self.buffers:
            setattr(norm, name, buffer)
