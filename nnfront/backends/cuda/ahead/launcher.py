# SPDX-License-Identifier: Apache-2.0
"""Launch kernels from machine code that was compiled ahead, and let Triton compile what is not there, saying why.

A `Launcher` takes plans as `nnfront_kernels.common.launched_by` gives them. The first plan of a specialisation is looked up by its key;
the machine code is loaded then, and from then on a launch packs its arguments and calls the driver. The layout of the arguments is C's:
each at a multiple of its size, a tensor map at a multiple of 128.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from nnfront.backends.cuda.ahead.cubin import CompiledKernels, Cubin, Parameter
from nnfront.backends.cuda.ahead.driver import MAP_ALIGNMENT, MAP_BYTES, Driver, launch_config, version_text
from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.errors import LoadError

_FORMATS = {"pointer": ("Q", 8), "i32": ("i", 4), "i64": ("q", 8), "f32": ("f", 4)}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parameters of a kernel lie in a buffer: the format that packs all but tensor maps, and the offset of each parameter."""

    format: struct.Struct
    offsets: tuple[int, ...]
    maps: tuple[tuple[Parameter, int], ...]

    @classmethod
    def of(cls, parameters: Sequence[Parameter]) -> Layout:
        """Return the layout: a descriptor is a map, its sizes and its strides; two pointers are behind all others."""
        parts: list[str] = []
        offsets: list[int] = []
        maps: list[tuple[Parameter, int]] = []
        end = 0

        def place(code: str, size: int, alignment: int) -> int:
            nonlocal end
            begin = -(-end // alignment) * alignment
            parts.append("x" * (begin - end) + code)
            offsets.append(begin)
            end = begin + size
            return begin

        for parameter in parameters:
            if parameter.map is None:
                code, size = _FORMATS[parameter.kind]
                place(code, size, size)
                continue
            maps.append((parameter, place(f"{MAP_BYTES}x", MAP_BYTES, MAP_ALIGNMENT)))
            for code, size in [("i", 4)] * len(parameter.map.box) + [("q", 8)] * len(parameter.map.box):
                place(code, size, size)
        for _ in range(2):
            place("Q", 8, 8)
        return cls(struct.Struct("=" + "".join(parts)), tuple(offsets), tuple(maps))


class _Block:
    """The memory of one launch at a time: packed parameters, pointers to them, and the driver's description of the launch."""

    def __init__(self, cubin: Cubin, layout: Layout) -> None:
        size = layout.format.size
        self.memory = (ctypes.c_uint8 * (size + MAP_ALIGNMENT))()
        address = ctypes.addressof(self.memory)
        self.begin = -address % MAP_ALIGNMENT
        self.address = address + self.begin
        self.pointers = (ctypes.c_void_p * len(layout.offsets))(
            *(self.address + offset for offset in layout.offsets)
        )
        self.config = launch_config(
            cubin.threads,
            cubin.shared_bytes,
            cluster=cubin.cluster,
            cooperative=cubin.cooperative,
            pdl=cubin.pdl,
        )


class _Loaded:
    """A kernel in the driver."""

    def __init__(self, cubin: Cubin, launcher: Launcher) -> None:
        self.cubin = cubin
        self._launcher = launcher
        self._layout = Layout.of(cubin.parameters)
        self._kernel = launcher.driver.load(
            cubin.image, cubin.kernel, cubin.shared_bytes, f"kernels/{cubin.key}.cubin"
        )
        self._free: list[_Block] = []  # a thread takes one, so that no two use the same

    def __call__(self, plan: Any) -> None:
        cubin, arguments = self.cubin, plan.arguments
        x, y, z = (*plan.grid, 1, 1)[:3]
        if x * y * z == 0:
            return
        values: list[int | float] = []
        for parameter in cubin.parameters:
            value = arguments[parameter.name]
            if parameter.kind == "pointer":
                values.append(value.data_ptr())
            elif parameter.map is None:
                values.append(value)
            else:
                values += value.shape
                values += value.strides
        scratch = self._launcher.scratch(x * y * z * cubin.cluster * cubin.scratch_bytes)
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(cubin, self._layout)
        self._layout.format.pack_into(
            block.memory, block.begin, *values, 0 if scratch is None else scratch.data_ptr(), 0
        )
        for parameter, offset in self._layout.maps:
            assert parameter.map is not None
            tensor = arguments[parameter.name]
            self._launcher.driver.encode_map(
                block.address + offset,
                tensor.base.data_ptr(),
                tensor.shape,
                tensor.strides,
                box=parameter.map.box,
                element=parameter.map.element,
                element_bytes=parameter.map.element_bytes,
                swizzle=parameter.map.swizzle,
                nan=getattr(tensor, "padding", "zero") == "nan",
            )
        config = block.config
        config.grid[:] = x * cubin.cluster, y, z
        config.stream = self._launcher.stream()
        self._launcher.driver.launch(cubin.kernel, self._kernel, config, block.pointers)
        self._free.append(block)


@dataclass(slots=True)
class _Use:
    """How the plans of one specialisation are launched, and how many were."""

    run: Callable[[Any], None]
    kernel: str
    key: str
    reason: str  # why Triton compiled it; "" for machine code from the artefact
    launches: int = 0


class Launcher:
    """Launches plans on one GPU: call it with a plan. Printed, it is a table of the kernels that ran and where each came from."""

    def __init__(
        self,
        ahead: CompiledKernels,
        driver: Driver,
        *,
        stream: Callable[[], int],
        device: torch.device | None = None,
    ) -> None:
        """`stream` gives the handle of the stream to launch on; scratch memory is on `device`.

        Raises LoadError for kernels of another GPU, or that need a newer driver.
        """
        self.ahead = ahead
        self.driver = driver
        self.stream = stream
        self._device = device
        self._cubins = {cubin.key: cubin for cubin in ahead.cubins}
        self._uses: dict[Any, _Use] = {}
        self._fingerprint: Callable[[Any], Any] = kernel_module("ahead").fingerprint
        _check(ahead, driver)

    def __call__(self, plan: Any) -> None:
        """Launch a plan. Raises LoadError for machine code that the driver does not take, and RunError if the launch fails."""
        mark = self._fingerprint(plan)
        use = self._uses.get(mark)
        if use is None:
            use = self._uses[mark] = self._find(plan)
        use.run(plan)
        use.launches += 1

    def loaded(self, cubin: Cubin) -> Callable[[Any], None]:
        """Load a kernel; return what launches plans of its specialisation. Raises LoadError."""
        return _Loaded(cubin, self)

    def scratch(self, size_bytes: int) -> torch.Tensor | None:
        """Return memory for one launch; it is free for the next one on the same stream."""
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device) if size_bytes else None

    @property
    def compiled_here(self) -> dict[str, str]:
        """Why Triton had to compile kernels that the artefact does not have: a reason for each key."""
        return {use.key: use.reason for use in self._uses.values() if use.reason}

    @property
    def launches(self) -> dict[str, int]:
        """How often each kernel was launched by Python, by key; a captured graph counts once."""
        found: dict[str, int] = {}
        for use in self._uses.values():
            found[use.key] = found.get(use.key, 0) + use.launches
        return found

    def _find(self, plan: Any) -> _Use:
        ahead = kernel_module("ahead")
        about = ahead.describe(plan, self.ahead.arch)
        key, name = ahead.key_of(plan, self.ahead.arch), plan.kernel.__name__
        cubin = self._cubins.get(key)
        if cubin is not None:
            return _Use(self.loaded(cubin), name, key, "")
        return _Use(kernel_module("common").jit, name, key, self.ahead.why_not(about))

    def __str__(self) -> str:
        lines = [str(self.ahead).partition("\n")[0]]
        rows: dict[str, _Use] = {}
        for use in list(self._uses.values()):
            rows.setdefault(use.key, use)
        launches = self.launches
        for use in sorted(rows.values(), key=lambda use: (use.kernel, use.key)):
            origin = f"compiled here: {use.reason}" if use.reason else "from the artefact"
            lines.append(f"  {use.kernel} {use.key}  {launches[use.key]} launches  {origin}")
        return "\n".join(lines)


