# SPDX-License-Identifier: Apache-2.0
"""TVM's paged key/value cache as an opaque value: each of its methods calls an external function under TVM's name for it.

`nnfront.register_extern` gives those functions where the model runs. `spec.Cache` and `op.attention` need none, and are faster.
"""

from __future__ import annotations

import enum
from typing import Any

from nnfront.compat.tvm.absent import LAMBDA, tvms
from nnfront.dims import Size
from nnfront.nn.functional import op
from nnfront.nn.opaque import Object
from nnfront.nn.tensor import Tensor

__all__ = ["AttnKind", "PagedKVCache", "RopeMode"]


class AttnKind(enum.IntEnum):
    """What the layers of a cache hold: keys and values of heads, latent ones, or those of a window."""

    MHA = 0
    MLA = 1
    MHA_SLIDING = 3


class RopeMode(enum.IntEnum):
    """Where rotary embeddings are applied: nowhere, to keys before they are stored, or in attention."""

    NONE = 0
    NORMAL = 1
    INLINE = 2


class PagedKVCache(Object):
    """A cache that external functions own. Queries are [batch, seq, heads, head_size]; so are keys and values, of their own heads.

    The functions get the cache, the layer and the scale, then the tensors with batch and seq as one axis.
    """

    def attention_with_fused_qkv(
        self, layer_id: int, qkv: Tensor, num_qo_heads: int, sm_scale: float
    ) -> Tensor:
        """Append the keys and values of `qkv` [batch, seq, query + key + value heads, head_size], and attend."""
        out = (num_qo_heads, qkv.shape[-1])
        return self._attend("attention_with_fused_qkv", layer_id, sm_scale, [qkv], out)

    def self_attention(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend among new tokens alone: the result and the log of the sum of exponentials, float32 [batch, seq, heads]."""
        return self._attend_with_lse("self_attention", layer_id, sm_scale, [q, k, v], v.shape[-1])

    def cross_attention(
        self, layer_id: int, q: Tensor, v_head_dim: int, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend to what is in the cache; returns what `self_attention` does."""
        return self._attend_with_lse("cross_attention", layer_id, sm_scale, [q], v_head_dim)

    def attention_with_shared_kv(
        self, source_layer_id: int, q: Tensor, current_k: Tensor, current_v: Tensor, sm_scale: float
    ) -> Tensor:
        """Attend to what another layer has appended, in this call too; appends nothing."""
        tensors = [q, current_k, current_v]
        out = (q.shape[2], current_v.shape[-1])
        return self._attend("attention_with_shared_kv", source_layer_id, sm_scale, tensors, out)

    def append_mla_kv(self, layer_id: int, kv: Tensor) -> PagedKVCache:
        """Append latent keys and values [batch, seq, 1, size]; the cache afterwards."""
        b, s, _, size = kv.shape
        args = [self, layer_id, op.reshape(kv, (b * s, size))]
        appended: PagedKVCache = op.extern(_named("append_mla_kv"), args, type(self))
        return appended

    def merge_attn_output_inplace(
        self, o_self_attn: Tensor, lse_self_attn: Tensor, o_cross_attn: Tensor, lse_cross_attn: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Join two results of attention by their log-sums."""
        shapes = o_self_attn.shape, lse_self_attn.shape
        tensors = [_flat(t) for t in (o_self_attn, lse_self_attn, o_cross_attn, lse_cross_attn)]
        out = tuple(Tensor.placeholder(t.shape, t.dtype) for t in tensors[:2])
        merged = op.extern(_named("merge_attn_output_inplace"), [self, *tensors], out)
        o, lse = (op.reshape(t, shape) for t, shape in zip(merged, shapes, strict=True))
        return o, lse

    def get_query_positions(self, total_length: Size) -> Tensor:
        """The position of each new token in its sequence: int32 [total_length]."""
        out = Tensor.placeholder((total_length,), "int32")
        positions: Tensor = op.extern(_named("get_query_positions"), [self], out)
        return positions

    def _attend(
        self, name: str, layer: int, scale: float, tensors: list[Tensor], out: tuple[Size, ...]
    ) -> Tensor:
        b, s = tensors[0].shape[:2]
        args = [self, layer, scale, *map(_flat, tensors)]
        result = op.extern(_named(name), args, Tensor.placeholder((b * s, *out), tensors[0].dtype))
        attended: Tensor = op.reshape(result, (b, s, *out))
        return attended

    def _attend_with_lse(
        self, name: str, layer: int, scale: float, tensors: list[Tensor], size: Any
    ) -> tuple[Tensor, Tensor]:
        b, s, heads = tensors[0].shape[:3]
        args = [self, layer, scale, *map(_flat, tensors)]
        out = (
            Tensor.placeholder((b * s, heads, size), tensors[0].dtype),
            Tensor.placeholder((b * s, heads), "float32"),
        )
        o, lse = op.extern(_named(name), args, out)
        return op.reshape(o, (b, s, heads, size)), op.reshape(lse, (b, s, heads))


def __getattr__(name: str) -> Any:
    """Attention in TIR, of which TVM's own caches are made."""
    return tvms("llm.kv_cache", name, LAMBDA)


def _named(method: str) -> str:
    return f"vm.builtin.attention_kv_cache_{method}"


def _flat(x: Tensor) -> Tensor:
    flat: Tensor = op.reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]))
    return flat
