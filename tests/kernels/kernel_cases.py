# SPDX-License-Identifier: Apache-2.0
"""The inputs that every matmul kernel is run on, and the float64 answer computed without the kernels' own code."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import nnfront_kernels
import torch
from kernel_checks import EPS32, SUM, Guarded, assert_close, hopper_drift, surrounded
from kernel_memory import watched
from nnfront_kernels.common import Plan
from nnfront_kernels.quantized import pack_int4
from nnfront_kernels.split_k import Workspace
from nnfront_kernels.tiles import MatmulShape

SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257)
EPS = 0.01  # of norms, not far below the mean square of x
POISONS = (0xFF, 0x5A)  # NaN in every float dtype; a plausible number


@dataclass(frozen=True)
class Case:
    """One launch. `config` indexes the kernel's configs of all archs, None is the kernel's own choice."""

    m: int
    n: int  # columns of the output
    k: int
    dtype: str = "float16"
    bias: bool = False
    activation: str = "none"
    gated: bool = False
    residual: bool = False
    scale: float = 1.0
    out_dtype: str | None = None
    gap: int = 0  # elements between rows
    offset: int = 0  # elements before the first row, from an aligned address
    group: int = 0
    zero_points: bool = False
    norm: bool = False
    norm_weight: bool = False
    config: int | None = None

    def __str__(self) -> str:
        flags = [
            name
            for name in ("bias", "gated", "residual", "zero_points", "norm", "norm_weight")
            if getattr(self, name)
        ]
        flags += [
            f"{name}{value}"
            for name in ("gap", "offset", "group", "config")
            if (value := getattr(self, name))
        ]
        return "-".join([f"{self.m}x{self.n}x{self.k}", self.dtype, self.activation, *flags])


# Epilogues and layouts rotate over the sizes with periods that share no factor, so that all of them meet.
EPILOGUES: tuple[dict[str, Any], ...] = (
    {},
    {"bias": True, "activation": "silu"},
    {"gated": True, "activation": "silu"},
    {"residual": True, "scale": 0.5},
    {"bias": True, "activation": "gelu", "out_dtype": "float32"},
    {"gated": True, "activation": "gelu_tanh", "bias": True, "residual": True, "scale": 2.0},
    {"activation": "gelu_tanh"},
)
LAYOUTS: tuple[dict[str, int], ...] = ({}, {"gap": 16}, {"gap": 3}, {"gap": 8, "offset": 8}, {"offset": 1})


def pairwise(sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """M, N, K such that every pair of two sizes meets in every two of the three places, once."""
    indices = range(len(sizes))
    return [(sizes[i], sizes[j], sizes[(i + j) % len(sizes)]) for i, j in itertools.product(indices, indices)]


def grid(sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    return list(itertools.product(sizes, repeat=3))


def check_partial_sums(plan: Plan, case: Case) -> None:
    """Raise AssertionError unless blocks that share a tile have left sums of the rows that there are, and of no others: with one row it is 16 times as much."""
    if (partial := plan.arguments.get("partial_ptr")) is not None:
        columns, tiles, splits = plan.grid
        squares = columns * tiles * plan.config.block_m if case.norm else 0
        sums = columns * plan.config.block_n * case.m
        assert int((~partial.isnan()).sum()) == splits * (sums + squares), "sums of rows that are not there"


def run(package: ModuleType, name: str, case: Case, arch: str | None = None, *, launches: int = 2) -> None:
    """Launch a case on poisoned buffers, the second time with its blocks in the other order; AssertionError if anything is wrong.

    Tensors lie on torch's default device. With `arch`, the case's config is one of that arch only.
    """
    kernel = next(kernel for kernel in package.KERNELS if kernel.name == name)
    generator = torch.Generator().manual_seed(hash((case.m, case.n, case.k)) % 2**31)
    dtype = getattr(torch, case.dtype)
    rows = 2 * case.n if case.gated else case.n

    def normal(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        values = torch.randn(*size, generator=generator, dtype=torch.float64, device="cpu")
        return values.to(torch.get_default_device(), dtype)

    def place(values: torch.Tensor) -> torch.Tensor:
        return surrounded(values, gap(name, case, values.shape[1], values.dtype), offset(name, case))

    x, dense_x, weights, dense, widened = OPERANDS[name](case, rows, normal, place)
    kind = getattr(torch, case.out_dtype or ("float16" if dtype == FP8 else case.dtype))
    beside = torch.float16 if dtype == FP8 else dtype
    options: dict[str, Any] = {
        "bias": normal(rows, dtype=beside) if case.bias else None,
        "activation": case.activation,
        "gated": case.gated,
        "residual": place(normal(case.m, case.n, dtype=beside)) if case.residual else None,
        "scale": case.scale,
        "out_dtype": kind if kind != dtype else None,
    }
    if case.norm:
        dense_x = dense_x / (dense_x.square().mean(1, keepdim=True) + EPS).sqrt()
        options["norm_eps"] = EPS
    if case.norm_weight:
        options["norm_weight"] = powers_of_two(case.k, generator).to(dense_x.device, dtype)
        dense_x = dense_x * options["norm_weight"].double()
    configs = [(a, config) for a, row in kernel.configs.items() if arch in (None, a) for config in row]
    arch, config = (configs[0][0], None) if case.config is None else configs[case.config % len(configs)]
    if config is not None and config.block_m == 1 and case.m > 2:
        config = kernel.configs[arch][1]  # thousands of blocks of one row each take the interpreter a minute
    if config is not None and name in SPLIT:
        config = replace(config, split_k=1 + case.config % 3, block_k=case.group or config.block_k)
    short = 0.0
    if torch.get_default_device().type == "cuda":  # the interpreter's sums are as wide as others
        block_m = kernel.plan(x, *weights, **options, arch=arch, config=config).config.block_m
        short = hopper_drift(name, arch, block_m)
    expected, drift = answer(dense_x, dense, widened, case, options, short)

    results = []
    for repeat in range(launches):
        between, before = gap(name, case, case.n, kind), offset(name, case)
        out = Guarded(case.m, case.n, kind, between, before, POISONS[repeat % 2])
        plan = kernel.plan(x, *weights, **options, out=out.view, arch=arch, config=config)
        if plan.arguments.get("partial_ptr") is not None:
            # The next launch gets this one's counts, as it left them, and partial sums that mean nothing.
            options["workspace"] = Workspace(
                plan.arguments["partial_ptr"].fill_(math.nan), plan.arguments["arrived_ptr"]
            )
        if name in PERSISTENT:
            plan = replace(plan, grid=(min(plan.grid[0], 3),))
        with watched(plan.arguments, backwards=repeat % 2 == 1):
            plan.launch()
        out.check()
        check_partial_sums(plan, case)
        assert_close(actual=out.view, expected=expected, drift=drift)
        results.append(out.view.clone().contiguous().view(torch.uint8))
    assert all(torch.equal(result, results[0]) for result in results), "two runs in different orders differ"
    options.pop("workspace", None)
    stated = kernel.reference(x, *weights, **options, compute=torch.float64)
    assert_close(actual=stated, expected=expected, drift=drift)


def powers_of_two(size: int, generator: torch.Generator) -> torch.Tensor:
    """Weights of a norm, between 1/8 and 8 and of both signs: multiplying by them rounds nothing."""
    exponents = torch.randint(-3, 4, (size,), generator=generator, device="cpu")
    return torch.exp2(exponents) * (torch.randint(0, 2, (size,), generator=generator, device="cpu") * 2 - 1)


# Kernels with operands and epilogues like matmul's; the others have tests of their own.
MATMULS = tuple(kernel for kernel in nnfront_kernels.KERNELS if isinstance(kernel.typical, MatmulShape))
# Kernels whose blocks walk over several tiles: with three blocks they do so on these small shapes too.
PERSISTENT = ("matmul_tma",)
# Kernels whose blocks share tiles, and how many rows they take at most.
SPLIT = {"matmul_small_m": 64, "matmul_int4": 257, "matmul_int8": 257, "matmul_fp8": 257}
# Kernels whose rows must start at a multiple of 16 bytes.
ALIGNED = ("matmul_tma",)
# Kernels whose rows of x and w must start at a multiple of 16 elements.
QUANTIZED = ("matmul_int4", "matmul_int8", "matmul_fp8")


def gap(name: str, case: Case, columns: int, dtype: torch.dtype) -> int:
    """Elements between two rows: the case's, and more up to a multiple of 16 bytes where the kernel needs that."""
    multiple = 16 // dtype.itemsize if name in ALIGNED else 16 if name in QUANTIZED else 1
    return case.gap + -(columns + case.gap) % multiple


