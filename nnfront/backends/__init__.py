# SPDX-License-Identifier: Apache-2.0
"""Back ends: what runs a program on a device.

select     which kernel runs a call;  tables, kernels  the kernels of all targets by name;  device  where tensors live
cpu, cuda  the two that nnfront brings
"""
