# SPDX-License-Identifier: Apache-2.0
"""GPU kernels in Triton. `KERNELS` lists the record of each; a kernel file stands alone and its docstring says what it does.

common.py     the records (Kernel, Config, Cost, Plan), limits of the GPUs, checks
tiles.py      how a tile is chosen;  spilled.py  what a version of Triton spills
walk.py       in which order tiles are computed;  epilogue.py  what happens to a finished one
split_k.py    how blocks share a tile;  row_norm.py  a norm of rows inside of a product
dependent.py  launches that begin before those before them have ended
quantized.py  how weights in 4 and 8 bits are stored;  nibbles.py  how those of 4 are unpacked
cache.py      where keys and values are stored;  attention.py  one step over a block of them;
attention_append.py  a new token, rotated and stored;  decode_shape.py  sizes of one query;
attention_fp8.py  the same step in 8 bits;  attention_parts.py  how blocks share a sequence;  prefill_shape.py  sizes of many queries
recurrence.py what recurrences share: checks, and what tokens of a chunk leave of one another;
philox.py     random numbers by seed, step and token;  token_limits.py  what top-k, top-p and min-p keep
ahead.py      compile for a GPU that is not here, and say all that a launch of the machine code takes
inspect.py    compile for a GPU that is not there and read the machine code
the others    one kernel each; a mixture of experts is moe_routing, grouped_matmul twice, moe_combine
"""

from __future__ import annotations

from nnfront_kernels import (
    add_low_rank,
    attention_decode,
    attention_latent,
    attention_prefill,
    causal_conv1d,
    gated_activation,
    gated_delta_rule,
    grouped_matmul,
    layer_norm,
    matmul,
    matmul_fp8,
    matmul_fp8_tma,
    matmul_int4,
    matmul_int8,
    matmul_small_m,
    matmul_tma,
    moe_combine,
    moe_routing,
    quantize_fp8,
    rms_norm,
    rope,
    rope_append,
    sampling,
    sampling_parts,
    softmax,
    ssm_scan,
)
from nnfront_kernels.common import ARCHS, Config, Cost, Kernel, KernelError, Plan

KERNELS: tuple[Kernel, ...] = (
    matmul.KERNEL,
    matmul_tma.KERNEL,
    matmul_small_m.KERNEL,
    matmul_int4.KERNEL,
    matmul_int8.KERNEL,
    matmul_fp8.KERNEL,
    matmul_fp8_tma.KERNEL,
    quantize_fp8.KERNEL,
    moe_routing.KERNEL,
    grouped_matmul.KERNEL,
    moe_combine.KERNEL,
    rms_norm.KERNEL,
    layer_norm.KERNEL,
    softmax.KERNEL,
    gated_activation.KERNEL,
    add_low_rank.KERNEL,
    sampling.KERNEL,
    sampling_parts.KERNEL,
    rope.KERNEL,
    rope_append.KERNEL,
    attention_decode.KERNEL,
    attention_latent.KERNEL,
    attention_prefill.KERNEL,
    causal_conv1d.KERNEL,
    ssm_scan.KERNEL,
    gated_delta_rule.KERNEL,
)

__all__ = ["ARCHS", "KERNELS", "Config", "Cost", "Kernel", "KernelError", "Plan"]
