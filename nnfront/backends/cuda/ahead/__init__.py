# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead of time, without a GPU.

enumerate_kernels, call_sizes  which kernels a program will launch
cubin, driver, launcher        compiled kernels, and launching them through the driver
"""
