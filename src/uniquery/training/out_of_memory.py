"""Out of memory as one sentence: the phase, the batch, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from uniquery.data.batch import Batch
from uniquery.errors import UserError
from uniquery.training.config import Config
from uniquery.training.phase_clock import PhaseClock

_MESSAGES = ("can't allocate memory", "not enough memory", "out of memory")
_PHASE_NAMES = {
    "data": "copying a batch to the device",
    "forward": "the forward pass",
    "assign": "assigning queries to instances",
    "loss": "the losses",
    "backward": "the backward pass",
    "step": "the optimizer's update",
    "eval": "the evaluation",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."))
    True
    >>> is_out_of_memory(RuntimeError("size mismatch"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


@contextmanager
def explain_out_of_memory(config: Config, step: int, clock: PhaseClock, batch: Batch | None = None) -> Iterator[None]:
    """Turns an out-of-memory error inside the block into one that says what to change.

    Args:
        config: the experiment.
        step: steps so far.
        clock: its `phase` is the current one.
        batch: the current batch, if there is one.

    Raises:
        UserError: memory ran out.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        phase = _PHASE_NAMES[clock.phase] + (f" of {describe_batch(batch)}" if batch is not None else "")
        advice = _advice_for_evaluation(config) if clock.phase == "eval" else _advice_for_training(config)
        raise UserError(f"Out of memory in step {step + 1}, in {phase} ({reason}). Try: {'; '.join(advice)}.") from None


def describe_batch(batch: Batch) -> str:
    """Sizes and instance counts of a batch as text."""
    sizes = ", ".join(f"{width}×{height}" for height, width in batch.images.sizes)
    height, width = batch.images.pixels.shape[-2:]
    counts = ", ".join(str(len(target)) for target in batch.targets)
    return f"{len(batch.images)} images of {sizes} (padded to {width}×{height}) with {counts} instances"


def _advice_for_training(config: Config) -> list[str]:
    settings, smallest = config.train, config.querying.forwards_per_image
    smaller = [size for size in range(smallest, settings.batch_size, smallest) if settings.batch_size % size == 0]
    first = config.model.memory_advice
    if smaller:
        accumulate = settings.accumulate * settings.batch_size // smaller[-1]
        first = f"train.batch_size={smaller[-1]} with train.accumulate={accumulate}, as many images in one update"
    sizes: tuple[str, ...] = ("smaller sizes in data.augment",)
    options = {
        "train.precision=bfloat16": settings.precision == "float32",
        "backbone.checkpoint_gradients=true": not config.backbone.checkpoint_gradients,
        "a smaller backbone": config.backbone.checkpoint_gradients,
    }
    if config.querying.inter and config.querying.inter.capacity:
        sizes = "smaller sizes in data.augment", "a smaller querying.inter.capacity"
    return [first, *sizes, " or ".join(name for name, is_open in options.items() if is_open)]


def _advice_for_evaluation(config: Config) -> list[str]:
    first = "eval.batch_size=1" if config.eval.batch_size > 1 else "a smaller model.max_detections"
    return [first, "a smaller data.test_size", "fewer data.workers"]
