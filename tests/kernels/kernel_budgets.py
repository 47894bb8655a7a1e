# SPDX-License-Identifier: Apache-2.0
"""What the machine code of a kernel may look like, checked without a GPU.

Some rules hold for every Triton version (`broken_rules`). Registers, shared memory and code size are compared with
budgets_triton_<major>_<minor>.json, which holds what was found when it was written:

    PYTHONPATH=tests/kernels python -m kernel_budgets [KERNEL ...]    # write the file of the installed version anew
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import nnfront_kernels
import torch
import triton
from kernel_cases import MATMULS, SPLIT
from nnfront_kernels.common import ARCHS, Config, Kernel
from nnfront_kernels.inspect import Report, plan_for, report
from nnfront_kernels.spilled import without_spills
from nnfront_kernels.tiles import MatmulShape, accumulators

FILE = Path(__file__).with_name("budgets_triton_{}_{}.json".format(*triton.__version__.split(".")))
DRIFT = 1.10  # code may grow by this factor before somebody looks


@dataclass(frozen=True)
class Build:
    """One compilation: a kernel's config on an arch, for a shape."""

    kernel: str
    arch: str
    config: Config
    shape: Any
    dtype: str = "bfloat16"
    wide: bool = False  # float32 output and residual

    def __str__(self) -> str:
        c, s = self.config, self.shape
        tile = f"{c.block_m}x{c.block_n}x{c.block_k}-w{c.num_warps}-s{c.num_stages}-k{c.split_k}"
        if not isinstance(s, MatmulShape):
            sizes = [f"{name}{int(value)}" for name, value in asdict(s).items()]
            return "-".join([self.kernel, self.arch, tile, self.dtype, *sizes])
        flags = [f"k{s.k}", *(name for name in ("gated", "zero_points", "norm") if getattr(s, name))]
        flags += ["wide"] * self.wide
        flags += [f"group{s.group}"] * bool(s.group) + ["unaligned"] * (not s.aligned)
        return "-".join([self.kernel, self.arch, tile, self.dtype, *flags])


# Archs that have configs of their own: others take those of their family, as far as they fit.
HEADS = tuple(name for name, arch in ARCHS.items() if arch.family == name)
RELATED = tuple(name for name in ARCHS if name not in HEADS)


def builds(kernel: Kernel, archs: Sequence[str] = HEADS) -> list[Build]:
    """Every shipped config: the plain shape first, then a K that is no multiple of a tile, a gated pair, and
    a float32 residual and output.
    """
    archs = [arch for arch in archs if arch in kernel.configs]
    if kernel not in MATMULS:
        return others(kernel, archs)
    made = []
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]
    for arch, group in itertools.product(archs, kernel.groups):
        plain = MatmulShape(SPLIT.get(kernel.name, 4096), 4096, 4096, group=group)
        shapes = [plain]
        if group == kernel.groups[0]:
            shapes.append(replace(plain, gated=True))
        if group == 0:
            shapes.append(replace(plain, k=4096 + 16))
        if kernel.name == "matmul_int4":
            shapes.append(replace(plain, zero_points=True))
        if kernel.accepts(replace(plain, m=1, norm=True), dtype, arch) is None:
            shapes.append(replace(plain, m=16, norm=True))
        for shape in shapes:
            configs = kernel.candidates(shape, arch) if kernel.candidates else kernel.configs[arch]
            if shape.norm:
                configs = tuple(config for config in configs if config.block_m <= shape.m)
            facts = {"group": shape.group, "zero_points": shape.zero_points}
            configs = without_spills(kernel.name, configs, arch, **facts)
            if kernel.name in SPLIT:
                configs = tuple(replace(c, split_k=4, block_k=group or c.block_k) for c in configs)
            wides = [False, True] if shape == plain and group == kernel.groups[0] else [False]
            made += [Build(kernel.name, arch, c, shape, dtype, wide) for wide in wides for c in configs]
    return made


def relatives(kernel: Kernel) -> list[Build]:
    """One for each arch that takes the configs of another."""
    return list({build.arch: build for build in reversed(builds(kernel, RELATED))}.values())


def others(kernel: Kernel, archs: Sequence[str]) -> list[Build]:
    """Every config of a kernel with shapes of its own."""
    dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]
    made = []
    configs = [(arch, config) for arch in archs for config in kernel.configs[arch]]
    for arch, config in configs:
        shape = kernel.shape_for(kernel.typical, config)
        shapes = [shape]
        if kernel.name == "grouped_matmul":
            shapes += [replace(shape, gated=False, gather=False), replace(shape, k=shape.k + 16)]
        if kernel.name == "unpack_weight":
            shapes += [replace(shape, group=32, zero_points=True), replace(shape, bits=8)]
        if kernel.name == "quantize_fp8":
            shapes.append(replace(shape, norm=True))
        if hasattr(shape, "fp8"):
            made.append(chosen(kernel, arch, replace(shape, fp8=True), dtype))
        made += [Build(kernel.name, arch, config, each, dtype) for each in shapes]
    if kernel.name.startswith("attention"):
        made += [chosen(kernel, arch, shape, dtype) for arch in archs for shape in heads(kernel)]
    return made


def chosen(kernel: Kernel, arch: str, shape: Any, dtype: str) -> Build:
    return Build(kernel.name, arch, kernel.choose(shape, dtype, arch), shape, dtype)


