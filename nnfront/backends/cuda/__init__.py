# SPDX-License-Identifier: Apache-2.0
"""What runs on a GPU, and how it gets there.

products, attention, rows, sampling   launches of the kernels in `nnfront_kernels`
workspace     what they hold while they run
upload        weights, pinned and overlapped
graphs, recordable, recorder          calls of few rows as recorded graphs
rehearse, call_sizes                  which kernels a program will launch, found out without a GPU
cubin, driver, launcher               kernels that were compiled ahead, and launching them
"""
