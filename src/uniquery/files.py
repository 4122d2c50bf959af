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
def folder_replaced(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `path` when the block succeeds; on failure `path` stays as it was.

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
        _exchange(temporary, path)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from None
        raise


def recover_folder(path: Path) -> None:
    """Puts the old folder back if a process was killed just before the new one took its place."""
    if _retired(path).exists() and not path.exists():
        _retired(path).rename(path)


def _exchange(new: Path, path: Path) -> None:
    retired = _retired(path)
    shutil.rmtree(retired, ignore_errors=True)
    if path.exists():
        path.rename(retired)
    try:
        new.rename(path)
    except OSError:
        recover_folder(path)
        raise
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
