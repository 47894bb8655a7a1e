# SPDX-License-Identifier: Apache-2.0
"""Memory: what a program holds and when, how much that is, and how much there is.

layout            shapes, strides and bytes of a value;  concrete_sizes  numbers for dims
allocations       what an instruction allocates;  liveness  when values are alive
plan, report      the peak of a call, and of all that a program holds;  free_memory  what the device has left
"""
