# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels whose machine code is a text."""

from __future__ import annotations

from collections.abc import Mapping

from nnfront.backends.cuda.ahead.cubin import CompiledKernels, Cubin, Parameter, TensorMap

PARAMETERS = (Parameter("x", "pointer"), Parameter("y", "descriptor", TensorMap(9, 2, 3, (64, 64))))


def ahead_of(*keys: str, notes: Mapping[str, str]) -> CompiledKernels:
    cubins = tuple(
        Cubin(
            key,
            "kernel",
            "sm_90",
            "3.9.0",
            "13.4",
            128,
            1,
            49_152,
            0,
            False,
            False,
            PARAMETERS,
            f"kernel {key}",
            f"code of {key}".encode(),
        )
        for key in keys
    )
    return CompiledKernels("sm_90", cubins, notes)