def offset(name: str, case: Case) -> int:
    return -(-case.offset // 16) * 16 if name in ALIGNED + QUANTIZED else case.offset


def answer(
    x: torch.Tensor,
    dense: torch.Tensor,
    widened: torch.Tensor,
    case: Case,
    options: dict[str, Any],
    short: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The epilogue of x @ dense.T in float64, and how far a float32 computation of it may drift, whose sums may be off by `short` of their terms.

    `widened` is |dense|, or more where the kernel sums larger terms that cancel.
    """
    z = x @ dense.T * case.scale
    unit = SUM * EPS32 * math.sqrt(max(case.k, 1)) + short
    drift = unit * (x.abs() @ widened.T) * abs(case.scale) + 2 * EPS32 * z.abs()
    if options["bias"] is not None:
        z = z + options["bias"].double()
        drift = drift + EPS32 * z.abs()
    if case.gated:
        gate, up = _curve(z[:, 0::2], case.activation), z[:, 1::2]
        drift = (STEEPEST * drift[:, 0::2] + FUNCTION * gate.abs()) * (up.abs() + drift[:, 1::2]) + drift[
            :, 1::2
        ] * gate.abs()
        y = gate * up
    else:
        y = _curve(z, case.activation)
        if case.activation != "none":
            drift = STEEPEST * drift + FUNCTION * (y.abs() + EPS32)
    if options["residual"] is not None:
        y = y + options["residual"].double()
    return y, drift + 2 * EPS32 * y.abs()


STEEPEST = 1.13  # the largest slope of silu and gelu
FUNCTION = (
    16 * EPS32
)  # relative error allowed to exp and erf in float32; gelu also cancels near its left tail


def _curve(z: torch.Tensor, activation: str) -> torch.Tensor:
    """The activations by their textbook formulas."""
    if activation == "silu":
        return z / (1 + torch.exp(-z))
    if activation == "gelu":
        return z * (1 + torch.erf(z / math.sqrt(2))) / 2
    if activation == "gelu_tanh":
        return z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    return z


def _dense(case: Case, rows: int, normal: Any, place: Any) -> Any:
    """A plain weight: x, the same in float64, launch's arguments after x, the weight in float64, and its magnitude."""
    x, w = place(normal(case.m, case.k)), place(normal(rows, case.k))
    return x, x.double(), (w,), w.double(), w.double().abs()


def _int4(case: Case, rows: int, normal: Any, place: Any) -> Any:
    """Random nibbles, scales and zeros."""
    groups = case.k // case.group
    nibbles = (normal(rows, case.k).double() * 4).round().long() % 16
    scales = (normal(groups, rows).double().abs() / 8 + 1 / 64).to(
        torch.float32 if case.gap else torch.float16
    )
    zeros = (
        (normal(groups, rows).double() * 3).round().long() % 16
        if case.zero_points
        else torch.full((groups, rows), 8)
    )
    per_weight = scales.double().T.repeat_interleave(case.group, 1)
    zero = zeros.T.repeat_interleave(case.group, 1)
    weights = (
        place(pack_int4(nibbles, case.group)),
        place(scales),
        place(zeros.to(torch.uint8)) if case.zero_points else None,
    )
    x = place(normal(case.m, case.k))
    w = (nibbles - zero) * per_weight
    return x, x.double(), weights, w, w.abs()


def _int8(case: Case, rows: int, normal: Any, place: Any) -> Any:
    """Random bytes and scales; group 0 is one scale for a row."""
    groups = case.k // case.group if case.group else 1
    q = (normal(rows, case.k).double() * 50).round().clamp(-128, 127).to(torch.int8)
    scales = (normal(groups, rows).double().abs() / 64 + 1 / 256).to(
        torch.float32 if case.gap else torch.float16
    )
    dense = q.double() * scales.double().T.repeat_interleave(case.k // groups, 1)
    x = place(normal(case.m, case.k))
    return x, x.double(), (place(q), place(scales)), dense, dense.abs()


def _fp8(case: Case, rows: int, normal: Any, place: Any) -> Any:
    """Random codes of many magnitudes, and scales for rows, or for a whole matrix."""

    def codes(count: int) -> torch.Tensor:
        magnitudes = torch.exp2(4 * normal(count, case.k, dtype=torch.float64)).clamp(2.0**-9, 448)
        return (magnitudes * normal(count, case.k, dtype=torch.float64).sign()).to(FP8)

    def scaled(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = normal(1 if whole else len(q), 1, dtype=torch.float32).abs() / 512 + 1 / 2048
        return place(scales), q.double() * scales.double()

    whole = (case.m + case.n) % 3 == 0
    x, w = codes(case.m), codes(rows)
    (x_scales, dense_x), (w_scales, dense) = scaled(x), scaled(w)
    return place(x), dense_x, (place(w), x_scales, w_scales), dense, dense.abs()


FP8 = torch.float8_e4m3fn
OPERANDS = {
    "matmul": _dense,
    "matmul_tma": _dense,
    "matmul_small_m": _dense,
    "matmul_int4": _int4,
    "matmul_int8": _int8,
    "matmul_fp8": _fp8,
}
