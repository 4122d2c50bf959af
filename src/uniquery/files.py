"""Writing files so that a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from uniquery.errors import UserError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Temporary sibling, flush to disk, rename.

    Raises:
        UserError: the system refuses; `path` is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from None
        raise


def make_folder(path: Path) -> Path:
    """Creates a folder and its parents.

    Raises:
        UserError: the system refuses.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create the folder {path}: {error.strerror}.") from None
    return path


@contextmanager
def folder_replaced(path: Path, *, keep: int = 0) -> Iterator[Path]:
    """A temporary folder that takes the place of `path` when the block succeeds; on failure `path` stays as it was.

    Args:
        path: the folder.
        keep: how many of its predecessors stay beside it: `path.1` is the one before, `path.2` the one before that.

    Raises:
        UserError: the system refuses, inside the block or after it.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        recover_folder(path)
        shutil.rmtree(temporary, ignore_errors=True)
        yield make_folder(temporary)
        for file in (*temporary.rglob("*"), temporary):
            _flush(file)
        _exchange(temporary, path, keep)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from None
        raise


def recover_folder(path: Path) -> None:
    """Puts the old folder back if a process was killed just before the new one took its place."""
    if _retired(path).exists() and not path.exists():
        with suppress(FileNotFoundError):  # another process was faster
            _retired(path).rename(path)


def kept_folders(path: Path) -> list[Path]:
    """A folder and its predecessors, newest first, as far as they are there."""
    numbered = {
        int(p.suffix[1:]): p
        for p in (path.parent.iterdir() if path.parent.is_dir() else ())
        if p.stem == path.name and p.suffix[1:].isdecimal()
    }
    return [p for p in (path, _retired(path), *(numbered[n] for n in sorted(numbered))) if p.is_dir()]


def _exchange(new: Path, path: Path, keep: int) -> None:
    _shelve(path, keep)  # what a killed process had retired and not shelved
    if path.exists():
        path.rename(_retired(path))
    try:
        new.rename(path)
    except OSError:
        recover_folder(path)
        raise
    _flush(path.parent)  # the new one is there to stay before an old one goes
    _shelve(path, keep)


def _shelve(path: Path, keep: int) -> None:
    """Moves the retired folder to the first place beside its successor, and those already there one further."""
    retired, places = _retired(path), [path.with_name(f"{path.name}.{n}") for n in range(1, keep + 1)]
    if retired.exists() and places:
        free = next((n for n, place in enumerate(places) if not place.exists()), keep - 1)
        shutil.rmtree(places[free], ignore_errors=True)
        for n in range(free, 0, -1):
            places[n - 1].rename(places[n])
        retired.rename(places[0])
    shutil.rmtree(retired, ignore_errors=True)


def _retired(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write {path}: {error.strerror or error}.")
