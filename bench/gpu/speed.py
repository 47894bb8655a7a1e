# SPDX-License-Identifier: Apache-2.0
"""How long a kernel takes on this device: replayed from a CUDA graph, with caches cold, against torch in the same run."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import stored
import torch
from cases import Run
from cost import cost
from nnfront_kernels import moe_routing, sampling_parts
from nnfront_kernels.common import Config, Plan
from right import RECORDS, operands
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_leaves

COPIES = 10  # launches in one graph, at least
REPEATS = 5
WARM = 3  # launches before anything is timed
SETS = 16  # of operands, at most
COLD = (
    200 << 20
)  # bytes that other launches touch before the same operands come again: four times the L2 cache of an H200


class Clock:
    """Times work in microseconds, on operands that are not in the caches: many sets of them in turn, or others are read in between."""

    def __init__(self, device: str) -> None:
        self.device = device
        if device != "cpu":
            # Read, not written: what is written has to leave the cache while the next kernel runs.
            self.buffer = torch.zeros(COLD // 4, device=device)
            self.sum = torch.zeros((), device=device)
            self.flush_us = self._graph_us([self._flush] * COPIES) / COPIES

    def _flush(self) -> None:
        torch.sum(self.buffer, 0, out=self.sum)

    def us(self, works: Sequence[Callable[[], Any]], nbytes: int = 0) -> float:
        """The median time of one of these, which do the same on operands of `nbytes` each. On the CPU: of one call, which says nothing."""
        if self.device == "cpu":
            start = time.perf_counter()
            works[0]()
            return (time.perf_counter() - start) * 1e6
        for work in (*works, *works[:1] * WARM):
            work()
        count = -(-max(COPIES, len(works)) // len(works)) * len(works)
        turns = [*works] * (count // len(works))
        if nbytes * len(works) >= COLD:
            return self._graph_us(turns) / count
        cold = [step for work in turns for step in (self._flush, work)]
        return max(self._graph_us(cold) / count - self.flush_us, 0.0)

    def _graph_us(self, works: Sequence[Callable[[], Any]]) -> float:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        times = []
        for _ in range(REPEATS + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[1:])


def bytes_of(values: Any) -> int:
    """The bytes of all tensors in arguments."""
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def ceilings(clock: Clock) -> dict[str, float]:
    """GB/s of a copy and of a sum over one buffer far larger than the caches."""
    size = 1 << 30 if clock.device != "cpu" else 1 << 16
    x = torch.randn(size // 4, device=clock.device)
    y = torch.empty_like(x)
    return {
        "copy_gb_s": 2 * size / clock.us([lambda: y.copy_(x)], COLD) / 1e3,
        "read_gb_s": size / clock.us([lambda: x.sum()], COLD) / 1e3,
    }


def baselines(run: Run, arguments: tuple[Any, ...]) -> list[tuple[str, Callable[[], Any]]]:
    """What torch does for the same result, or for the nearest thing that it has; the fastest of several counts."""
    shape = run.shape
    if run.kernel in ("matmul", "matmul_tma", "matmul_small_m"):
        x, w = arguments[:2]
        return [("torch", lambda: x @ w.T)]
    if run.kernel.startswith("matmul_fp8") and arguments[0].is_cuda:
        x, w, x_scales, w_scales = arguments
        scales = {"scale_a": x_scales, "scale_b": w_scales.T.contiguous()}
        return [("torch fp8", lambda: torch._scaled_mm(x, w.T, **scales, out_dtype=torch.bfloat16))]
    if run.kernel.startswith("matmul"):
        x = torch.randn(shape.m, shape.k, device=arguments[0].device, dtype=torch.bfloat16)
        w = torch.randn(shape.n, shape.k, device=arguments[0].device, dtype=torch.bfloat16)
        return [("torch bf16", lambda: x @ w.T)]
    if run.kernel == "grouped_matmul":
        slots = shape.tokens * shape.top_k
        experts = min(shape.experts, slots)
        w = arguments[1][:experts]
        x = torch.randn(experts, -(-slots // experts), shape.k, device=w.device, dtype=w.dtype)
        return [("torch bmm, even shares", lambda: torch.bmm(x, w.transpose(1, 2)))]
    if run.kernel.startswith("attention"):
        return _attention(run, arguments[0])
    return []


def _attention(run: Run, q: torch.Tensor) -> list[tuple[str, Callable[[], Any]]]:
    """torch's backends on dense keys and values in 16 bits: as many as a query of the kernel sees, without a window."""
    shape, decode = run.shape, run.kernel in ("attention_decode", "attention_latent")
    seq, total = (1, shape.longest) if decode else (shape.seq, shape.before + shape.seq)

    def dense(heads: int, length: int, size: int) -> torch.Tensor:
        return torch.randn(shape.batch, heads, length, size, device=q.device).to(q.dtype)

    query = dense(shape.heads, seq, shape.size)
    kv_heads = getattr(shape, "kv_heads", 1)
    k = dense(kv_heads, total, shape.size)
    v = dense(kv_heads, total, shape.value_size or shape.size)
    seen: dict[str, Any] = {"is_causal": not decode}
    if not decode and seq != total:
        seen = {"attn_mask": causal_lower_right(seq, total)}

    def by(backend: SDPBackend) -> Callable[[], Any]:
        def attend() -> torch.Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, k, v, **seen, enable_gqa=True)

        return attend

    # The CPU has one backend for all masks.
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if q.is_cuda else (SDPBackend.MATH,)
    return [(f"torch {backend.name.lower()}", by(backend)) for backend in backends]


