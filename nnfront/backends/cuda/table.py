# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA, in the order in which they are asked."""

from dataclasses import replace
from functools import partial

from nnfront.backends.cpu import attention as torch_attention
from nnfront.backends.cpu import host, moe, rope, state
from nnfront.backends.cpu.in_c import without_c
from nnfront.backends.cuda import (
    attention,
    experts,
    last_token,
    latent_attention,
    linear,
    low_rank,
    recurrent,
    rope_angles,
    rowwise,
)

ON_DEVICE = (
    *linear.KERNELS,
    *low_rank.KERNELS,
    *experts.KERNELS,
    *attention.KERNELS,
    *latent_attention.KERNELS,
    *rope_angles.KERNELS,
    *rowwise.KERNELS,
    *recurrent.KERNELS,
)
"""Kernels that launch those of `nnfront_kernels`."""

_BY_TORCH = partial(moe.sorted_by_expert, moe.by_torch, moe.gated_by_torch)
_EXPERTS = (replace(kernel, bind=_BY_TORCH) for kernel in moe.KERNELS)
_TORCHS = (
    *_EXPERTS,
    *torch_attention.KERNELS,
    *rope.KERNELS,
    *state.KERNELS,
    *last_token.KERNELS,
    *host.KERNELS,
)
KERNELS = (*ON_DEVICE, *map(without_c, _TORCHS))
