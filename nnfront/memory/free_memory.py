# SPDX-License-Identifier: Apache-2.0
"""How much memory a device has left, whether an error says that it has too little, and the most of something that fits."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nnfront.ir.summary import bytes_text

_MEMINFO = Path("/proc/meminfo")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB|B)")
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that can still be had on a device, and all that it has; `where` names it."""

    free: int
    total: int
    where: str

    def __str__(self) -> str:
        return f"{bytes_text(self.free)} of {bytes_text(self.total)} are free on {self.where}"


def free_memory_on(device: torch.device) -> FreeMemory | None:
    """What is free on a device: for a GPU with what torch keeps for itself and has not given out. None if nobody says."""
    gpu: Any = getattr(torch, device.type, None)
    if hasattr(gpu, "mem_get_info"):
        free, total = gpu.mem_get_info(device)
        kept = gpu.memory_reserved(device) - gpu.memory_allocated(device)
        return FreeMemory(free + kept, total, f"{device} ({gpu.get_device_name(device)})")
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free, total = (int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None
    return FreeMemory(free, total, "the CPU")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # What torch's CPU allocator says, and what CUDA says where torch makes no error of its own of it.
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "out of memory" in str(error)
    )


def asked(error: BaseException) -> int | None:
    """The bytes that an allocation which failed has asked for, by the text of its error."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


def most(high: int, fits: Callable[[int], bool]) -> int:
    """The greatest number up to `high` that fits, 0 if 1 does not; what is less than a number that fits fits."""
    return bisect_left(range(1, high + 1), True, key=lambda n: not fits(n))
