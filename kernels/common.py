# SPDX-License-Identifier: Apache-2.0
"""What every kernel file shares: the records it fills in, the limits of each GPU, and the checks it makes.

A kernel file describes a launch as a `Plan` before it runs anything. The same plan is launched on a GPU, run by
Triton's interpreter, and compiled ahead of time for a GPU that is not there (`inspect.py`), so the three never differ.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any, ParamSpec

import torch
import triton


class KernelError(ValueError):
    """A launch that no kernel in this file can serve; the text is what `accepts` returned."""


WARP = 32  # threads that execute together, on every GPU of NVIDIA
REGISTERS = 65_536  # of an SM, on the GPUs of ARCHS


@dataclass(frozen=True)
class Arch:
    """Limits and peak rates of one GPU generation; the rates only rank configs against each other."""

    name: str
    target: int  # Triton's: compute capability
    family: str  # the arch whose configs it takes, as far as its shared memory holds them
    num_sms: int
    shared_bytes: int  # one block's dynamic shared memory
    shared_bytes_sm: int
    registers: int  # most that one thread can hold, in 32-bit words; an SM has REGISTERS of them
    flops: float  # dense 16-bit tensor-core rate, 1/s
    bandwidth: float  # device memory, bytes/s
    threads: int = 2048  # of an SM


# Limits: CUDA programming guide, table of technical specifications. Rates: data sheets of A100 80 GB, A40, L40S, H200, B200, B300 and RTX 5090. Tensor
# cores of sm_120 are programmed as those of sm_80 are: it has neither wgmma nor tcgen05.
ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("sm_80", 80, "sm_80", 108, 166_912, 167_936, 255, 312e12, 2.0e12),
        Arch("sm_86", 86, "sm_80", 84, 101_376, 102_400, 255, 150e12, 0.7e12, 1536),
        Arch("sm_89", 89, "sm_80", 142, 101_376, 102_400, 255, 362e12, 0.86e12, 1536),
        Arch("sm_90", 90, "sm_90", 132, 232_448, 233_472, 255, 989e12, 4.8e12),
        Arch("sm_100", 100, "sm_100", 148, 232_448, 233_472, 255, 2250e12, 8.0e12),
        Arch("sm_103", 103, "sm_100", 148, 232_448, 233_472, 255, 2250e12, 8.0e12),
        Arch("sm_120", 120, "sm_80", 170, 101_376, 102_400, 255, 210e12, 1.8e12, 1536),
    )
}


@dataclass(frozen=True)
class Config:
    """One way to tile a kernel. Sizes are elements; `split_k` blocks share one output tile; a thread has at most `registers`, unless a launch is out of the ordinary."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    registers: int = 255

    def blocks(self, axes: str) -> dict[str, int]:
        """The sizes along these of the axes m, n and k, as constants of a kernel."""
        return {f"BLOCK_{axis.upper()}": getattr(self, f"block_{axis}") for axis in axes}


class Alike:
    """What plans of one specialisation share: `ahead.fingerprint`, once somebody has asked for it."""

    mark: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """One launch, written down: kernel, grid, run-time arguments in the kernel's own names, and constants."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    config: Config
    output: torch.Tensor
    also: tuple[str, ...] = ()  # further arguments that a launch returns
    divisible: tuple[str, ...] = ()  # arguments whose divisibility by 16 the config counts on
    alike: Alike | None = None  # for a plan that is not the first of its kind

    def __post_init__(self) -> None:
        lost = [name for name in self.divisible if not is_divisible(self.arguments[name])]
        assert not lost, (
            f"{self.kernel.__name__}: config {self.config} counts on divisibility by 16, lost by {lost}"
        )

    @property
    def dependent(self) -> bool:
        """Whether the kernel waits for earlier launches itself (`dependent.py`), so that it can begin before they have ended."""
        return bool(self.constants.get("PDL"))

    def launch(self) -> Any:
        """Run the kernel on the current stream and return the output tensor, in a tuple with those that are `also` results. An empty output launches nothing."""
        if self.output.numel():
            _LAUNCHER.get()(self)
        return (self.output, *(self.arguments[name] for name in self.also)) if self.also else self.output


def jit(plan: Plan) -> None:
    """Compile a plan's kernel unless Triton has it already, and run it: the launcher that is used unless another is named."""
    plan.kernel[plan.grid](
        **plan.arguments,
        **plan.constants,
        num_warps=plan.config.num_warps,
        num_stages=plan.config.num_stages,
        enable_fp_fusion=True,  # Triton's default changes with the version; the error bounds allow both
        **({"launch_pdl": True} if plan.dependent else {}),
    )


