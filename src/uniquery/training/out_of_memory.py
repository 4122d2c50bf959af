"""Out of memory, told in one sentence: what was being done, with what, and what to try."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from uniquery.data.batch import Batch
from uniquery.errors import UserError
from uniquery.training.config import Config
from uniquery.training.log import PhaseClock

_SIGNS = ("can't allocate memory", "not enough memory", "out of memory")
_WORDS = {
    "data": "bringing a batch to the device",
    "forward": "the forward pass",
    "assign": "assigning queries to instances",
    "loss": "the losses",
    "backward": "the backward pass",
    "step": "the optimizer's update",
    "eval": "the evaluation",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whichever device.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."))
    True
    >>> is_out_of_memory(RuntimeError("size mismatch"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


@contextmanager
def memory_explained(config: Config, step: int, clock: PhaseClock, batch: Batch | None = None) -> Iterator[None]:
    """Turns an error of memory inside the block into advice.

    Args:
        config: the experiment.
        step: the training step.
        clock: knows which phase had begun.
        batch: what was being worked on, if it was one batch.

    Raises:
        UserError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        what = _WORDS[clock.phase] + (f" of {describe(batch)}" if batch is not None else "")
        advice = _advice_for_evaluation(config) if clock.phase == "eval" else _advice_for_training(config)
        raise UserError(f"Out of memory in step {step + 1}, in {what} ({reason}). Try: {'; '.join(advice)}.") from None


def describe(batch: Batch) -> str:
    """Sizes and numbers of instances of a batch, in words."""
    sizes = ", ".join(f"{width}×{height}" for height, width in batch.images.sizes)
    height, width = batch.images.pixels.shape[-2:]
    counts = ", ".join(str(len(target)) for target in batch.targets)
    return f"{len(batch.images)} images of {sizes} (padded to {width}×{height}) with {counts} instances"


def _advice_for_training(config: Config) -> list[str]:
    settings, least = config.train, config.querying.forwards_per_image
    smaller = [size for size in range(least, settings.batch_size, least) if settings.batch_size % size == 0]
    fewer = f"fewer queries: a smaller model.{'queries' if config.model.name == 'mask2former' else 'max_queries'}"
    if smaller:
        accumulate = settings.accumulate * settings.batch_size // smaller[-1]
        fewer = f"train.batch_size={smaller[-1]} with train.accumulate={accumulate}, as many images in one update"
    lighter = {
        "train.precision=bfloat16": settings.precision == "float32",
        "backbone.checkpoint_gradients=true": not config.backbone.checkpoint_gradients,
        "a smaller backbone": config.backbone.checkpoint_gradients,
    }
    return [fewer, "smaller sizes in data.augment", " or ".join(name for name, helps in lighter.items() if helps)]


def _advice_for_evaluation(config: Config) -> list[str]:
    fewer = "eval.batch_size=1" if config.eval.batch_size > 1 else "a smaller model.max_detections"
    return [fewer, "a smaller data.test_size", "fewer data.workers"]
