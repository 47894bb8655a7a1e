# SPDX-License-Identifier: Apache-2.0
"""Parts whose result a gate weighs, which is computed of the same input."""

from __future__ import annotations

from nnfront.nn.activations import ACTIVATIONS
from nnfront.nn.cache import CacheLayer
from nnfront.nn.functional import op
from nnfront.nn.layers import Linear, RMSNorm
from nnfront.nn.module import Module
from nnfront.nn.parameter import Parameter
from nnfront.nn.rotary import Rotation
from nnfront.nn.tensor import Tensor


class GatedRMSNorm(Module):
    """The root mean square norm of each of some groups of features, times weight, and a gate: of what comes in, or of what comes out.

    weight [size]; half types are computed in float32. activation: of the gate, a name in `nnfront.ACTIVATIONS`.
    """

    def __init__(
        self, size: int, epsilon: float, groups: int = 1, *, gate_first: bool = True, activation: str = "silu"
    ) -> None:
        self.weight = Parameter([size])
        self.epsilon, self.groups, self.gate_first = epsilon, groups, gate_first
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., size] and [..., size] to the same."""
        wide, factor = op.astype(x, "float32"), self.activation(op.astype(gate, "float32"))
        wide = wide * factor if self.gate_first else wide
        if self.groups > 1:
            apart = op.reshape(wide, (*x.shape[:-1], self.groups, x.shape[-1] // self.groups))
            wide = op.reshape(op.rms_norm(apart, None, -1, self.epsilon), x.shape) * self.weight
        else:
            wide = self.normed(wide)
        return op.astype(wide if self.gate_first else wide * factor, x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        """All features as one group, in float32: [..., size] to the same."""
        return op.rms_norm(x, self.weight, -1, self.epsilon)


class GatedAttention(Module):
    """Grouped-query attention with normalised queries and keys, and a gate for each feature of each head, which q_proj gives behind the head's query.

    Norms multiply by 1 + weight. Checkpoint names: q_proj, k_proj, v_proj, o_proj, q_norm, k_norm.
    """

    def __init__(
        self, size: int, heads: int, kv_heads: int, head_size: int, epsilon: float, bias: bool = False
    ) -> None:
        inner, kv = heads * head_size, kv_heads * head_size
        self.q_proj = Linear(size, 2 * inner, bias)
        self.k_proj, self.v_proj = Linear(size, kv, bias), Linear(size, kv, bias)
        self.o_proj = Linear(inner, size, bias)
        self.q_norm = RMSNorm(head_size, -1, epsilon, bias=False, offset=1.0)
        self.k_norm = RMSNorm(head_size, -1, epsilon, bias=False, offset=1.0)
        queries, gates = (
            op.reshape(part, (inner, size))
            for part in op.split(op.reshape(self.q_proj.weight, (heads, 2, head_size, size)), 2, 1)
        )
        self.weight = op.concat([queries, self.k_proj.weight, self.v_proj.weight, gates], 0)
        self.bias = None
        if bias:
            by_head = op.split(op.reshape(self.q_proj.bias, (heads, 2, head_size)), 2, 1)
            of_queries, of_gates = (op.reshape(part, (inner,)) for part in by_head)
            self.bias = op.concat([of_queries, self.k_proj.bias, self.v_proj.bias, of_gates], 0)
        self.head_size, self.splits = head_size, [inner, inner + kv, inner + 2 * kv]

    def forward(self, x: Tensor, rope: Rotation, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, size] to the same."""
        *parts, gate = op.split(op.linear(x, self.weight, self.bias), self.splits, -1)
        q, k, v = (op.split_heads(part, self.head_size) for part in parts)
        q, k = op.rope(self.q_norm(q), *rope), op.rope(self.k_norm(k), *rope)
        y = op.merge_heads(op.attention(q, k, v, cache=cache))
        return self.o_proj(y * op.sigmoid(gate))
