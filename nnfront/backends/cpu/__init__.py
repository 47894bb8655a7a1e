# SPDX-License-Identifier: Apache-2.0
"""What runs on a CPU.

kernels              by name, but for attention and quantised weights;  attention  through torch's flash attention
few_rows             times a bfloat16 weight, in C or by torch
quantized_linear     times a quantised weight;  quantized_pieces  by pieces;  quantized_gemv  in C;  float8  to values
one_token            rope, cache and attention of one token, in C;  norms  of rows, few of them in C
sequence             kernels in C that follow one another as one call;  writers  how their calls are written
activations          what regions name;  workspace  what kernels hold while they run
extension            the kernels in C (`c/`), where they can run;  native  their types
"""
