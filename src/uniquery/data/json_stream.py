"""A large json object whose tables are read row by row, so that one of them need not fit into memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

_CHUNK = 2**24  # characters that are read at once
_SPACE = re.compile(r"[ \t\n\r]*")


class JsonStream:
    """The object in a json file; all values but one table are in memory, and that table is read when iterated over.

    Args:
        path: the file.
        table: the key of the list that is not kept.
        check_row: called with each row of that list when it is first read.

    Attributes:
        content: the object, without the table.
        has_table: whether the object has the key.

    Raises:
        ValueError: the file is not such an object, or is not json; `json.loads` then gives a better message.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, table: str, check_row: Callable[[Any], None] = lambda _: None) -> None:
        self.path, self.table = path, table
        self.content: dict[str, Any] = {}
        self.has_table = False
        for key, rows in self._entries():
            if key in self.content or (key == table and self.has_table):
                raise ValueError(f"the key {key!r} appears twice")
            if key == table:
                self.has_table = True
                for row in rows:
                    check_row(row)
            else:
                self.content[key] = rows.whole()

    def __iter__(self) -> Iterator[Any]:
        for key, rows in self._entries():
            if key == self.table:
                yield from rows
                return
            rows.whole()

    def _entries(self) -> Iterator[tuple[str, _Value]]:
        """Each key of the object with its value, which must be read before the next key."""
        with self.path.open(encoding="utf-8", newline="") as stream:
            text = _Text(stream)
            text.expect("{")
            more = not text.accept("}")
            while more:
                key = text.value()
                if not isinstance(key, str):
                    raise ValueError(f"{key!r} is not a key")
                text.expect(":")
                yield key, _Value(text)
                more = text.accept(",")
                if not more:
                    text.expect("}")
            if text.peek():
                raise ValueError("there is text after the object")


class _Value:
    """A value that is about to be read; a list row by row."""

    def __init__(self, text: _Text) -> None:
        self._text = text

    def __iter__(self) -> Iterator[Any]:
        self._text.expect("[")
        more = not self._text.accept("]")
        while more:
            yield self._text.value()
            more = self._text.accept(",")
            if not more:
                self._text.expect("]")

    def whole(self) -> Any:
        """All of it."""
        return list(self) if self._text.peek() == "[" else self._text.value()


class _Text:
    """The characters of a file and a position in them; only a part of the file is in memory."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._buffer, self._position = stream, "", 0
        self._decode = json.JSONDecoder().raw_decode

    def _fill(self) -> bool:
        """Reads more; false at the end of the file."""
        more = self._stream.read(_CHUNK)
        if more:
            self._buffer, self._position = self._buffer[self._position :] + more, 0
        return bool(more)

    def peek(self) -> str:
        """The next character that is not a space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._buffer, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._fill():
                return ""

    def accept(self, character: str) -> bool:
        """Whether this is the next character; it is then read."""
        is_next = self.peek() == character
        self._position += is_next
        return is_next

    def expect(self, character: str) -> None:
        """Reads this character, which must be next."""
        if not self.accept(character):
            raise ValueError(f"{character!r} is missing")

    def value(self) -> Any:
        """Reads any value."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._buffer, self._position)
            except ValueError:
                if not self._fill():
                    raise
                continue
            if len(self._buffer) - end < 3 and self._fill():  # a number may go on, such as 1.5 with e+3
                continue
            self._position = end
            return value
