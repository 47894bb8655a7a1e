# SPDX-License-Identifier: Apache-2.0
"""What runs on a GPU, and how it gets there.

backend            the back end;  table  its kernels in the order in which they are asked
linear, experts, attention, rowwise, low_rank, sampling   launches of the kernels in `nnfront_kernels`, each with its record
row_norm           products with the norm of their rows before them;  many_rows  products by how many rows there are
workspace          how they are asked what they allocate;  upload  weights, pinned and overlapped
graphs             calls of few rows as captured graphs;  captured_call  what one reads and writes;  graph_capture  by CUDA
graph_safety       which can be;  independent_rows  which may be given rows that are nobody's
ahead              kernels compiled ahead, without a GPU
"""
