# SPDX-License-Identifier: Apache-2.0
"""TVM's rotary embeddings, which are functions over TIR: their use says what to write instead."""

from nnfront.compat.tvm.absent import TE, absent_function

__all__ = [
    "llama4_rope_with_position_map",
    "llama_rope",
    "llama_rope_with_position_map",
    "switch_rope_freq_func",
]

_ROTARY = "nn.RotaryEmbedding(head_size, rope_parameters) of nnfront turns queries and keys, with all of these scalings"
llama_rope = absent_function("llama_rope", "*args, **kwargs", TE, _ROTARY)
llama_rope_with_position_map = absent_function("llama_rope_with_position_map", "*args, **kwargs", TE, _ROTARY)
llama4_rope_with_position_map = absent_function(
    "llama4_rope_with_position_map", "*args, **kwargs", TE, _ROTARY
)
switch_rope_freq_func = absent_function("switch_rope_freq_func", "rope_scaling", TE, _ROTARY)
