# SPDX-License-Identifier: Apache-2.0
"""Compile a plan's kernel for a GPU that is not there, and say all that it takes to launch the machine code without Triton.

Triton compiles a kernel once for each *specialisation*: which arguments are pointers, ints and floats, which of them are
multiples of 16, 1 or None, and what the constants are. `key_of` names a specialisation by a hash of exactly that, of the
kernel's own source and of the GPU, so that a key found again means the same machine code. `build` compiles one.
"""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from nnfront_kernels.common import ARCHS, WARP, KernelError, Plan, is_divisible
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITCallable

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}

Hints = dict[tuple[int], list[list[Any]]]


def specialize(plan: Plan) -> tuple[dict[str, str], dict[str, Any], Hints]:
    """The signature, constants and hints that Triton derives from a plan's arguments at launch.

    Pointers and ints that are multiples of 16 get the hint; an int that is 1 and None become constants.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(plan.constants)
    hints: Hints = {}
    for position, parameter in enumerate(plan.kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = plan.arguments[name]
        if value is None or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{TYPES[value.dtype]}"
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
        else:
            signature[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        hinted = isinstance(value, torch.Tensor | int) and signature[name] != "constexpr"
        if hinted and not parameter.do_not_specialize and is_divisible(value):
            hints[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, hints


def fingerprint(plan: Plan) -> tuple[Any, ...]:
    """What tells a plan's specialisation from others in this process, quicker to have than its key."""
    if plan.alike is None:
        return _fingerprint(plan)
    if plan.alike.mark is None:
        plan.alike.mark = _fingerprint(plan)
    return plan.alike.mark


