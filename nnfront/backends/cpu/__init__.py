# SPDX-License-Identifier: Apache-2.0
"""What runs on a CPU. Files of kernels have what each kernel is in a record beside it.

backend            the back end: its kernels in the order in which they are asked
linear, moe        linear layers and mixtures of experts;  low_rank  adapters of products
quantized_linear   times a quantised weight;  quantized_pieces  by pieces;  quantized_gemv  few rows, in C;  float8  to values
int8_linear        times one with activations in 8 bits;  embedding  rows of one
attention          through torch's flash attention;  qkv_attention  of a fused projection;  decode_attention  of one token, in C;  rope
recurrent          one token of what keeps a state;  einsum  heads with a matrix each;  rows  what routers do with scores
elementwise        what is computed on each element, moved, or seen under another shape, on the tape
norm               of rows, few of them in C;  activations  what fusions name;  host  what no op stands behind
tape               kernels in C that follow one another as one call, by how their records write them;  tape_builder  rows and places
in_c               a kernel in C as a function by itself;  tape_attention  how attention is written
extension          the kernels in C (`c/`), where they can run;  native  their types
"""
