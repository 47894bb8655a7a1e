# SPDX-License-Identifier: Apache-2.0
"""What runs on a CPU. Files of kernels have what each kernel is in a record beside it.

backend            the back end: its kernels in the order in which they are asked
linear, moe        linear layers and mixtures of experts;  gemv  few rows times a bfloat16 weight, in C or by torch
quantized_linear   times a quantised weight;  quantized_pieces  by pieces;  quantized_gemv  few rows, in C;  float8  to values
attention          through torch's flash attention;  qkv_attention  of a fused projection;  decode_attention  of one token, in C;  cross_attention  to what is stored;  rope
recurrent          one token of what keeps a state, in C
norm               of rows, few of them in C;  activations  what fusions name;  host  what no op stands behind
tape               kernels in C that follow one another as one call;  tape_rows, tape_recurrent, tape_builder  how their calls are written
extension          the kernels in C (`c/`), where they can run;  native  their types
"""
