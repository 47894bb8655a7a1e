# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA to latents, whose first elements are the values: of a layer that stores them once, or of the tokens themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnfront.backends.cpu.attention import cached as by_torch
from nnfront.backends.cuda.attention import length_bucket, options_of, spread, why_not_bias, window_of
from nnfront.backends.cuda.kernel_package import asked, kernel_module
from nnfront.backends.kernel import Context, Kernel
from nnfront.ir import StateLayerType
from nnfront.lower import Run
from nnfront.state.layer import CacheLayer
from nnfront.state.lengths import SequenceLengths


def _accepts(run: Run, context: Context) -> str:
    """What the kernel's own `accepts` says: q [batch, seq, heads, size], k [batch, seq, 1, size]."""
    q_slot, k, v, cache, _, *bias = run.inputs
    value_size, q, layer = run.attrs.get("value_size"), context.tensor(q_slot), context.type(cache)
    if value_size is None or not context.is_none(v):
        return "values are no parts of keys"
    if not run.attrs.get("is_causal", True):
        return "it sees later tokens too"
    if reason := why_not_bias(context, q_slot, *bias):
        return reason
    heads, size = q.shape[2:]
    is_stored = isinstance(layer, StateLayerType)
    kept = layer.per_token[0] if isinstance(layer, StateLayerType) else context.tensor(k)
    dtype, groups = kept.dtype, kept.shape[0 if is_stored else 2]
    if not (isinstance(heads, int) and isinstance(size, int)):
        return "the number of heads is no constant"
    if dtype != q.dtype:
        return f"latents are {dtype}, q is {q.dtype}"
    if groups != 1:
        return f"there are {groups} heads of keys"
    shape = kernel_module("attention_latent").LatentShape(1, heads, value_size, size - value_size, 1)
    return asked("attention_latent", shape, q.dtype, context)


def _latent_attention(run: Run) -> Callable[..., Any]:
    append, kernel = map(kernel_module, ("rope_append", "attention_latent"))
    general, value_size = by_torch(run), run.attrs["value_size"]
    options = {**options_of(run), "value_size": value_size}
    own_window = run.attrs.get("window")

    def with_cache(
        q: torch.Tensor,
        k: torch.Tensor | None,
        layer: CacheLayer,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        earlier = None if k is None else layer.lengths.counts()
        stored = layer.storage if k is None else layer.reserve(q.shape[1])
        latents, now = stored.keys, layer.lengths
        there = {"pages": stored.pages, "base": stored.base}
        if k is not None:
            halves = (part for x in (k, latents) for part in (x[..., :value_size], x[..., value_size:]))
            k_values, k_rest, values, rest = halves
            append.launch(q[..., :value_size], k_values, k_rest, None, None, earlier, values, rest, **there)
        y: torch.Tensor = kernel.launch(
            q,
            latents,
            now.counts(),
            **there,
            longest=min(length_bucket(now.longest), layer.max_seq),
            window=window_of(own_window, layer.window),
            sinks=sinks,
            bias=bias,
            **options,
        )
        return y

    def triton_latent_attention(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: None,
        layer: CacheLayer | None,
        sinks: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> Any:
        q = q if q.stride(-1) == 1 else q.contiguous()
        if layer is None:
            assert k is not None
            counts = SequenceLengths((q.shape[1],) * len(q), q.device).counts()
            latents = k.transpose(1, 2)
            return kernel.launch(
                q, latents, counts, window=own_window, sinks=sinks, bias=spread(bias, q), **options
            )
        if layer.storage.scales:  # in 8 bits
            return general(q, k, v, layer, sinks, bias)
        return with_cache(q, k, layer, sinks, spread(bias, q)), layer

    return triton_latent_attention


KERNELS = (
    Kernel(
        "triton_latent_attention",
        "attention",
        _latent_attention,
        "each latent read once, for keys and values of all heads",
        _accepts,
    ),
)
