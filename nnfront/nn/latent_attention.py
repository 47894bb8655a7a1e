# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention, absorbed: of a token one latent is kept, which is its key and its value for all heads."""

from __future__ import annotations

from nnfront.nn.cache import CacheLayer
from nnfront.nn.functional import op
from nnfront.nn.layers import Linear, RMSNorm
from nnfront.nn.module import Module
from nnfront.nn.rotary import Rotation
from nnfront.nn.tensor import Tensor


class LatentAttention(Module):
    """Attention whose keys and values are low-rank products of x.

    Keys are kv_b_proj's first part times the latent, and values its second part. Neither is made: the first part is multiplied to queries, the second
    to what is seen of latents (derived tensors). So a layer of the cache holds `kv_rank + rotated` numbers for a token: the latent, and features that positions turn.

    size: of what comes in and goes out. plain, rotated: features of a head of q without and with positions; value: features of its values. kv_rank: of the latent;
    q_rank: of q's, None for a q that is one product. interleaved: the pairs that are rotated are neighbours.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
    """

    def __init__(
        self,
        size: int,
        heads: int,
        *,
        plain: int,
        rotated: int,
        value: int,
        kv_rank: int,
        q_rank: int | None,
        bias: bool,
        scale: float,
        interleaved: bool,
    ) -> None:
        q = heads * (plain + rotated)
        if q_rank is None:
            self.q_proj = Linear(size, q, bias=False)
        else:
            self.q_a_proj = Linear(size, q_rank, bias)
            self.q_a_layernorm = RMSNorm(q_rank, -1, 1e-6, bias=False)
            self.q_b_proj = Linear(q_rank, q, bias=False)
        self.kv_a_proj_with_mqa = Linear(size, kv_rank + rotated, bias)
        self.kv_a_layernorm = RMSNorm(kv_rank, -1, 1e-6, bias=False)
        self.kv_b_proj = Linear(kv_rank, heads * (plain + value), bias=False)
        self.o_proj = Linear(heads * value, size, bias)
        by_head = op.reshape(self.kv_b_proj.weight, (heads, plain + value, kv_rank))
        self.key_weight, self.value_weight = op.split(by_head, [plain], 1)
        self.heads, self.plain, self.kv_rank, self.q_rank = heads, plain, kv_rank, q_rank
        self.scale, self.interleaved = scale, interleaved

    def _rotate(self, x: Tensor, rope: Rotation | None) -> Tensor:
        """Features at their positions; without `rope` as they are."""
        return x if rope is None else op.rope(x, *rope, interleaved=self.interleaved)

    def query(self, x: Tensor, rope: Rotation | None) -> Tensor:
        """[batch, seq, size] to what is multiplied with latents, [batch, seq, heads, kv_rank + rotated]."""
        q = self.q_proj(x) if self.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = op.reshape(q, (*q.shape[:-1], self.heads, q.shape[-1] // self.heads))
        plain, rotated = op.split(q, [self.plain], -1)
        absorbed = op.einsum("bshn,hnr->bshr", plain, self.key_weight)
        return op.concat([absorbed, self._rotate(rotated, rope)], -1)

    def latent(self, x: Tensor, rope: Rotation | None) -> Tensor:
        """[batch, seq, size] to what is kept, [batch, seq, 1, kv_rank + rotated]."""
        compressed = op.unsqueeze(self.kv_a_proj_with_mqa(x), 2)
        latent, rotated = op.split(compressed, [self.kv_rank], -1)
        return op.concat([self.kv_a_layernorm(latent), self._rotate(rotated, rope)], -1)

    def forward(self, x: Tensor, rope: Rotation | None, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, size] to the same."""
        q, latent = self.query(x, rope), self.latent(x, rope)
        seen = op.attention(q, latent, cache=cache, scale=self.scale, value_size=self.kv_rank)
        values = op.einsum("bshr,hvr->bshv", seen, self.value_weight)
        return self.o_proj(op.merge_heads(values))
