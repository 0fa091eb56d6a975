"""The memory of this process as its allocator or the system sees it: now, and at most since a moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

# The environment of a process in which glibc gives memory back to the system as it is freed: the resident set is then
# what is in use.
PROMPT_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "2",
}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def memory_reader(device: torch.device) -> Callable[[], int]:
    """A function that returns the bytes in use: on CUDA the allocator's on ``device``, else the resident set.

    Raises:
        RuntimeError: a system without ``/proc``, whose resident set cannot be read.
    """
    if device.type == "cuda":
        return lambda: torch.cuda.memory_allocated(device)
    _need_proc(device)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * page

    return resident


def restart_peak(device: torch.device) -> None:
    """Forgets what was held before, for :func:`peak`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    _need_proc(device)
    _CLEAR.write_text("5")


def peak(device: torch.device) -> int:
    """The most bytes in use since :func:`restart_peak`, counted as by :func:`memory_reader`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _need_proc(device: torch.device) -> None:
    if not _STATUS.exists():
        raise RuntimeError(
            f"Memory on `{device}` is this process's resident set, which is read from `/proc`, and this system has no"
            " such folder. Measure on Linux, or on a GPU."
        )
