"""Writing files so that a reader sees the old content or the new, never a part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uniquery.errors import UserError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Temporary sibling, flush to disk, rename."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"Cannot write {path}: {error.strerror}.") from None


def make_folder(path: Path) -> Path:
    """Creates a folder and its parents."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot create the folder {path}: {error.strerror}.") from None
    return path


@contextmanager
def folder_replaced(path: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `path` when the block succeeds; on failure `path` stays as it was."""
    temporary = path.with_name(f".{path.name}.new")
    retired = path.with_name(f".{path.name}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"Cannot write {path}: {error.strerror or error}.") from None
    shutil.rmtree(retired, ignore_errors=True)
    if path.exists():
        path.rename(retired)
    temporary.rename(path)
    shutil.rmtree(retired, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
