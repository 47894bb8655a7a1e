# SPDX-License-Identifier: Apache-2.0
"""Back ends: what runs a program on a device.

kernel, backend    the records: one kernel, one back end;  registry  back ends by name, those of others by entry point
table, select      the kernels of a target, and which of them runs a call;  lowering  IR to a program with these
workspace          what a kernel allocates, found out by asking it;  device  where tensors live
cpu, cuda          the two that nnfront brings
"""
