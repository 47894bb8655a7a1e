# SPDX-License-Identifier: Apache-2.0
"""Whether kernels are right on this device: the cases of the tests, and full sizes against float64."""

from __future__ import annotations

import math
from typing import Any

import nnfront_kernels
import stored
import torch
from cases import Run
from kernel_cases import Case
from kernel_cases import run as run_case
from kernel_checks import EPS32, SUM, TOLERANCES, hopper_drift
from nnfront_kernels import Kernel, grouped_matmul, moe_routing
from nnfront_kernels.quantized import FP8, dequantize_int4, pack_int4
from nnfront_kernels.row_norm import normalised

RECORDS = {kernel.name: kernel for kernel in nnfront_kernels.KERNELS}


def edge(name: str, case: Case, arch: str, device: str) -> str | None:
    """None, or what is wrong with a small case: poisoned buffers, guard bands, error bounds, repeatability."""
    torch.set_default_device(device)
    try:
        run_case(nnfront_kernels, name, case, arch=arch)
    except AssertionError as error:
        return str(error)
    finally:
        torch.set_default_device(None)
    return None


def operands(run: Run, arch: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the kernel's `plan`, with random values."""
    torch.manual_seed(0)
    kernel = RECORDS[run.kernel]
    if run.kernel == "grouped_matmul":
        return _experts(run, arch, device)
    if run.kernel in stored.KERNELS:
        return stored.operands(kernel, run.shape, run.dtype, device)
    arguments, options = kernel.example(run.shape, run.dtype, device)
    if run.kernel.startswith("matmul_fp8") and device == "cpu":
        options["out_dtype"] = torch.float16  # the interpreter's bfloat16 is wrong
    options = {name: _random(run, value) for name, value in options.items()}
    if options.get("norm_weight") is not None:  # its products are not rounded
        exponents = torch.randint(-3, 4, options["norm_weight"].shape, device=device)
        options["norm_weight"] = torch.exp2(exponents).to(options["norm_weight"].dtype)
    made = tuple(_random(run, tensor) for tensor in arguments)
    if run.kernel == "add_low_rank":  # of the last number there is none
        made[4].copy_(torch.randint(-1, run.shape.adapters + 1, made[4].shape, device=device))
    if run.kernel == "copy_rows":  # each row once, and one that is nobody's
        made[1].copy_(torch.randperm(run.shape.rows, device=device) - 1)
    # Rates with which a state neither grows nor vanishes.
    if run.kernel == "ssm_scan":
        made[1].abs_().div_(8)
        made[2].abs_().neg_()
    if run.kernel == "gated_delta_rule":
        made[3].abs_().div_(-8)
        made[4].sigmoid_()
    return made, options


def _random(run: Run, tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    is_int4 = run.kernel == "matmul_int4" and tensor.dtype == torch.uint8
    if is_int4 and tensor.shape[0] != run.shape.k // run.shape.group:  # else zero points, 0 to 15
        nibbles = torch.randint(
            0, 16, (tensor.shape[0], run.shape.k), device=tensor.device, dtype=torch.uint8
        )
        return pack_int4(nibbles, run.shape.group)
    if tensor.dtype == torch.int32 and tensor.ndim == 2:
        experts = getattr(run.shape, "experts", 128)
        return (
            torch.rand(tensor.shape[0], experts, device=tensor.device).argsort(1)[:, : tensor.shape[1]].int()
        )
    if tensor.dtype in (torch.int8, torch.uint8):
        low, high = (-128, 128) if tensor.dtype == torch.int8 else (0, 16)
        return torch.randint(low, high, tensor.shape, device=tensor.device).to(tensor.dtype)
    values = torch.randn(tensor.shape, device=tensor.device)
    scales = run.kernel in ("matmul_int4", "matmul_int8") and tensor.shape[0] != run.shape.m
    if scales or (run.kernel.startswith("matmul_fp8") and tensor.dtype == torch.float32):
        values = values.abs() / 64 + 1 / 256
    return values.to(tensor.dtype)


def _experts(run: Run, arch: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random tokens and weights, and a routing of tokens to different experts with the block that choose wants."""
    (x, w, _), options = RECORDS[run.kernel].example(run.shape, run.dtype, device)
    scores = torch.rand(run.shape.tokens, run.shape.experts, device=device)
    chosen = scores.argsort(1)[:, : run.shape.top_k].int().contiguous()
    block_m = grouped_matmul.choose(run.shape, run.dtype, arch).block_m
    routing = moe_routing.launch(chosen, num_experts=run.shape.experts, block_m=block_m, arch=arch)
    return (_random(run, x), _random(run, w), routing), options


def full_size(run: Run, arch: str, device: str) -> str | None:
    """None, or what is wrong with a run at full size, after two launches on poisoned outputs."""
    kernel = RECORDS[run.kernel]
    arguments, options = operands(run, arch, device)
    results = []
    for _ in range(2):
        made = kernel.launch(*arguments, **options, arch=arch)
        results.append(
            [
                part
                for part in (made if isinstance(made, tuple) else (made,))
                if isinstance(part, torch.Tensor)
            ]
        )
    for first, second in zip(*results, strict=True):
        if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            return "two launches differ"
    return _difference(kernel, run, arch, arguments, options, results[0])


# Kernels whose results are rounded once, or a few times, from their definition in float64.
PLAIN = ("rms_norm", "layer_norm", "softmax", "gated_activation", "rope", "unpack_weight", "copy_rows")


def _difference(
    kernel: Kernel,
    run: Run,
    arch: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    results: list[torch.Tensor],
) -> str | None:
    if run.kernel == "quantize_fp8" and run.shape.norm:
        stated = normalised(arguments[0].double(), options["norm_eps"], options["norm_weight"].double())
        off = (results[0].double() * results[1].double() - stated).abs()
        # Three bits behind the first; below 2^-6 of a scale steps of 2^-9 of it.
        return (
            None
            if bool((off <= 2**-4 * 1.01 * stated.abs() + 2**-10 * results[1].double()).all())
            else "codes are off"
        )
    if run.kernel == "quantize_fp8":
        q, scales = kernel.reference(*arguments, **options)
        same = torch.equal(results[0].view(torch.uint8), q.view(torch.uint8)) and torch.equal(
            results[1], scales
        )
        return None if same else "differs from torch"
    if run.kernel == "moe_routing":
        flat = arguments[0].flatten()
        in_order = torch.equal(results[0].long(), flat.sort(stable=True).indices)
        return None if in_order and int(results[1][2].sum()) == flat.numel() else "slots are not sorted"
    if run.kernel in ("sampling", "sampling_parts"):
        same = torch.equal(results[0], kernel.reference(*arguments, **options))
        return None if same else "other tokens than the definition's"
    if run.kernel in stored.KERNELS:
        stated, found, terms = stored.stated_and_found(kernel, arguments, options, results)
        return _far(found, stated, terms)
    if run.kernel == "add_low_rank":
        magnitudes = tuple(map(_magnitude, arguments))
        stated, sizes = (kernel.reference(*given, compute=torch.float64) for given in (arguments, magnitudes))
        return _far(results, [stated], [sizes])
    if run.kernel in ("causal_conv1d", "ssm_scan", "gated_delta_rule"):
        stated = kernel.reference(*arguments, **options, compute=torch.float64)
        # Terms of either sign meet in each result: an average of their sizes is what a rounding of one of them is measured by.
        return _far(
            results, list(stated), [part.double().abs() + part.double().abs().mean() for part in stated]
        )
    if run.kernel == "rope_angles":  # as far off where they are small
        stated = list(kernel.reference(*arguments, **options, compute=torch.float64))
        return _far(results, stated, list(map(torch.ones_like, stated)))
    if run.kernel in PLAIN:
        stated = kernel.reference(*arguments, **options, compute=torch.float64)
        stated = list(stated) if isinstance(stated, tuple) else [stated]
        return _far(results, stated, stated)
    options = {name: value for name, value in options.items() if name != "out_dtype"}
    expected = kernel.reference(*arguments, **options, compute=torch.float64, **_wide(run)).double()
    sizes = _sizes(kernel, run, arguments, options).double()
    error = (results[0].double() - expected).abs()
    depth = getattr(run.shape, "k", 8)
    unit = TOLERANCES[results[0].dtype].unit
    # A gated pair is a product of two sums, each with its own error.
    drift = 3 * SUM * EPS32 * math.sqrt(depth) * sizes
    drift += hopper_drift(run.kernel, arch, kernel.choose(run.shape, run.dtype, arch).block_m) * sizes
    wrong = ~(error <= unit * expected.abs() * 1.01 + drift + TOLERANCES[results[0].dtype].smallest)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        return f"{int(wrong.sum())} elements are off, first at {at}: {float(results[0][at])}, expected {float(expected[at])}"
    return None


def _far(results: list[torch.Tensor], stated: list[torch.Tensor], terms: list[torch.Tensor]) -> str | None:
    """None, or which result is further from its stated value than some roundings of its terms."""
    for index, (result, value, size) in enumerate(zip(results, stated, terms, strict=True)):
        unit = TOLERANCES[result.dtype].unit
        bound = (3 * unit + 16 * EPS32) * size.double().abs() + unit / 16
        wrong = ~((result.double() - value.double()).abs() <= bound)
        if wrong.any():
            return f"result {index}: {int(wrong.sum())} of {wrong.numel()} elements are off"
    return None


def _wide(run: Run) -> dict[str, Any]:
    return {} if run.kernel == "moe_combine" else {"out_dtype": torch.float32}


def _sizes(kernel: Kernel, run: Run, arguments: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """The result for the operands' magnitudes, which bounds what rounding can do."""
    if run.kernel == "matmul_int4":
        x, w, scales, zeros = arguments
        dense = dequantize_int4(w, scales, zeros, run.shape.group, torch.float64)
        options = {name: _magnitude(value) for name, value in options.items() if name != "group"}
        few = RECORDS["matmul_small_m"].reference
        return few(x.double().abs(), dense.abs(), **options, compute=torch.float64, **_wide(run))
    magnitudes = tuple(map(_magnitude, arguments))
    return kernel.reference(*magnitudes, **options, compute=torch.float64, **_wide(run))


def _magnitude(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.int32:
        return value
    return value.float().abs().to(FP8) if value.dtype == FP8 else value.clamp(min=-127).abs()
