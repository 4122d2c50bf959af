"""How much memory this process has used, and how much it may use."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_STATUS, _CLEAR, _MEMINFO = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_RESET_PEAK = "5"  # see proc(5)


def peak_memory(device: torch.device) -> int:
    """Peak bytes since `reset_peak_memory`: what torch has reserved on a GPU, else the RAM of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    with suppress(OSError, StopIteration):
        return _kilobytes(_STATUS, "VmHWM:")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Forgets the peak so far, where the system can do that."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)


def available_memory(device: torch.device) -> int | None:
    """Bytes that this process may still allocate on a device; None if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limits = []
    with suppress(OSError, StopIteration):
        limits.append(_kilobytes(_MEMINFO, "MemAvailable:"))
    with suppress(OSError, ValueError):  # in a container; without a limit the file says "max"
        limits.append(int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text()))
    return max(0, min(limits)) if limits else None


@contextmanager
def limited_to_available(device: torch.device) -> Iterator[None]:
    """Makes allocations fail that the machine has no RAM for; without a limit, Linux would kill the process instead."""
    available = available_memory(device)
    try:
        used = _kilobytes(_STATUS, "VmData:")  # what RLIMIT_DATA counts
    except (OSError, StopIteration):
        available = None
    if device.type != "cpu" or available is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + available
    resource.setrlimit(resource.RLIMIT_DATA, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _kilobytes(file: Path, key: str) -> int:
    """A value of a file of /proc, in bytes."""
    return next(int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith(key))