@cache
def open_driver(device: torch.device) -> Driver:
    """Return the driver of a GPU, one for all sessions: what one has loaded serves the next. Raises LoadError if there is none."""
    return Driver(device.index or 0)


def launcher_for(ahead: CompiledKernels, device: torch.device) -> Launcher | None:
    """Return what launches these kernels on torch's current stream of a GPU; None where Triton interprets kernels instead.

    Raises LoadError if they cannot run there.
    """
    if not kernel_module("ahead").can_compile():
        return None

    def stream() -> int:
        handle: int = torch.cuda.current_stream(device).cuda_stream
        return handle

    return Launcher(
        ahead, open_driver(device), stream=stream if device.type == "cuda" else int, device=device
    )


_BY_TRITON = nullcontext()


def launching(launcher: Launcher | None) -> AbstractContextManager[object]:
    """Let kernels be launched by a launcher inside of this; without one, by Triton."""
    return _BY_TRITON if launcher is None else kernel_module("common").launched_by(launcher)


def _check(ahead: CompiledKernels, driver: Driver) -> None:
    """Raise LoadError unless the GPU and its driver can run the kernels."""
    here = driver.arch
    strangers = [cubin for cubin in ahead.cubins if cubin.arch != here]
    if strangers:
        raise LoadError(
            f"the kernels were compiled for {strangers[0].arch}, the GPU here is {here}",
            help=f"export the model for 'cuda:{here}', or for 'cuda'",
        )
    newest = max(ahead.cubins, key=lambda cubin: cubin.min_driver, default=None)
    if newest is not None and driver.version < newest.min_driver:
        raise LoadError(
            f"the driver here is too old for the kernels: it is for CUDA {version_text(driver.version)}",
            details=[
                f"they were compiled by CUDA {newest.cuda}, expected a driver for {version_text(newest.min_driver)} or newer"
            ],
            help="update the driver, or export the model for 'cuda', which compiles on the GPU's machine",
        )