def heads(kernel: Kernel) -> list[Any]:
    """Heads that do not fill a block, values of another size, and the paths that the typical shape does not take."""
    shape = kernel.typical
    if kernel.name == "attention_latent":
        few = replace(shape, heads=16)
        return [
            replace(few, page=0, window=1024),
            replace(few, page=16),
            replace(few, value_size=128, rest=32),
        ]
    made = [replace(shape, size=size, value_size=values) for size, values in ((80, 0), (96, 0), (192, 128))]
    if kernel.name == "attention_prefill":
        made += [replace(shape, before=512, page=64), replace(shape, size=64, window=256)]
        return [*made, replace(shape, before=512, page=128, fp8=True)]
    return [*made, replace(shape, page=0, window=1024), replace(shape, page=0, fp8=True)]


def compile_build(build: Build, package: ModuleType = nnfront_kernels) -> Report:
    kernel = next(kernel for kernel in package.KERNELS if kernel.name == build.kernel)
    options = {}
    if build.wide:
        residual = torch.empty(build.shape.m, build.shape.n, dtype=torch.float32, device="meta")
        options = {"residual": residual, "out_dtype": torch.float32}
    return report(plan_for(kernel, build.shape, build.dtype, build.arch, build.config, **options), build.arch)


def broken_rules(build: Build, found: Report, known_spills: int = 0) -> list[str]:
    """What is wrong with the machine code of a hot kernel, in words; [] if nothing.

    `known_spills`: what the file of the installed version owns up to, where that version spills and nothing else can take over.
    """
    arch = ARCHS[build.arch]
    broken = []
    if found.spills > known_spills:
        broken.append(f"{found.spills} spill instructions")
    if inside := sum(n for opcode, n in found.loop.items() if opcode.split(".")[0] in ("LDL", "STL")):
        broken.append(f"{inside} of them in the loop")
    if found.shared_bytes > arch.shared_bytes:
        broken.append(f"{found.shared_bytes:,} bytes of shared memory, the limit is {arch.shared_bytes:,}")
    if found.registers > arch.registers:
        broken.append(f"{found.registers} registers, the limit is {arch.registers}")
    if found.serialized:
        broken.append("wgmma is serialized")
    fp8 = build.dtype == "float8_e4m3fn"
    tensor_cores = {
        "sm_80": "QMMA" if fp8 and arch.target >= 89 else "HMMA",
        "sm_90": "QGMMA" if fp8 else "HGMMA",
        "sm_100": "UTCQMMA" if fp8 else "UTCHMMA",
    }[arch.family]
    if build.config.block_m < 64 and arch.family != "sm_80":
        tensor_cores = "HMMA"  # wgmma and tcgen05 work on 64 rows or more
    products = "matmul" in build.kernel or "attention" in build.kernel
    if build.config.block_m >= 16 and products and set(found.mma) != {tensor_cores}:
        broken.append(f"tensor-core instructions {found.mma}, expected {tensor_cores}")
    if fp8 and build.arch == "sm_90" and build.config.block_m >= 64:
        # Two-level sums: each accumulator of a thread takes part in one addition for each step of K.
        sums = found.loop.get("FADD", 0) + found.loop.get("FFMA", 0)
        if sums < accumulators(build.config, arch):
            broken.append(f"{sums} float32 additions in the loop: sums stay in the tensor core")
    bars = sum(n for opcode, n in found.loop.items() if opcode.startswith("BAR"))
    if (
        build.kernel in SPLIT
        and build.arch == "sm_90"
        and build.config.block_m <= 64
        and bars > most_bars(build)
    ):
        broken.append(f"{bars} barriers in the loop: something changes hands through shared memory")
    wide = {name for name in found.loads if name.endswith((".128", "UTMALDG"))}
    # The others also load partial sums, scales or a single row of x.
    if (build.kernel != "moe_routing" and not wide) or (
        build.kernel in ("matmul", "matmul_tma") and set(found.loads) != wide
    ):
        broken.append(f"narrow loads {found.loads}")
    return broken


def most_bars(build: Build) -> int:
    """Barriers in a step of a product of few rows. Zero points reach the threads that unpack weights of 64 rows through shared memory."""
    unpacks_64 = (
        build.config.block_m == 64 and isinstance(build.shape, MatmulShape) and build.shape.zero_points
    )
    return 6 if unpacks_64 else 4


def over_budget(build: Build, found: Report, budgets: dict[str, dict[str, int]]) -> list[str]:
    """Which numbers grew beyond the file's. For a version of Triton without a file one test fails, not each."""
    if not budgets:
        return []
    budget = budgets.get(str(build))
    if budget is None:
        return [f"no budget in {FILE.name}: write it anew"]
    return [
        f"{name} {getattr(found, name)}, was {value}"
        for name, value in budget.items()
        if getattr(found, name) > value * DRIFT
    ]


def load() -> dict[str, dict[str, int]]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def missing_file() -> str:
    """What to do if the installed version of Triton has no budgets; "" if it has."""
    if FILE.exists():
        return ""
    return (
        f"Triton {triton.__version__} has no budgets: the rules are checked, registers, shared memory and code size are not.\n"
        f"  help: compile every config once and commit what is found:\n"
        f"        PYTHONPATH=tests/kernels python -m kernel_budgets    # writes {FILE.name}, takes 10 to 20 minutes"
    )


def main(names: list[str]) -> None:
    kernels = [kernel for kernel in nnfront_kernels.KERNELS if kernel.name in names or not names]
    found = {name: numbers for name, numbers in load().items() if names and name.split("-")[0] not in names}
    for build in (build for kernel in kernels for build in (*builds(kernel), *relatives(kernel))):
        numbers = compile_build(build)
        for rule in broken_rules(build, numbers):
            print(f"{build}: {rule}", flush=True)
        names_of = ("registers", "shared_bytes", "instructions", *(["spills"] if numbers.spills else []))
        found[str(build)] = {name: getattr(numbers, name) for name in names_of}
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in sorted(found.items())
    )
    FILE.write_text(f"{{\n{lines}\n}}\n")
    print(f"{len(found)} budgets in {FILE.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
