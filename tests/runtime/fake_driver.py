# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that launches nothing: its functions are reached through C's calling convention, and it writes down what they were given.

The prototypes are those of cuda.h, read from the header that comes with Triton, so a number that the launcher passes in too few bits, or
a structure that it lays out wrongly, arrives here as the driver would see it.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import triton

HEADER = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda.h"
ERRORS = {1: b"INVALID_VALUE", 2: b"OUT_OF_MEMORY", 200: b"INVALID_IMAGE", 700: b"ILLEGAL_ADDRESS"}
CONTEXT, FIRST_KERNEL = 0x7F00_0000_1000, 0x7F00_0001_0000  # more than 32 bits, as pointers have


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, 4 bytes of padding, 64 bytes of value."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig, its fields in the order of the header."""

    _fields_ = (
        *(
            (name, ctypes.c_uint)
            for name in ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ", "shared")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def prototype(name: str) -> tuple[Any, ...]:
    """The C types of a function's parameters, by the header."""
    found = re.search(rf"CUresult CUDAAPI {name}\(([^)]*)\);", HEADER.read_text(errors="ignore"))
    assert found is not None, name
    return tuple(
        _c_type(" ".join(p.split()[:-1]) + "*" * p.split()[-1].count("*")) for p in found[1].split(",")
    )


def _c_type(text: str) -> Any:
    if "*" in text or text in ("CUcontext", "CUmodule", "CUfunction"):
        return ctypes.c_void_p
    sizes = {"cuuint32_t": ctypes.c_uint32, "unsigned int": ctypes.c_uint}
    return sizes.get(text, ctypes.c_int)  # CUdevice and enumerations


@dataclass
class Launch:
    """What cuLaunchKernelEx was given. `parameters` are the bytes of each, by the sizes that were announced for the kernel."""

    kernel: str
    image: bytes
    context: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    stream: int
    attributes: dict[int, tuple[int, ...]]
    parameters: list[bytes]


@dataclass
class FakeDriver:
    """The library. `fails` gives functions a code to return; `sizes` are the bytes of a kernel's parameters, by its machine code."""

    version: int = 13010
    capability: tuple[int, int] = (9, 0)
    fails: dict[str, int] = field(default_factory=dict)
    sizes: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    context: int = 0
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts: list[Any] = []
        self._images: list[bytes] = []
        self._kernels: dict[int, tuple[str, bytes]] = {}
        for name in dir(type(self)):
            if name.startswith("do_cu") and name.removeprefix("do_") not in self.lacks:
                short = name.removeprefix("do_")
                setattr(self, short, self._exported(short, getattr(self, name)))

    def _exported(self, name: str, function: Callable[..., None]) -> Any:
        def called(*args: Any) -> int:
            self.calls.append((name, *args))
            if name in self.fails:
                return self.fails[name]
            function(*args)
            return 0

        return ctypes.CFUNCTYPE(ctypes.c_int, *prototype(name))(called)

    def do_cuInit(self, flags: int) -> None:
        assert flags == 0

    def do_cuDriverGetVersion(self, into: int) -> None:
        _store(into, ctypes.c_int, self.version)

    def do_cuGetErrorName(self, code: int, into: int) -> None:
        self._text(into, b"CUDA_ERROR_" + ERRORS[code])

    def do_cuGetErrorString(self, code: int, into: int) -> None:
        self._text(into, b"the text of " + ERRORS[code].lower())

    def do_cuDeviceGet(self, into: int, ordinal: int) -> None:
        _store(into, ctypes.c_int, ordinal + 40)

    def do_cuDeviceGetAttribute(self, into: int, attribute: int, device: int) -> None:
        assert device >= 40
        _store(into, ctypes.c_int, self.capability[{75: 0, 76: 1}[attribute]])

    def do_cuDevicePrimaryCtxRetain(self, into: int, device: int) -> None:
        assert device >= 40
        _store(into, ctypes.c_void_p, CONTEXT)

    def do_cuCtxGetCurrent(self, into: int) -> None:
        _store(into, ctypes.c_void_p, self.context)

    def do_cuCtxSetCurrent(self, context: int) -> None:
        self.context = context

    def do_cuModuleLoadData(self, into: int, image: int) -> None:
        assert self.context, "no context"
        # The shortest first, as nothing is to be read behind the image that is there.
        images = sorted(self.sizes, key=len)
        known = next((i for i in images if ctypes.string_at(image, len(i)) == i), b"")
        self._images.append(known)
        _store(into, ctypes.c_void_p, FIRST_KERNEL * len(self._images))

    def do_cuModuleGetFunction(self, into: int, module: int, name: int) -> None:
        handle = module + 1
        self._kernels[handle] = (ctypes.string_at(name).decode(), self._images[module // FIRST_KERNEL - 1])
        _store(into, ctypes.c_void_p, handle)

    def do_cuFuncSetAttribute(self, kernel: int, attribute: int, value: int) -> None:
        assert kernel in self._kernels
        assert attribute == 8

    def do_cuFuncSetCacheConfig(self, kernel: int, config: int) -> None:
        assert kernel in self._kernels
        assert config == 1

    def do_cuLaunchKernelEx(self, config: int, kernel: int, parameters: int, extra: int | None) -> None:
        assert self.context, "no context"
        assert extra is None
        name, image = self._kernels[kernel]
        given = Config.from_address(config)
        attributes = {a.id: tuple(a.value[:3]) for a in given.attributes[: given.count]}
        sizes = self.sizes.get(image, ())
        pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        self.launches.append(
            Launch(
                name,
                image,
                self.context,
                (given.gridX, given.gridY, given.gridZ),
                (given.blockX, given.blockY, given.blockZ),
                given.shared,
                given.stream or 0,
                attributes,
                [ctypes.string_at(at, size) for at, size in zip(pointers, sizes, strict=True)],
            )
        )

    def do_cuTensorMapEncodeTiled(
        self, into: int, element: int, rank: int, address: int, sizes: int, steps: int, box: int, ones: int,
        interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> None:  # fmt: skip
        assert into % 128 == 0
        self.maps.append(
            {
                "element": element,
                "address": address or 0,
                "sizes": list((ctypes.c_uint64 * rank).from_address(sizes)),
                "steps": list((ctypes.c_uint64 * (rank - 1)).from_address(steps)),
                "box": list((ctypes.c_uint32 * rank).from_address(box)),
                "ones": list((ctypes.c_uint32 * rank).from_address(ones)),
                "interleave": interleave,
                "swizzle": swizzle,
                "promotion": promotion,
                "fill": fill,
            }
        )
        ctypes.memmove(into, bytes([len(self.maps)] * 8 + [0xFF] * 120), 128)

    def _text(self, into: int, text: bytes) -> None:
        self._texts.append(ctypes.create_string_buffer(text))
        _store(into, ctypes.c_void_p, ctypes.addressof(self._texts[-1]))


def _store(into: int, kind: Any, value: int) -> None:
    kind.from_address(into).value = value
