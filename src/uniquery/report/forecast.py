"""The forecast of a run as text."""

from __future__ import annotations

from uniquery.report.tables import duration
from uniquery.training.dry_run import Forecast

_FULL = 0.9  # share of the available memory from which on a run may fail


def forecast_lines(forecast: Forecast) -> list[str]:
    """Memory and time of a run, a line each; the last is a warning if its memory may not suffice."""
    measured = forecast.measured
    place = f"of one process on {measured.device}, data workers not included"
    lines = [f"{name} images: {batch}" for name, batch in measured.batches.items()]
    lines += [
        f"peak memory: {gigabytes(measured.peak_memory)} {place}{_of_available(measured.available_memory)}",
        f"training: {forecast.steps} steps × {measured.step_seconds:.3g} s = {duration(forecast.training_seconds)}",
    ]
    if measured.image_seconds is not None:
        images = f"{forecast.val_images} images" + (f" / {measured.processes}" if measured.processes > 1 else "")
        lines.append(
            f"evaluation: {forecast.evaluations} × {images} × {measured.image_seconds:.3g} s = at most "
            f"{duration(forecast.evaluation_seconds)}"
        )
    lines.append(f"total: {duration(forecast.seconds)}")
    if measured.available_memory is not None and measured.peak_memory > _FULL * measured.available_memory:
        lines.append(
            "warning: this is nearly all of the memory: lower train.batch_size and raise train.accumulate, lower the "
            "sizes in data.augment and data.test_size, or set train.precision=bfloat16."
        )
    return lines


def gigabytes(count: int) -> str:
    """A number of bytes as text.

    >>> gigabytes(1_250_000_000)
    '1.25 GB'
    """
    return f"{count / 1e9:.2f} GB"


def _of_available(available: int | None) -> str:
    return "" if available is None else f" ({gigabytes(available)} were available)"
