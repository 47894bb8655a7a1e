# SPDX-License-Identifier: Apache-2.0
"""The canonical form multiplies out, so what it takes is bounded: beyond any use, and with an error in words."""

from __future__ import annotations

import math

import pytest

from nnfront import Dim
from nnfront.dims.form import MAX_TERMS
from nnfront.errors import DimError


def test_a_product_of_sums_is_bounded() -> None:
    with pytest.raises(
        DimError, match=f"multiplies out to some [0-9]+ terms, {MAX_TERMS} are the most"
    ) as error:
        Dim("*".join(["(a+b+c+d+e+f+g+h)"] * 100))
    assert error.value.help == "give a part of it a name of its own"


def test_arithmetic_is_bounded_like_text() -> None:
    sums = [Dim(f"a{i} + b{i}") for i in range(40)]
    with pytest.raises(DimError, match="multiplies out to some"):
        math.prod(sums)


def test_sums_are_bounded() -> None:
    part = "*".join(f"(a{i}+b{i})" for i in range(9))
    other = "*".join(f"(c{i}+d{i})" for i in range(9))
    with pytest.raises(DimError, match="multiplies out to some"):
        Dim("+".join(f"{x}*{part}*{other}" for x in "xyz"))


def test_what_fits_is_multiplied_out() -> None:
    size = Dim("(a+b+c)*(a+b+c)*(a+b+c)*(a+b+c)")
    assert str(size).count(" + ") == math.comb(6, 2) - 1


@pytest.mark.parametrize("function", ["min", "max"])
def test_functions_of_many_arguments_are_bounded(function: str) -> None:
    names = [f"n{i}" for i in range(65)]
    assert len(Dim(f"{function}({', '.join(names[:64])})").symbols) == 64
    with pytest.raises(DimError, match="expected at most 64 arguments"):
        Dim(f"{function}({', '.join(names)})")