def fastest(
    choices: Sequence[list[tuple[str, Callable[[], Any]]]], clock: Clock, nbytes: int
) -> tuple[str, float | None]:
    """The name and the time of the fastest; a backend that has no kernel for these operands raises one of two errors."""
    times: dict[str, float] = {}
    for same in zip(*choices, strict=True):
        with contextlib.suppress(RuntimeError, ValueError):
            times[same[0][0]] = clock.us([work for _, work in same], nbytes)
    return min(times.items(), key=lambda item: item[1], default=("", None))


def timed(run: Run, arch: str, clock: Clock, every_config: bool) -> list[dict[str, Any]]:
    """One row for the chosen config, and one for each other if asked."""
    kernel = RECORDS[run.kernel]
    sets = [operands(run, arch, clock.device)]
    nbytes = bytes_of(sets)
    if clock.device != "cpu":
        wanted = min(-(-COLD // max(nbytes, 1)), SETS)
        sets += [operands(run, arch, clock.device) for _ in range(wanted - 1)]
    chosen = kernel.choose(run.shape, run.dtype, arch)
    configs: list[Config] = [chosen]
    if every_config and run.kernel.startswith("matmul"):
        block_k = getattr(run.shape, "group", 0)
        configs += [
            c
            for c in kernel.configs[arch]
            if c.block_m >= chosen.block_m and (c.block_k == block_k or not block_k)
        ]
    if run.kernel in ("attention_decode", "attention_latent"):
        for arguments, _ in sets:
            stored.longest(run.shape, arguments)
    versus, versus_us = fastest([baselines(run, arguments) for arguments, _ in sets], clock, nbytes)

    def plans_of(arguments: Any, options: Any, config: Config) -> tuple[Plan, ...]:
        if run.kernel == "moe_routing":
            return moe_routing.launches(*arguments, **options, arch=arch).plans
        if run.kernel == "sampling_parts":
            return tuple(sampling_parts.launches(*arguments, **options, arch=arch, config=config))
        return (kernel.plan(*arguments, **options, arch=arch, config=config),)

    spent = cost(kernel, run.shape, *sets[0], plans_of(*sets[0], chosen))
    rows = []
    for config in dict.fromkeys(configs):

        def planned(arguments: Any, options: Any, config: Config = config) -> Callable[[], Any]:
            plans = plans_of(arguments, options, config)
            return lambda: [plan.launch() for plan in plans]

        time_us = clock.us([planned(*each) for each in sets], nbytes)
        rows.append(
            {
                "kernel": run.kernel,
                "dtype": run.dtype,
                "shape": asdict(run.shape),
                "config": asdict(config),
                "chosen": config == chosen,
                "us": time_us,
                "tflop_s": spent.flops / max(time_us, 1e-9) / 1e6,
                "gb_s": spent.bytes / max(time_us, 1e-9) / 1e3,
                "versus": versus,
                "versus_us": versus_us,
            }
        )
    return rows
