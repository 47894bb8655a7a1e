# SPDX-License-Identifier: Apache-2.0
"""GPU kernels in Triton. `KERNELS` lists the record of each; a kernel file stands alone and its docstring says what it does.

common.py     the records (Kernel, Config, Plan), limits of the GPUs, checks
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

from importlib import import_module

from nnfront_kernels.common import ARCHS, Config, Kernel, KernelError, Plan

_FILES = """
    matmul matmul_tma matmul_small_m matmul_int4 matmul_int8 matmul_fp8 unpack_weight quantize_fp8
    moe_routing grouped_matmul moe_combine rms_norm layer_norm softmax gated_activation add_low_rank sampling sampling_parts
    rope rope_angles rope_append attention_decode attention_latent attention_prefill causal_conv1d ssm_scan gated_delta_rule
    copy_rows
"""
KERNELS: tuple[Kernel, ...] = tuple(import_module(f"{__name__}.{file}").KERNEL for file in _FILES.split())

__all__ = ["ARCHS", "KERNELS", "Config", "Kernel", "KernelError", "Plan"]
