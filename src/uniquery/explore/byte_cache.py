"""A cache that is bounded in bytes, for several threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from threading import Lock
from typing import Generic, TypeVar

ValueT = TypeVar("ValueT")


class ByteCache(Generic[ValueT]):
    """The values that were used last, up to a number of bytes.

    Args:
        limit: bytes of all values together.

    >>> cache = ByteCache[str](10)
    >>> for key in "abc":
    ...     cache.put(key, key * 4, 4)
    >>> cache.get("a"), cache.get("c"), cache.size
    (None, 'cccc', 8)
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._values: OrderedDict[Hashable, tuple[ValueT, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable) -> ValueT | None:
        """The value, which is then the one used last; None if it is not there."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: ValueT, size: int) -> None:
        """Keeps a value of `size` bytes, and drops those that were not used for longest."""
        with self._lock:
            if key in self._values:
                self.size -= self._values.pop(key)[1]
            self._values[key] = value, size
            self.size += size
            while self.size > self.limit:
                self.size -= self._values.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            self._values.clear()
            self.size = 0
