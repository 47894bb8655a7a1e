# SPDX-License-Identifier: Apache-2.0
"""Which of cuBLAS and the Triton kernels a dense product on a GPU goes to."""

from __future__ import annotations

import pytest

from nnfront.backends.cuda.linear import takes_cublas


@pytest.mark.parametrize(
    ("is_cuda", "rows", "has_end", "expected"),
    [
        (True, 65, False, True),
        (True, 64, False, False),  # the kernel that splits K
        (True, 65, True, False),  # the end is done in registers
        (False, 4096, False, False),  # the interpreter is to run the kernels
    ],
)
def test_cublas_takes_plain_products_of_many_rows(is_cuda, rows, has_end, expected):
    assert takes_cublas(is_cuda=is_cuda, rows=rows, has_end=has_end) is expected