_LAUNCHER: ContextVar[Callable[[Plan], None]] = ContextVar("launcher", default=jit)


@contextmanager
def holding(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Inside of this, in this thread, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def launched_by(launcher: Callable[[Plan], None]) -> AbstractContextManager[None]:
    """Inside of this, in this thread, every plan is given to `launcher` instead of to `jit`."""
    return holding(_LAUNCHER, launcher)


_PLANNED: ContextVar[str | None] = ContextVar("arch", default=None)


def planned_for() -> str | None:
    """For which arch plans are in this thread; None if for the GPU that tensors are on."""
    return _PLANNED.get()


def planning_for(arch: str) -> AbstractContextManager[None]:
    """Inside of this, in this thread, plans are for `arch`, wherever the tensors are: on a GPU that is not here."""
    return holding(_PLANNED, arch)


@dataclass(frozen=True)
class Kernel:
    """All that the outside knows about a kernel.

    accepts(shape, dtype, arch) returns None, or why the kernel refuses; choose(shape, dtype, arch) is pure;
    plan(...) checks its arguments and describes a launch, launch(...) runs it, both with `arch` and `config` in the place of what they would take;
    KernelError if an argument does not fit or `accepts` refuses. reference(...) takes launch's arguments and is the definition;
    example(shape, dtype, device) makes arguments of plan with the sizes of a shape, without values.
    """

    name: str
    typical: (
        Any  # a shape to look at the kernel with; accepts, choose, cost and example take others of its class
    )
    accepts: Callable[..., str | None]
    choose: Callable[..., Config]
    configs: dict[str, tuple[Config, ...]]  # by arch: what choose picks from for aligned operands
    shared_bytes: Callable[[Config], int]  # what choose reckons a config needs at most
    plan: Callable[..., Plan]
    launch: Callable[..., Any]
    reference: Callable[..., Any]
    example: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    fallbacks: tuple[Config, ...] = ()  # and what it picks otherwise
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    candidates: Callable[..., tuple[Config, ...]] | None = (
        None  # (shape, arch): the configs for this shape, if not all
    )
    # From (shape, config) the like shape that a config is for.
    shape_for: Callable[..., Any] = lambda shape, config: shape
    groups: tuple[int, ...] = field(default=(0,))  # sizes of quantisation groups along K; 0 is none

    @classmethod
    def of(cls, file: Mapping[str, Any], **more: Any) -> Kernel:
        """The record of a kernel file, given its globals: its name, what it defines by the names of fields, and `more`; that it takes all shapes, `choose` for the only config and no shared memory need not be said."""
        defined = {each.name: file[each.name] for each in fields(cls) if each.name in file}
        own = file["__name__"].rpartition(".")[2]
        configs = file["CONFIGS"]
        table = dict.fromkeys(ARCHS, configs) if isinstance(configs, tuple) else configs
        accepts = taking(file["DTYPES"])(lambda *_: None)
        assumed = {"accepts": accepts, "choose": lambda *_: configs[0], "shared_bytes": lambda _: 0}
        record = {"name": own, "dtypes": file["DTYPES"], **assumed, **defined, **more}
        archs = {arch: fitted(these, arch, record["shared_bytes"]) for arch, these in of_archs(table).items()}
        return cls(**record, configs=archs)

    def settle(
        self, shape: Any, x: torch.Tensor, arch: str | None, config: Config | None
    ) -> tuple[str, Config]:
        """For which arch and with which config a launch is: those given, or that of the GPU of x and what `choose` says. Raise KernelError if `accepts` refuses."""
        arch, dtype = arch or arch_of(x.device), dtype_name(x)
        require(self.accepts(shape, dtype, arch), self.name)
        return arch, config or self.choose(shape, dtype, arch)


def of_archs(table: Mapping[str, Any]) -> dict[str, Any]:
    """What a table has for each arch, its own or that of its family; archs for which it has neither are left out."""
    found = {name: table.get(name) or table.get(arch.family) for name, arch in ARCHS.items()}
    return {name: own for name, own in found.items() if own is not None}


def fitted(
    configs: tuple[Config, ...], arch: str, shared_bytes: Callable[[Config], int]
) -> tuple[Config, ...]:
    """The configs with as many of their stages as the shared memory of an arch holds: without those of which it does not hold two, if they have them."""
    made = []
    for config in configs:
        stages = range(config.num_stages, min(config.num_stages, 2) - 1, -1)
        tried = (replace(config, num_stages=count) for count in stages)
        made += [next((each for each in tried if shared_bytes(each) <= ARCHS[arch].shared_bytes), None)]
    return tuple(config for config in made if config is not None)


Arguments = ParamSpec("Arguments")


def launcher(plan: Callable[Arguments, Plan]) -> Callable[Arguments, Any]:
    """`launch` of a kernel file: what is planned, run."""

    @functools.wraps(plan)
    def launch(*args: Arguments.args, **options: Arguments.kwargs) -> Any:
        return plan(*args, **options).launch()

    return launch


Accepts = Callable[[Any, str, str], str | None]


def taking(dtypes: tuple[str, ...], table: Mapping[str, Any] = ARCHS) -> Callable[[Accepts], Accepts]:
    """Let a kernel's `accepts` refuse other dtypes, and archs for which the table has nothing, before it looks at a shape."""
    archs = of_archs(table)

    def among(accepts: Accepts) -> Accepts:
        @functools.wraps(accepts)
        def refusal(shape: Any, dtype: str, arch: str) -> str | None:
            if arch not in archs:
                return f"arch must be one of {', '.join(archs)}, got '{arch}'"
            if dtype not in dtypes:
                return (
                    f"dtype must be {'one of ' if len(dtypes) > 1 else ''}{', '.join(dtypes)}, got '{dtype}'"
                )
            return accepts(shape, dtype, arch)

        return refusal

    return among


def empties(dtype: str, device: str) -> Callable[..., torch.Tensor]:
    """What makes tensors without values: of sizes, and of the dtype unless `kind` says another."""

    def make(*size: int, kind: str = dtype) -> torch.Tensor:
        return torch.empty(*size, dtype=getattr(torch, kind), device=device)

    return make


def strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, Any]:
    """The strides of a tensor as arguments of a kernel, 0 for one that is absent."""
    return {f"stride_{name}{axis}": 0 if tensor is None else tensor.stride(i) for i, axis in enumerate(axes)}


