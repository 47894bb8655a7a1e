# SPDX-License-Identifier: Apache-2.0
"""TVM's rotary embeddings. What makes expressions or functions in TIR, for `tensor_expr_op` and `tensor_ir_op`, is TVM's own, where it is
installed; what takes tensors says what to write instead."""

from __future__ import annotations

from typing import Any

from nnfront.compat.tvm.absent import absent_function, tvms

_TENSORS = "TVM's function emits TVM's operators"
_ROTARY = "nn.RotaryEmbedding(head_size, rope_parameters) of nnfront turns queries and keys, with all of these scalings"
llama_rope = absent_function("llama_rope", "*args, **kwargs", _TENSORS, _ROTARY)


def __getattr__(name: str) -> Any:
    return tvms("llm.position_embedding", name, _ROTARY)
