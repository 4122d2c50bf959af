"""𝓜, the memory: instance pixel embeddings of past images, first in, first out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from uniquery.structures import Pixels


@dataclass(frozen=True)
class InstancePixels(Pixels):
    """Pixels with the image and the instance that they came from.

    Attributes:
        image_ids: (P,) int64, id of the image in its data set.
        labels: (P,) int64, class of the instance.
        is_thing: (P,) bool; false for stuff.
    """

    image_ids: Tensor
    labels: Tensor
    is_thing: Tensor

    def of_other_images(self, image_ids: Tensor) -> Tensor:
        """(Q, P) bool: which pixels are not of the image of each query; `image_ids` are the queries' (Q,)."""
        return image_ids[:, None] != self.image_ids


_FIELDS = tuple(f.name for f in fields(InstancePixels))


@dataclass(frozen=True)
class _Savepoint:
    """The state to roll back to.

    Attributes:
        rows: the buffer; None before the first push.
        next: row of the next push.
        fill: number of filled rows.
        pushes: number of pushes.
        overwritten: rows, old push numbers and old values of each push since.
    """

    rows: InstancePixels | None
    next: int
    fill: int
    pushes: int
    overwritten: list[tuple[Tensor, Tensor, InstancePixels]]


class PixelMemory:
    """A ring buffer of pixels.

    Reading never writes, and only filled rows are returned. It is not a module: it is not part of a model's state dict,
    and DDP does not broadcast it. Everything that decides the next read is in its own state dict.

    Args:
        capacity: how many pixels are kept. 0 keeps the last push only: the other images of the step are the negatives.
        dtype: data type of the stored embeddings.

    >>> memory = PixelMemory(capacity=3)
    >>> for i in range(2):
    ...     ids = torch.full((2,), i)
    ...     memory.push(InstancePixels(torch.ones(2, 4) * i, torch.zeros(2, 2), ids, ids, ids == ids))
    >>> len(memory), memory.read().image_ids.tolist()
    (3, [1, 0, 1])
    """

    def __init__(self, capacity: int = 100_000, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity} and must not be negative")
        if dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {dtype!r} and must be 'float32' or 'bfloat16'")
        self.capacity = capacity
        self.dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self.clear()

    def clear(self) -> None:
        """Removes everything."""
        self._rows: InstancePixels | None = None
        self._pushed_at = torch.zeros(0, dtype=torch.int64)  # (capacity,) push at which each row was written
        self._next = 0  # row of the next push
        self._fill = 0
        self._pushes = 0
        self._savepoint: _Savepoint | None = None

    def __len__(self) -> int:
        return self._fill

    @torch.no_grad()
    def push(self, pixels: InstancePixels) -> None:
        """Stores pixels, overwriting the oldest; of a push larger than the memory, the last ones are kept."""
        self._pushes += 1
        if self.capacity == 0:
            self._rows, self._fill = self._as_stored(pixels), len(pixels)
            return
        rows = self._ring(pixels)
        pixels = pixels[-self.capacity :] if len(pixels) > self.capacity else pixels
        index = (torch.arange(len(pixels)) + self._next) % self.capacity
        self._keep_overwritten(rows, index)
        self._pushed_at[index] = self._pushes
        for name in _FIELDS:
            column = getattr(rows, name)
            column[index.to(column.device, non_blocking=True)] = getattr(pixels, name).to(column.device, column.dtype)
        self._next = (self._next + len(pixels)) % self.capacity
        self._fill = min(self._fill + len(pixels), self.capacity)

    def savepoint(self) -> None:
        """Keeps what later pushes overwrite, until the next savepoint, so that they can be rolled back."""
        self._savepoint = _Savepoint(self._rows, self._next, self._fill, self._pushes, [])

    def rollback(self) -> None:
        """Undoes every push since the last savepoint."""
        assert self._savepoint is not None, "call savepoint first"
        saved = self._savepoint
        for index, pushed_at, values in reversed(saved.overwritten):
            self._pushed_at[index] = pushed_at
            for name in _FIELDS:
                column = getattr(self._rows, name)
                column[index.to(column.device)] = getattr(values, name)
        self._rows, self._next, self._fill, self._pushes = saved.rows, saved.next, saved.fill, saved.pushes
        self.savepoint()

    def _keep_overwritten(self, rows: InstancePixels, index: Tensor) -> None:
        if self._savepoint is not None:
            on_device = index.to(rows.embeddings.device, non_blocking=True)
            self._savepoint.overwritten.append((index, self._pushed_at[index], rows[on_device]))

    def read(self) -> InstancePixels | None:
        """The filled rows, in unspecified order; None before the first push.

        `InstancePixels.of_other_images` gives the mask of a query's negatives.
        """
        return self._rows[: self._fill] if self._rows is not None else None

    def newest(self) -> InstancePixels | None:
        """The pixels of the last push that are still there; None before the first push."""
        stored = self.read()
        if stored is None or self.capacity == 0:
            return stored
        rows = (self._pushed_at[: self._fill] == self._pushes).nonzero().flatten()
        return stored[rows.to(stored.image_ids.device)]

    def mean_age(self) -> float:
        """Mean number of pushes since the filled rows were written."""
        if not self._fill or self.capacity == 0:
            return 0.0
        return float(self._pushes - self._pushed_at[: self._fill].double().mean())

    def _as_stored(self, pixels: InstancePixels) -> InstancePixels:
        columns = {name: getattr(pixels, name).detach() for name in _FIELDS}
        return InstancePixels(**{**columns, "embeddings": columns["embeddings"].to(self.dtype)})

    def _ring(self, pixels: InstancePixels) -> InstancePixels:
        if self._rows is None:
            stored = self._as_stored(pixels)
            empty = {n: getattr(stored, n).new_zeros(self.capacity, *getattr(stored, n).shape[1:]) for n in _FIELDS}
            self._rows = InstancePixels(**empty)
            self._pushed_at = torch.zeros(self.capacity, dtype=torch.int64)
        return self._rows

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that decides the next read and the next push."""
        position = torch.tensor([self._next, self._fill, self._pushes, self.capacity])
        if self._rows is None:
            return {"position": position}
        filled = self._rows[: self._fill]
        return {
            "position": position,
            "pushed_at": self._pushed_at[: self._fill],
            **{n: getattr(filled, n) for n in _FIELDS},
        }

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """Restores a state; the capacity must be the same.

        Raises:
            ValueError: the capacity differs.
        """
        next_row, fill, pushes, capacity = state["position"].tolist()
        if capacity != self.capacity:
            raise ValueError(f"the saved memory has a capacity of {capacity} pixels, this one of {self.capacity}")
        self.clear()
        if "embeddings" not in state:
            self._pushes = pushes
            return
        rows = InstancePixels(**{name: state[name].to(device) for name in _FIELDS})
        if self.capacity:
            for name in _FIELDS:
                getattr(self._ring(rows), name)[:fill] = getattr(rows, name)
            self._pushed_at[:fill] = state["pushed_at"]
        else:
            self._rows = rows
        self._next, self._fill, self._pushes = next_row, fill, pushes
