"""Files with checksums, which are verified when they are read.

Tensors are written in the safetensors format by our own code: each is written in one pass, while its checksum is
computed. Computing it afterwards would read everything again.
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
_CHUNK_BYTES = 2**22  # small enough to be still in the cache when the checksum is computed
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
    """The content of a safetensors file: tensors by name, and text in its header."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def write_checksummed(folder: Path, files: Mapping[str, TensorFile | str]) -> None:
    """Writes tensors and texts into a folder, and `checksums.json` beside them.

    Raises:
        OSError: a file cannot be written.
    """
    checksums: dict[str, dict[str, int]] = {}
    for name, content in files.items():
        checksum = _Checksum()
        # A thread computes the checksums while this one writes; both release the GIL.
        with (folder / name).open("wb", buffering=0) as file, ThreadPoolExecutor(1) as thread:
            for chunk in _chunks(content):
                thread.submit(checksum.update, chunk)
                _write_all(file, chunk)
        checksums[name] = {"bytes": checksum.bytes, "crc32": checksum.crc32}
    (folder / CHECKSUMS_FILE).write_text(json.dumps(checksums, indent=1))


class _Checksum:
    """Size and CRC-32 of the chunks so far."""

    def __init__(self) -> None:
        self.bytes = self.crc32 = 0

    def update(self, chunk: memoryview) -> None:
        self.bytes, self.crc32 = self.bytes + len(chunk), zlib.crc32(chunk, self.crc32)


def _write_all(file: Any, chunk: memoryview) -> None:
    """A single write may write less than asked, for example on a full disk; the next one then raises."""
    written = 0
    while written < len(chunk):
        written += file.write(chunk[written:])


def _chunks(content: TensorFile | str) -> Iterator[memoryview]:
    if isinstance(content, str):
        yield memoryview(content.encode())
        return
    items = sorted(content.tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps all aligned
    yield memoryview(_header(items, content.metadata))
    for _, tensor in items:
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))


def _header(items: list[tuple[str, Tensor]], metadata: Mapping[str, str]) -> bytes:
    """The length of a json text, and the text: dtype, shape and byte range of each tensor."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in items:
        start, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def read_checksummed(path: Path) -> bytes:
    """The content of a file, verified if there are checksums beside it.

    Raises:
        CheckpointError: the file is missing, cannot be read, or has another content than was written.
    """
    try:
        content = path.read_bytes()
        file = path.with_name(CHECKSUMS_FILE)
        expected = json.loads(file.read_text()).get(path.name) if file.is_file() else None
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing.") from None
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it or its {CHECKSUMS_FILE} cannot be read ({error}).") from None
    if expected is not None and expected != {"bytes": len(content), "crc32": zlib.crc32(content)}:
        raise CheckpointError(
            f"{path} is damaged: its checksum does not match ({len(content)} bytes, written: {expected.get('bytes')})."
        )
    return content


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, verified and copied into memory.

    Raises:
        CheckpointError: the file is missing, cannot be read, or has another content than was written.
    """
    try:
        return load(read_checksummed(path))
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged, or not a safetensors file: {error}.") from None


def read_json(path: Path) -> dict[str, Any]:
    """The keys and values of a json file, verified.

    Raises:
        CheckpointError: the file is missing, cannot be read, or has another content than was written.
    """
    try:
        values = json.loads(read_checksummed(path))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it holds no keys and values.")
    return values
