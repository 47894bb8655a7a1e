# SPDX-License-Identifier: Apache-2.0
"""Compile a kernel for a GPU that is not there, and count what the machine code does.

    python -m nnfront_kernels.inspect matmul [--arch sm_90] [--dtype bfloat16] [--shape M,N,K] [--group G]

One line per config. The compiler accepts a kernel that spills, that needs more shared memory than the GPU has, or that
loads two bytes at a time; this is where it shows. What it cannot show: bank conflicts, stalls, clocks, L2 order.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import triton
from nnfront_kernels import KERNELS
from nnfront_kernels.ahead import compile_plan
from nnfront_kernels.common import ARCHS, Config, Kernel, Plan

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class Report:
    """What one compiled kernel uses. Spills are instructions that move registers to and from local memory."""

    registers: int
    shared_bytes: int
    spills: int
    instructions: int
    mma: dict[str, int]  # HMMA, HGMMA, UTCHMMA, ...
    loads: dict[str, int]  # global loads by instruction and bits: LDGSTS.128, LDG.16, UTMALDG, ...
    serialized: bool  # ptxas gave up overlapping wgmma (advisories C7510 and C7511)
    loop: dict[str, int]  # opcodes of the longest innermost loop
    # Of fetches, loads and stores of global memory, and waits for other launches: FETCH, WAIT, LOAD, STORE, NEXT.
    order: tuple[str, ...]


def report(plan: Plan, arch: str) -> Report:
    """Compile a plan and count."""
    compiled = compile_plan(plan, arch)
    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        sass = _run(tools.cuobjdump.path, "-sass", cubin)
        usage = _run(tools.cuobjdump.path, "--dump-resource-usage", cubin)
        log = ""
        if "wgmma" in compiled.asm["ptx"]:
            ptx = Path(folder, "kernel.ptx")
            ptx.write_text(compiled.asm["ptx"])
            assembler = tools.ptxas if VERSION < (3, 9) else tools.ptxas_blackwell
            log = _run(assembler.path, f"--gpu-name={arch}a", "-v", ptx, "-o", Path(folder, "again.cubin"))
    lines = [(int(at, 16), code) for at, code in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", sass)]
    opcodes = Counter(_opcode(code) for _, code in lines)
    loads: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        family = opcode.split(".")[0]
        if family in ("LDG", "LDGSTS"):
            width = re.search(r"\.(128|64|U16|S16|U8|S8)\b", opcode)
            loads[f"{family}.{width[1].lstrip('US') if width else 32}"] += count
        elif family == "UTMALDG":
            loads[family] += count
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Report(
        registers=int(registers[1]),
        shared_bytes=compiled.metadata.shared,
        spills=sum(count for opcode, count in opcodes.items() if opcode.split(".")[0] in ("LDL", "STL")),
        instructions=len(lines),
        mma=dict(_families(opcodes, ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "IMMA", "QMMA", "QGMMA"))),
        loads=dict(sorted(loads.items())),
        serialized="C7510" in log or "C7511" in log,
        loop=dict(_innermost_loop(lines)),
        order=tuple(kind for _, code in lines if (kind := _ORDERED.get(_opcode(code).split(".")[0]))),
    )


_ORDERED = {
    "CCTL": "FETCH",
    "ACQBULK": "WAIT",
    "PREEXIT": "NEXT",
    **dict.fromkeys(("LDG", "LDGSTS", "UTMALDG"), "LOAD"),
    **dict.fromkeys(("STG", "ATOM", "ATOMG", "RED", "REDG", "UTMASTG"), "STORE"),
}


def _innermost_loop(lines: Sequence[tuple[int, str]]) -> Counter[str]:
    """Opcodes between a backward branch and its target, for the longest such stretch that has no other inside."""
    spans = []
    for at, code in lines:
        target = re.search(r"\bBRA(?:\.\S+)? .*?0x([0-9a-f]+)", code)
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    inner = [s for s in spans if not any(o != s and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    if not inner:
        return Counter()
    first, last = max(inner, key=lambda span: span[1] - span[0])
    return Counter(_opcode(code) for at, code in lines if first <= at <= last)


def _opcode(code: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", code.strip()).split()[0]


def _families(opcodes: Counter[str], families: tuple[str, ...]) -> Counter[str]:
    found: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        if opcode.split(".")[0] in families:
            found[opcode.split(".")[0]] += count
    return found


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return done.stdout + done.stderr


def plan_for(
    kernel: Kernel, shape: Any, dtype: str, arch: str, config: Config | None = None, **options: Any
) -> Plan:
    """The plan of a kernel on tensors without values; `config` instead of the kernel's choice."""
    arguments, needed = kernel.example(shape, dtype)
    return kernel.plan(*arguments, **needed, **options, arch=arch, config=config)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m nnfront_kernels.inspect", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("kernel", choices=[kernel.name for kernel in KERNELS])
    parser.add_argument("--arch", choices=list(ARCHS), help="one instead of all")
    parser.add_argument("--dtype", help="default bfloat16, or the kernel's first")
    parser.add_argument(
        "--shape", help="the shape's first numbers, e.g. M,N,K; default the kernel's typical ones"
    )
    parser.add_argument("--group", type=int, help="quantisation group along K")
    parser.add_argument(
        "--loop", action="store_true", help="also list the opcodes of the longest innermost loop"
    )
    options = parser.parse_args(argv)
    kernel = next(kernel for kernel in KERNELS if kernel.name == options.kernel)
    dtype = options.dtype or ("bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0])
    shape = kernel.typical
    if options.shape:
        names = [field.name for field in fields(shape)]
        shape = replace(shape, **dict(zip(names, map(int, options.shape.split(",")), strict=False)))
    if options.group is not None:
        shape = replace(shape, group=options.group)
    for arch in [options.arch] if options.arch else kernel.configs:
        refusal = kernel.accepts(shape, dtype, arch)
        if refusal:
            print(f"{arch}: refused: {refusal}")
            continue
        chosen = kernel.choose(shape, dtype, arch)
        for config in kernel.configs[arch]:
            found = report(plan_for(kernel, kernel.shape_for(shape, config), dtype, arch, config), arch)
            sizes = " ".join(f"{name}={value}" for name, value in asdict(config).items())
            print(f"{arch}{' *' if config == chosen else '  '} {sizes}")
            print(
                f"    registers {found.registers}, shared {found.shared_bytes:,} of {ARCHS[arch].shared_bytes:,} bytes, "
                f"spills {found.spills}, instructions {found.instructions}, mma {found.mma}, loads {found.loads}"
                f"{', WGMMA SERIALIZED' if found.serialized else ''}"
            )
            if options.loop:
                print(f"    loop {found.loop}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
