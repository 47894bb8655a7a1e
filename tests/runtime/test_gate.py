# SPDX-License-Identifier: Apache-2.0
"""The gate behind a product, by the kernel in C, against float64."""

import pytest
import torch
from few_of import few_of
from torch.nn import functional as F

from nnfront.backends.cpu.activations import GATES
from nnfront.backends.cpu.extension import NATIVE

pytestmark = [
    pytest.mark.usefixtures("instructions"),
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
]
GUARD = 64


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("size", few_of([17, 1, 15, 16, 1023, 1024, 1025, 7000]))
@pytest.mark.parametrize("name", GATES)
def test_a_gate_of_what_was_multiplied_agrees_with_float64(name, size, rows):
    both = (4 * torch.randn(rows, 2 * size)).bfloat16()
    y = torch.full((rows * size + 2 * GUARD,), torch.nan).bfloat16()
    NATIVE.gate(rows, size, GATES.index(name), 2, both, y[GUARD:])
    first, second = both.double().chunk(2, -1)
    kinds = {
        "silu": F.silu,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    exact = kinds[name](first) * second
    error = (y[GUARD:-GUARD].view(rows, size).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + first.abs() * second.abs() * 2**-20).all()
    assert y[:GUARD].isnan().all()
    assert y[-GUARD:].isnan().all()
