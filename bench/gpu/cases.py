# SPDX-License-Identifier: Apache-2.0
"""What is run on the GPU: edge cases of every kernel, and full sizes from models, with and without quantised weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kernel_cases import EPILOGUES, LAYOUTS, MATMULS, QUANTIZED, SPLIT, Case
from nnfront_kernels import KERNELS, Kernel
from nnfront_kernels.add_low_rank import LowRankShape
from nnfront_kernels.attention_decode import DecodeShape
from nnfront_kernels.attention_latent import LatentShape
from nnfront_kernels.attention_prefill import PrefillShape
from nnfront_kernels.causal_conv1d import ConvShape
from nnfront_kernels.copy_rows import CopyShape
from nnfront_kernels.gated_activation import GatedShape
from nnfront_kernels.gated_delta_rule import DeltaShape
from nnfront_kernels.grouped_matmul import GroupedShape
from nnfront_kernels.moe_combine import CombineShape
from nnfront_kernels.moe_routing import RoutingShape
from nnfront_kernels.quantize_fp8 import QuantizeShape
from nnfront_kernels.rms_norm import NormShape
from nnfront_kernels.rope import RopeShape
from nnfront_kernels.rope_angles import AnglesShape
from nnfront_kernels.rope_append import AppendShape
from nnfront_kernels.sampling import SampleShape
from nnfront_kernels.softmax import SoftmaxShape
from nnfront_kernels.ssm_scan import ScanShape
from nnfront_kernels.tiles import MatmulShape
from nnfront_kernels.unpack_weight import UnpackShape
from table import shown


@dataclass(frozen=True)
class Run:
    """One kernel on one shape, at full size."""

    kernel: str
    shape: Any
    dtype: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} {shown(vars(self.shape))}"


# N, K of Llama-3.1-8B: attention output, gate and up, down, and head; and one square.
LLAMA = ((4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
SQUARE = (8192, 8192)
RECURRENT = {
    "causal_conv1d": ConvShape(1, 1, 8192),
    "ssm_scan": ScanShape(1, 1, 80, 1, 64, 128),
    "gated_delta_rule": DeltaShape(1, 1, 16, 32, 128, 128),
}
# Qwen3-30B-A3B: 128 experts, 8 of them for a token, 768 wide, in a stream of 2048.
EXPERTS = {"top_k": 8, "experts": 128}


def full(arch: str) -> list[Run]:
    """The runs of every kernel that accepts them on an arch."""
    runs = []
    for kernel in KERNELS:
        dtype = "bfloat16" if "bfloat16" in kernel.dtypes else kernel.dtypes[0]
        runs += [Run(kernel.name, shape, dtype) for shape in _shapes(kernel)]
        if kernel.name in ("matmul", "matmul_tma"):
            runs.append(Run(kernel.name, MatmulShape(4096, 4096, 4096), "float16"))
    records = {kernel.name: kernel for kernel in KERNELS}
    return [run for run in runs if records[run.kernel].accepts(run.shape, run.dtype, arch) is None]


def _shapes(kernel: Kernel) -> list[Any]:
    name = kernel.name
    if name in ("matmul", "matmul_tma"):
        return [
            *(MatmulShape(m, n, k) for m in (512, 4096) for n, k in LLAMA[:3]),
            MatmulShape(512, *LLAMA[1], gated=True),
            MatmulShape(8192, *SQUARE),
        ]
    if name == "matmul_small_m":
        return [
            MatmulShape(m, n, k, norm=norm)
            for m in (1, 16, 64)
            for n, k in LLAMA
            for norm in ((False, True) if m <= 16 and (n, k) in LLAMA[1::2] else (False,))
        ] + [MatmulShape(16, *LLAMA[1], gated=True, norm=norm) for norm in (False, True)]
    if kernel in MATMULS:
        shapes = [
            MatmulShape(m, n, k, group=group)
            for m in (1, 16, 64, 4096)
            for n, k in LLAMA[1:3]
            for group in kernel.groups[:2]
        ]
        of_layers = MatmulShape(16, *LLAMA[1], group=kernel.groups[-1])
        ways: tuple[dict[str, bool], ...] = ({"gated": True}, {"norm": True}, {"gated": True, "norm": True})
        ways += ({"zero_points": True},) if name == "matmul_int4" else ()
        return shapes + [replace(of_layers, **way) for way in ways]
    tokens = (1, 32, 4096)
    if name == "grouped_matmul":
        return [
            shape
            for t in tokens
            for shape in (
                GroupedShape(t, n=1536, k=2048, gated=True, **EXPERTS),
                GroupedShape(t, n=2048, k=768, gather=False, **EXPERTS),
            )
        ]
    if name == "moe_routing":
        return [RoutingShape(t, **EXPERTS) for t in tokens]
    if name == "moe_combine":
        return [CombineShape(t, 8, 2048) for t in tokens]
    if name in ("rms_norm", "layer_norm"):
        return [NormShape(r, s, residual=s > 128) for r, s in ((1, 4096), (4096, 8192), (131072, 128))]
    if name == "rope":
        plain = [RopeShape(b, t, 32, 8, 128, 64) for b, t in ((64, 1), (2, 2048))]
        return [*plain, replace(plain[0], interleaved=True)]
    if name == "rope_angles":
        return [AnglesShape(b, t, 64) for b, t in ((1, 1), (64, 1), (2, 2048))]
    if name == "copy_rows":  # tokens of 32 heads, scales, states of Mamba 2.8B
        return [
            CopyShape(r, w, writes)
            for r, w in ((32768, 128), (32768, 1), (4, 81920))
            for writes in (False, True)
        ]
    if name == "softmax":
        return [SoftmaxShape(r, s) for r, s in ((1, 128256), (4096, 4096), (131072, 128))]
    if name in ("sampling", "sampling_parts"):
        return [
            SampleShape(r, 128256, greedy=g, filtered=f, penalty=f)
            for r in (1, 64)
            for g, f in ((True, False), (False, False), (False, True))
        ]
    if name == "add_low_rank":
        return [LowRankShape(r, 4096, 4096, rank) for r, rank in ((1, 16), (32, 16), (64, 64))]
    if name == "gated_activation":
        return [GatedShape(r, 14336) for r in (1, 64, 4096)]
    if name == "rope_append":
        return [
            AppendShape(b, t, 32, 8, 128, 64, page=p, fp8=narrow)
            for b, t, p, narrow in ((64, 1, 64, False), (64, 1, 0, True), (2, 2048, 0, False))
        ] + [AppendShape(64, 1, 32, 8, 128, 64, interleaved=True)]
    if name == "attention_decode":
        contexts = ((32, 8192, 64), (64, 512, 0), (1, 8192, 0), (1, 32768, 0))
        return [
            *(DecodeShape(b, 32, 8, 128, n, page=p) for b, n, p in contexts),
            *(DecodeShape(b, 32, 8, 128, n, page=p, fp8=True) for b, n, p in contexts[::3]),
            *(DecodeShape(b, 32, 8, 128, n, page=p, new=True) for b, n, p in contexts[:2]),
            DecodeShape(32, 64, 8, 64, 8192, page=16, window=1024),
        ]
    if name in RECURRENT:  # of Mamba-2 2.7B and Qwen3-Next
        rates = [replace(RECURRENT[name], channels=True)] if name == "gated_delta_rule" else []
        return [replace(RECURRENT[name], batch=b, seq=t) for b, t in ((1, 1), (64, 1), (1, 2048))] + rates
    if name == "attention_latent":
        # DeepSeek-V3 and V2-Lite
        return [
            LatentShape(b, h, 512, 64, n, page=p) for b, h, n, p in ((32, 128, 8192, 64), (1, 16, 32768, 0))
        ]
    if name == "attention_prefill":
        return [
            PrefillShape(1, 1024, 32, 8, 128),
            PrefillShape(2, 512, 32, 8, 128, before=1536, page=64),
            PrefillShape(2, 512, 32, 8, 128, before=1536, page=64, fp8=True),
            PrefillShape(1, 2048, 16, 16, 192, value_size=128),
        ]
    if name == "unpack_weight":
        plain = [UnpackShape(28672, 4096, group, bits) for group, bits in ((128, 4), (32, 4), (0, 8))]
        return [*plain, replace(plain[0], zero_points=True)]
    assert name == "quantize_fp8", name
    norms = [QuantizeShape(m, 4096, norm=True) for m in (1, 64)]
    return [QuantizeShape(m, 4096) for m in (16, 4096)] + norms


def small(run: Run, is_half: bool) -> Run:
    """The same run with small sizes; in float16 for the interpreter, which knows no bfloat16."""
    sizes = {
        "m": 15 if getattr(run.shape, "norm", False) else 17,
        "tokens": 4,
        "n": 64,
        "k": 128,
        "top_k": 2,
        "experts": 4,
        "width": min(64, vars(run.shape).get("width", 0)),  # of a convolution it is a few taps
        "vocab": 100,
        "rows": 2 if run.kernel == "sampling_parts" else 9,  # each is 32 blocks
        "size": 64,
        "pairs": 24,
        "batch": 3,
        "heads": 4,
        "kv_heads": 2,
        "longest": 300,
        "before": 60,
        "window": 100,
        "seq": 1 if getattr(run.shape, "channels", None) is True else 20,
        "channels": 40,
        "groups": 2,
        "states": 24,
        "key_size": 40,
        "rank": 20,
    }
    told = {name: value for name, value in vars(run.shape).items() if value and value is not True}
    shape = replace(run.shape, **{name: size for name, size in sizes.items() if name in told})
    return Run(run.kernel, shape, "float16" if is_half and run.dtype == "bfloat16" else run.dtype)


def edges(names: list[str]) -> list[tuple[str, Case]]:
    """Odd sizes, epilogues, layouts and configs of the matmuls, in every dtype that a kernel has."""
    sizes = ((1, 1, 1), (2, 63, 17), (15, 129, 64), (17, 16, 257), (64, 257, 15), (65, 127, 128), (129, 65, 63), (257, 128, 129))  # fmt: skip
    made = []
    for kernel in (kernel for kernel in MATMULS if kernel.name in names):
        for index, (m, n, k) in enumerate(sizes):
            facts: dict[str, Any] = {}
            if kernel.name in QUANTIZED:
                group = kernel.groups[index % len(kernel.groups)]
                k = max(group, 16) * (1 + index % 4)
                facts = {"group": group, "zero_points": kernel.name == "matmul_int4" and index % 2 == 1}
            facts |= EPILOGUES[index % 7] | LAYOUTS[index % 5]
            rows = min(m, SPLIT.get(kernel.name, m))
            dtype = kernel.dtypes[index % len(kernel.dtypes)]
            made.append((kernel.name, Case(rows, n, k, dtype=dtype, config=index, **facts)))
    return made
