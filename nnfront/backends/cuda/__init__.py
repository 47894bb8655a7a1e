# SPDX-License-Identifier: Apache-2.0
"""What runs on a GPU, and how it gets there.

backend            the back end;  table  its kernels in the order in which they are asked
linear, attention, rowwise, sampling   launches of the kernels in `nnfront_kernels`, each with its record
workspace          how they are asked what they allocate;  upload  weights, pinned and overlapped
graphs             calls of few rows as captured graphs;  graph_safety  which can be;  graph_capture  by CUDA
ahead              kernels compiled ahead, without a GPU
"""