def is_divisible(value: Any) -> bool:
    """Whether Triton will compile with the hint that a pointer (in bytes) or an int is a multiple of 16."""
    return (value.data_ptr() if isinstance(value, torch.Tensor) else value) % 16 == 0


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def arch_of(device: torch.device) -> str:
    """The name in ARCHS of a device. The interpreter (TRITON_INTERPRET=1, tensors on the CPU) counts as sm_80."""
    if planned := _PLANNED.get():
        return planned
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    if triton.knobs.runtime.interpret:
        return "sm_80"
    raise KernelError(
        f"kernels run on a GPU, got a tensor on '{device}'\n  help: pass arch= to plan for a GPU not here"
    )


def num_sms(x: torch.Tensor, arch: str) -> int:
    """How many SMs there are: those of the GPU that a tensor is on, as GPUs of an arch differ; for one that is not here what `ARCHS` says."""
    if x.is_cuda:
        return torch.cuda.get_device_properties(x.device).multi_processor_count
    return ARCHS[arch].num_sms


def rows_refusal(rows: int) -> str | None:
    """None, or why a grid has not so many rows."""
    return None if rows < 2**31 else f"there must be less than 2^31 rows, got {rows}"


def require(reason: str | None, kernel: str) -> None:
    """Raise KernelError with the reason that `accepts` gave, if it gave one."""
    if reason is not None:
        raise KernelError(f"{kernel}: {reason}")


def require_matrix(
    name: str, tensor: torch.Tensor, rows: int | None, columns: int, dtype: torch.dtype | None
) -> None:
    """Raise KernelError unless `tensor` is [rows, columns] with adjacent elements in a row, and of that dtype."""
    want = f"[{'any' if rows is None else rows}, {columns}]"
    if tensor.ndim != 2 or tensor.shape[1] != columns or rows not in (None, tensor.shape[0]):
        raise KernelError(f"{name} must have shape {want}, got {list(tensor.shape)}")
    if columns > 1 and tensor.stride(1) != 1:
        raise KernelError(
            f"{name} must have adjacent elements along its last axis, got strides {list(tensor.stride())}\n"
            f"  help: {name}.contiguous()"
        )
    if dtype is not None and tensor.dtype != dtype:
        raise KernelError(f"{name} must be {dtype}, got {tensor.dtype}")


def row_stride(matrix: torch.Tensor) -> int:
    """The stride of rows. Of a single one torch keeps any number, and 1 would be compiled as a kernel of its own."""
    return matrix.stride(0) if len(matrix) > 1 else matrix.shape[1]


def require_vector(name: str, tensor: torch.Tensor, size: int) -> None:
    """Raise KernelError unless `tensor` is a dense [size]."""
    if tensor.shape != (size,) or (size > 1 and tensor.stride(0) != 1):
        raise KernelError(
            f"{name} must be a dense [{size}], got {list(tensor.shape)} with strides {list(tensor.stride())}"
        )