def _fingerprint(plan: Plan) -> tuple[Any, ...]:
    config = plan.config
    marks: list[Any] = [
        plan.kernel,
        config.num_warps,
        config.num_stages,
        *plan.constants.items(),
        *plan.arguments,
    ]
    for value in plan.arguments.values():
        if isinstance(value, torch.Tensor):
            marks.append((value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int):
            marks.append((value == 1, value % 16 == 0, -(2**31) <= value < 2**31))
        elif value is None or isinstance(value, float):
            marks.append(type(value))
        else:
            marks.append((value.base.dtype, *value.block_shape))
    return tuple(marks)


def describe(plan: Plan, arch: str) -> str:
    """A specialisation as text, a line for each parameter: equal texts compile to the same machine code."""
    signature, constants, hints = specialize(plan)
    lines = [
        f"{plan.kernel.__name__} {source_hash(plan.kernel)} for {arch}",
        f"warps {plan.config.num_warps} stages {plan.config.num_stages}",
    ]
    for position, (name, kind) in enumerate(signature.items()):
        said = f"= {constants[name]!r}" if kind == "constexpr" else kind
        lines.append(f"{name} {said}{' % 16' if (position,) in hints else ''}")
    return "\n".join(lines)


def key_of(plan: Plan, arch: str) -> str:
    """The name of a specialisation: 16 hex digits that are the same in every process and on every machine."""
    return hashlib.sha256(describe(plan, arch).encode()).hexdigest()[:16]


@functools.cache
def source_hash(kernel: Any) -> str:
    """Eight hex digits over the text of a kernel, of the functions that it calls and of the constants that it reads.

    Not Triton's own hash, which changes with a function's line number and with Triton's version.
    """
    parts: dict[str, str] = {}
    _collect(kernel, parts)
    return hashlib.sha256("\n".join(parts[name] for name in sorted(parts)).encode()).hexdigest()[:8]


def _collect(function: Any, parts: dict[str, str]) -> None:
    name = f"{function.fn.__module__}.{function.__name__}"
    if name in parts:
        return
    parts[name] = function.src
    scope = function.fn.__globals__
    for used in function.fn.__code__.co_names:
        value = scope.get(used)
        if isinstance(value, JITCallable):
            if not value.fn.__module__.startswith("triton."):
                _collect(value, parts)
        elif isinstance(value, int | float | str | triton.language.constexpr):
            parts[f"{function.fn.__module__}.{used}"] = f"{used} = {value!r}"


@contextmanager
def without_paths() -> Iterator[None]:
    """Inside of this, machine code names no lines of source files: equal on every machine, and a third of the size.

    It is Triton's setting for the whole process. Threads that compile at the same time need one around all of them.
    """
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        yield


def compile_plan(plan: Plan, arch: str) -> Any:
    """Triton's CompiledKernel of a plan for an arch, without a GPU."""
    limits = ARCHS[arch]
    signature, constants, hints = specialize(plan)
    with without_paths():
        return triton.compile(
            ASTSource(plan.kernel, signature, constants, hints),
            target=GPUTarget("cuda", limits.target, WARP),
            options={
                "num_warps": plan.config.num_warps,
                "num_stages": plan.config.num_stages,
                "enable_fp_fusion": True,
                "launch_pdl": plan.dependent,
            },
        )


def can_compile() -> bool:
    """Whether kernels can be compiled in this process: not where Triton interprets them."""
    return not triton.knobs.runtime.interpret


def build(plan: Plan, arch: str) -> tuple[dict[str, Any], bytes]:
    """Compile a plan; return the facts that a launch needs, in JSON's types, and the cubin.

    `parameters` has the run-time arguments in the order of the launch, each with its kind: `pointer`, `i32`, `i64`, `f32`
    or `descriptor`. Behind them the kernel takes two pointers, to scratch memory for the grid and for profiling.
    Raises KernelError if the kernel needs what a plain launch does not give.
    """
    compiled = compile_plan(plan, arch)
    facts = compiled.metadata
    parameters = _parameters(plan, facts.tensordesc_meta)
    record = {
        "key": key_of(plan, arch),
        "kernel": facts.name,
        "arch": arch,
        "triton": triton.__version__,
        "cuda": _assembler_version(ARCHS[arch].target),
        "threads": facts.num_warps * facts.warp_size,
        "cluster": facts.num_ctas,
        "shared_bytes": facts.shared,
        "scratch_bytes": facts.global_scratch_size,
        "cooperative": bool(facts.launch_cooperative_grid),
        "pdl": bool(facts.launch_pdl),
        "parameters": parameters,
        "about": describe(plan, arch),
    }
    if facts.profile_scratch_size or facts.global_scratch_align > 16:
        raise KernelError(f"{facts.name}: needs scratch memory that only Triton's own launcher gives")
    _check_entry(compiled.asm["ptx"], record)
    return record, compiled.asm["cubin"]


KINDS = {"i32": "i32", "i64": "i64", "fp32": "f32"}
SIZES = {"pointer": (8,), "i32": (4,), "i64": (8,), "f32": (4,)}  # in bytes, as the kernel takes them
MAP_BYTES = 128  # a tensor map, cuda.h


def _parameters(plan: Plan, maps: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    described = iter(maps or ())
    for name, kind in specialize(plan)[0].items():
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            found.append({"name": name, "kind": "descriptor", **_tensor_map(name, next(described, None))})
        else:
            found.append({"name": name, "kind": "pointer" if kind.startswith("*") else KINDS[kind]})
    return found


# The compiler counts element types of tensor maps as PTX does, the driver as CUtensorMapDataType (cuda.h).
_DRIVER_TYPES = {**{i: i for i in range(8)}, 8: 10, 9: 8, 10: 9}


def _tensor_map(name: str, facts: Any) -> dict[str, Any]:
    if facts is None or facts["fp4_padded"] or facts.get("is_im2col"):
        raise KernelError(f"{name}: the launch of such a tensor descriptor is not known")
    return {
        "element": _DRIVER_TYPES[facts["elem_type"]],
        "element_bytes": facts["elem_size"],
        "swizzle": facts["swizzle"],
        "box": list(facts["block_size"]),
    }


def entry_sizes(ptx: str) -> tuple[int, ...]:
    """The sizes in bytes of the parameters of the first kernel in a PTX text, in order."""
    opened = ptx.index("(", ptx.index(".entry"))
    declared = re.findall(r"\.param ([^,)]+)", ptx[opened : ptx.index(")", opened)])
    return tuple(
        int(array[1]) if (array := re.search(r"\.b8 \w+\[(\d+)\]", text)) else _scalar_bytes(text)
        for text in declared
    )


def _scalar_bytes(text: str) -> int:
    width = re.search(r"\.[bfsu](8|16|32|64)\b", text)
    assert width is not None, text
    return int(width[1]) // 8


def sizes_of(parameters: list[dict[str, Any]]) -> Iterator[int]:
    """The sizes in bytes of what a launch passes: a descriptor is a map, its sizes and its strides; then two pointers."""
    for parameter in parameters:
        if parameter["kind"] == "descriptor":
            rank = len(parameter["box"])
            yield from (MAP_BYTES, *[4] * rank, *[8] * rank)
        else:
            yield from SIZES[parameter["kind"]]
    yield from (8, 8)


def _check_entry(ptx: str, record: dict[str, Any]) -> None:
    """Raise KernelError unless the kernel takes what `record` says: a Triton that passes arguments in another way is found here."""
    taken, passed = entry_sizes(ptx), tuple(sizes_of(record["parameters"]))
    threads = re.search(r"\.reqntid (\d+)", ptx)
    if taken != passed or threads is None or int(threads[1]) != record["threads"]:
        raise KernelError(
            f"{record['kernel']}: Triton {triton.__version__} makes kernels that are launched in another way\n"
            f"  got parameters of {taken} bytes and {threads[1] if threads else 'unknown'} threads, "
            f"expected {passed} and {record['threads']}"
        )


@functools.cache
def _assembler_version(capability: int) -> str:
    """The CUDA version of the assembler that Triton uses for a GPU, such as `13.4`."""
    text = subprocess.run(
        [get_ptxas(capability).path, "--version"], check=True, capture_output=True, text=True
    )
    found = re.search(r"release (\d+\.\d+)", text.stdout)
    assert found is not None, text.stdout
    return found[1]
