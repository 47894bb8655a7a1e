# SPDX-License-Identifier: Apache-2.0
"""What runs on a CPU.

kernels    by name, but for attention;  attention  through torch's flash attention
few_rows   times a bfloat16 weight, in C or by torch;  float8  products with weights in float8
workspace  what kernels hold while they run
"""
