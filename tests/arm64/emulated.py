# SPDX-License-Identifier: Apache-2.0
"""The kernels in C of an arm64 under an emulator, in the place of the extension: the tests that hold the extension to torch hold these to it.

    make test-arm64

A plugin of pytest. Calls go to `driver.c`, which Make has compiled for arm64; there is a process of it for each set of instructions.
"""

from __future__ import annotations

import atexit
import ctypes
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "arm64"
TABLE = (ROOT / "nnfront" / "backends" / "cpu" / "c" / "kernels.def").read_text()
OFFSET_BITS = 40  # of a place, as `run_sequence` of module.c has it
PLAIN = re.sub(r"//.*|\s", "", TABLE)
KERNELS = {
    name: re.findall(r"(SIZE|REAL|IN|OUT)\(", arguments)
    for name, arguments in re.findall(r"KERNEL\((\w+),(.*?\))\)(?=KERNEL|#)", PLAIN)
}


def sets_of(processor: str) -> list[str]:
    """The sets of instructions that a processor runs, the fastest first."""
    command = ["qemu-aarch64", "-cpu", processor, str(BUILD / "driver")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


class Emulated(ModuleType):
    """What `native` has, as calls of another process."""

    sets = sets_of("max")
    table = TABLE

    def __init__(self) -> None:
        super().__init__("nnfront.backends.cpu.native")
        self._set = self.sets[0]
        for name in KERNELS:
            setattr(self, name, partial(self._call, name))

    def use_torch(self, *entries: object) -> None:
        """Take tensors by their addresses."""

    def use_set(self, name: str) -> None:
        """Call the process that runs these kernels."""
        self._set = name

    def used_set(self) -> str:
        """Return the set whose process is called."""
        return self._set

    def has_tiles(self) -> bool:
        """An arm64 has no matrix tiles of this kind."""
        return False

    def run_sequence(self, rows: torch.Tensor, *memories: object) -> None:
        """Call the kernels of a tape, one by one."""
        for index, mask, *numbers in rows.tolist():
            name = list(KERNELS)[index]
            given = enumerate(zip(KERNELS[name], numbers, strict=False))  # a row is as long as the longest
            arguments = [argument(kind, number, mask >> i & 1, memories) for i, (kind, number) in given]
            self._call(name, *arguments)

    def _call(self, kernel: str, *arguments: object) -> None:
        process = started("driver", self._set)
        message, written = [struct.pack("q", list(KERNELS).index(kernel))], []
        for kind, value in zip(KERNELS[kernel], arguments, strict=True):
            if kind in ("SIZE", "REAL"):
                message.append(struct.pack("q" if kind == "SIZE" else "d", value))
                continue
            address, size = memory_of(value)
            message += [struct.pack("q", size), ctypes.string_at(address, size) if size > 0 else b""]
            written += [(address, size)] if kind == "OUT" and size > 0 else []
        process.stdin.write(b"".join(message))
        process.stdin.flush()
        (length,) = struct.unpack("q", process.stdout.read(8))
        why = process.stdout.read(length).decode()
        for address, size in written:
            ctypes.memmove(address, process.stdout.read(size), size)
        if why:
            raise ValueError(why)


def argument(kind: str, number: int, is_place: int, memories: Sequence[object]) -> object:
    """What a number of a row stands for."""
    if is_place:
        memory, offset = memories[number >> OFFSET_BITS], number & ((1 << OFFSET_BITS) - 1)
        return memory if kind == "SIZE" or memory is None else (memory, offset)
    if kind == "REAL":
        return struct.unpack("d", struct.pack("q", number))[0]
    return number if kind == "SIZE" else None


def memory_of(operand: object) -> tuple[int, int]:
    """Where an operand lies, and how many bytes of it there are; -1 if it is absent."""
    if operand is None:
        return 0, -1
    tensor, offset = operand if isinstance(operand, tuple) else (operand, 0)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr() + offset, size - offset


def crc32(data: bytes, crc: int) -> int:
    """CRC-32 as the extension of artefacts has it."""
    process = started("crc32")
    process.stdin.write(struct.pack("QQ", crc, len(data)) + bytes(data))
    process.stdin.flush()
    return struct.unpack("Q", process.stdout.read(8))[0]


@cache
def started(*words: str) -> subprocess.Popen[bytes]:
    """The process of a program, for a set of instructions where there are several."""
    program, *arguments = words
    command = ["qemu-aarch64", "-cpu", "max", str(BUILD / program), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(process.communicate)  # ends it, as it reads to the end
    return process


artefact = ModuleType("nnfront.artefact.native")
artefact.crc32 = crc32
sys.modules.update({"nnfront.backends.cpu.native": Emulated(), "nnfront.artefact.native": artefact})
