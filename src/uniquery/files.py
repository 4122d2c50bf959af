"""Atomic writes: a reader sees the old content or the new, never a mixture."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from uniquery.errors import UserError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a temporary file beside the path, flushes it to disk and renames it.

    Raises:
        UserError: the file cannot be written; `path` is unchanged.
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
        UserError: the folder cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create the folder {path}: {error.strerror}.") from None
    return path


@contextmanager
def replace_folder(path: Path, *, keep: int = 0) -> Iterator[Path]:
    """A temporary folder that replaces `path` when the block succeeds; on failure `path` is unchanged.

    Args:
        path: the folder.
        keep: how many older versions to keep: `path.1` is the one before, `path.2` the one before that.

    Raises:
        UserError: the folder cannot be written, inside the block or after it.
    """
    temporary = path.with_name(f".{path.name}.new")
    try:
        restore_folder(path)
        shutil.rmtree(temporary, ignore_errors=True)
        yield make_folder(temporary)
        for file in (*temporary.rglob("*"), temporary):
            _fsync(file)
        _swap_in(temporary, path, keep)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from None
        raise


def restore_folder(path: Path) -> None:
    """Puts the old folder back if a process was killed just before the new one replaced it."""
    if _old(path).exists() and not path.exists():
        with suppress(FileNotFoundError):  # another process was faster
            _old(path).rename(path)


def folder_versions(path: Path) -> list[Path]:
    """A folder and its older versions, newest first; only those that exist."""
    numbered = {
        int(p.suffix[1:]): p
        for p in (path.parent.iterdir() if path.parent.is_dir() else ())
        if p.stem == path.name and p.suffix[1:].isdecimal()
    }
    return [p for p in (path, _old(path), *(numbered[n] for n in sorted(numbered))) if p.is_dir()]


def _swap_in(new: Path, path: Path, keep: int) -> None:
    _number_old(path, keep)  # a killed process may have left an old folder without a number
    if path.exists():
        path.rename(_old(path))
    try:
        new.rename(path)
    except OSError:
        restore_folder(path)
        raise
    _fsync(path.parent)  # the new folder must be on disk before an older one is removed
    _number_old(path, keep)


def _number_old(path: Path, keep: int) -> None:
    """Renames the old folder to `path.1`, after moving `path.1` to `path.2` and so on; removes all after `keep`."""
    old, numbered = _old(path), [path.with_name(f"{path.name}.{n}") for n in range(1, keep + 1)]
    if old.exists() and numbered:
        free = next((n for n, folder in enumerate(numbered) if not folder.exists()), keep - 1)
        shutil.rmtree(numbered[free], ignore_errors=True)
        for n in range(free, 0, -1):
            numbered[n - 1].rename(numbered[n])
        old.rename(numbered[0])
    shutil.rmtree(old, ignore_errors=True)


def _old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"Cannot write {path}: {error.strerror or error}.")
