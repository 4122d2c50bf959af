"""Files that notice damage: written once, their checksums beside them, and checked when they are read.

Tensors are written in the safetensors format by our own few lines: each goes from memory to the file in one pass, while
its checksum is taken. A checksum taken afterwards would read everything again.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from uniquery.errors import CheckpointError

CHECKSUMS_FILE = "checksums.json"
_PIECE = 2**22  # bytes that are still in cache when they are seen again
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class TensorFile:
    """What a safetensors file is to hold: tensors by name, and text in its header."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def write_checksummed(folder: Path, files: Mapping[str, TensorFile | str]) -> None:
    """Writes tensors and texts into a folder, and their sizes and checksums beside them.

    Raises:
        OSError: the system refuses.
    """
    seals: dict[str, dict[str, int]] = {}
    for name, content in files.items():
        seal = _Seal()
        # A thread takes the checksums while this one writes; neither holds the interpreter meanwhile.
        with (folder / name).open("wb", buffering=0) as file, ThreadPoolExecutor(1) as thread:
            for piece in _pieces(content):
                thread.submit(seal.add, piece)
                _write_whole(file, piece)
        seals[name] = {"bytes": seal.size, "crc32": seal.checksum}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(seals, indent=1))


class _Seal:
    """Size and checksum of what was seen so far."""

    def __init__(self) -> None:
        self.size = self.checksum = 0

    def add(self, piece: memoryview) -> None:
        """Goes on with the next piece."""
        self.size, self.checksum = self.size + len(piece), zlib.crc32(piece, self.checksum)


def _write_whole(file: Any, piece: memoryview) -> None:
    """A single write may stop short, at a full disk for one: the next then says why."""
    done = 0
    while done < len(piece):
        done += file.write(piece[done:])


def _pieces(content: TensorFile | str) -> Iterator[memoryview]:
    if isinstance(content, str):
        yield memoryview(content.encode())
        return
    named = sorted(content.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps all aligned
    yield memoryview(_header(named, content.metadata))
    for _, tensor in named:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (data[start : start + _PIECE] for start in range(0, len(data), _PIECE))


def _header(named: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    """The length of a json text, and the text: where each tensor lies behind it."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in named:
        start, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_checksummed(path: Path) -> bytes:
    """The content of a file, whole and unchanged if there are checksums beside it.

    Raises:
        CheckpointError: it is missing, cannot be read, or is not what was written.
    """
    try:
        content = path.read_bytes()
        seals = path.with_name(CHECKSUMS_FILE)
        seal = json.loads(seals.read_text()).get(path.name) if seals.is_file() else None
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it or its {CHECKSUMS_FILE} cannot be read ({error}).") from None
    if seal is not None and seal != {"bytes": len(content), "crc32": zlib.crc32(content)}:
        raise CheckpointError(
            f"{path} is damaged: it is not what was written ({len(content)} bytes, {seal.get('bytes')} were written)."
        )
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory: nothing depends on the file any more.

    Raises:
        CheckpointError: it is missing, cannot be read, or is not what was written.
    """
    try:
        return load(read_checksummed(path))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or not a safetensors file: {error}.") from None


def read_values(path: Path) -> dict[str, Any]:
    """The table of a json file.

    Raises:
        CheckpointError: it is missing, cannot be read, or is not what was written.
    """
    try:
        values = json.loads(read_checksummed(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it holds no table.")
    return values
