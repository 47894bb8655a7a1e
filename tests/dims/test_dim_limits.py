# SPDX-License-Identifier: Apache-2.0
"""The canonical form multiplies out, so what it takes is bounded: beyond any use, and with an error in words."""

from __future__ import annotations

import math

import pytest

from nnfront import Dim
from nnfront.dims import bounded_work, equal, evaluate
from nnfront.dims.polynomial import MAX_DEGREE, MAX_TERMS
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


def test_a_degree_is_bounded() -> None:
    assert str(Dim("*".join(["n"] * MAX_DEGREE))).count("n") == MAX_DEGREE
    with pytest.raises(DimError, match=f"a dim expression has a degree of more than {MAX_DEGREE}"):
        Dim("*".join(["n"] * (MAX_DEGREE + 1)))


def test_divisions_inside_each_other_are_bounded() -> None:
    size, n, number = Dim("n"), Dim("n"), 7
    for i in range(50):
        size, number = (size + n) // (i + 3), (number + 7) // (i + 3)
        assert evaluate(size, {"n": 7}) == number
    with pytest.raises(DimError, match="more than 50 divisions, minima and maxima inside each other"):
        (size + n) // 53


def test_work_is_bounded_where_that_is_asked() -> None:
    text = "*".join(f"(a{i}+b{i})" for i in range(5))
    with bounded_work(100), pytest.raises(DimError, match=r"^the dims take too long to compute"):
        Dim(text)
    with bounded_work(10_000), bounded_work(1):  # the outermost bound counts
        assert str(Dim(text.replace("a", "c"))).count("+") == 31


def test_a_proof_that_is_not_found_soon_is_not_sought_further() -> None:
    left = "+".join(f"min({', '.join(f'a{i}_{j}' for j in range(8))})" for i in range(8))
    right = "+".join(f"min({', '.join(f'b{i}_{j}' for j in range(8))})" for i in range(8))
    assert equal(Dim(left), Dim(right)) is None


def test_what_fits_is_multiplied_out() -> None:
    size = Dim("(a+b+c)*(a+b+c)*(a+b+c)*(a+b+c)")
    assert str(size).count(" + ") == math.comb(6, 2) - 1


@pytest.mark.parametrize("function", ["min", "max"])
def test_functions_of_many_arguments_are_bounded(function: str) -> None:
    names = [f"n{i}" for i in range(65)]
    assert len(Dim(f"{function}({', '.join(names[:64])})").symbols) == 64
    with pytest.raises(DimError, match="expected at most 64 arguments"):
        Dim(f"{function}({', '.join(names)})")
