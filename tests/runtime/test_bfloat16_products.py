# SPDX-License-Identifier: Apache-2.0
"""Products of rows with a bfloat16 weight, by the kernels in C, against float64."""

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from nnfront.backends.cpu import extension, linear
from nnfront.backends.cpu.activations import GATES
from nnfront.backends.cpu.in_c import in_c
from nnfront.lower import Run, Structure

pytestmark = [
    pytest.mark.usefixtures("instructions"),
    pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C"),
]
NAMES = {"silu": {"activation": "silu"}, "relu": {"activation": "relu"}, "gelu": {"activation": "gelu"}}
NAMES |= {"gelu_tanh": {"activation": "gelu", "approximate": "tanh"}}


def left_to_others(run: Run):
    """What stands for the other way."""
    return lambda *operands: None


class InC:
    """The kernels in C, through what writes their calls: None for operands that they are not for."""

    def __init__(self, *, with_tiles: bool) -> None:
        self.with_tiles = with_tiles

    def run(self, kernel, attrs, *operands: torch.Tensor | None) -> torch.Tensor | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "TILES", self.with_tiles)
            return in_c(kernel.write, left_to_others)(Run("", kernel.op, (), Structure(0), attrs))(*operands)

    def multiply(self, x, weight, bias=None, added=None, dtype=torch.bfloat16, activation: str | None = None):
        attrs = {"dtype": str(dtype).removeprefix("torch."), **NAMES.get(activation, {})}
        return self.run(linear.FINISHED, attrs, x, weight, bias, None, added)

    def gated(self, name: str, x, weight, bias=None) -> torch.Tensor | None:
        return self.run(linear.GATED, NAMES[name], x, weight, bias)


NATIVE, WITHOUT_TILES = (InC(with_tiles=has_tiles) for has_tiles in (True, False))
KERNELS = [pytest.param(NATIVE, id="native"), pytest.param(WITHOUT_TILES, id="native without tiles")]
MOST, RESULTS = 130, (torch.bfloat16, torch.float32)
GUARD = 64


def operands(rows: int, columns: int, outputs: int, bias: bool, offset: int = 0):
    """Random operands, each at an odd place of a larger buffer of NaN, so that a value from beside it shows."""

    def inside(*shape: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        buffer = torch.full((count + 2 * GUARD,), torch.nan, dtype=torch.bfloat16)
        part = buffer[GUARD + offset :][:count].view(shape)
        return part.copy_(torch.randn(shape))

    return inside(rows, columns), inside(outputs, columns), inside(outputs) if bias else None


def assert_right(
    y: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    added: torch.Tensor | None = None,
) -> None:
    """Within the rounding of the result, of what is added after it, and of a float32 sum of so many products."""
    exact, sizes = x.double() @ w.double().T, x.double().abs() @ w.double().abs().T
    after = [t.double() for t in (b, added) if t is not None]
    for t in after:
        exact, sizes = exact + t, sizes + t.abs()
    rounding = 0.0 if y.dtype == torch.float32 else 2**-8
    bound = exact.abs() * rounding * 2 + sizes * (2.0**-22 + len(after) * rounding)
    assert y.shape == exact.shape
    assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_few_rows_agree_with_float64_wherever_operands_lie(kernel: InC, data: st.DataObject):
    rows = data.draw(st.integers(1, MOST))
    columns = data.draw(st.sampled_from([1, 2, 31, 32, 33, 63, 64, 257, 1000, 8192]))
    outputs = data.draw(st.sampled_from([1, 2, 3, 4, 5, 7, 33, 130]))
    x, w, b = operands(rows, columns, outputs, data.draw(st.booleans()), data.draw(st.integers(0, 31)))
    y = kernel.multiply(x, w, b)
    assert y.dtype == torch.bfloat16
    assert_right(y, x, w, b)
    added = operands(rows, outputs, 1, False, data.draw(st.integers(0, 31)))[0]
    assert_right(kernel.multiply(x, w, b, added), x, w, b, added)
    wide = kernel.multiply(x, w, None, None, torch.float32)
    assert wide.dtype == torch.float32
    assert_right(wide, x, w, None)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "gelu": F.gelu,
}


def test_every_gate_is_tested():
    assert sorted(GATES) == sorted(ACTIVATIONS) == sorted(NAMES)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_gated_products_agree_with_float64_wherever_operands_lie(data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(ACTIVATIONS)))
    rows, columns = data.draw(st.integers(1, MOST)), data.draw(st.sampled_from([1, 31, 33, 257, 1000]))
    outputs = data.draw(st.sampled_from([1, 2, 15, 16, 17, 33, 130, 1030]))
    x, w, b = operands(rows, columns, 2 * outputs, data.draw(st.booleans()), data.draw(st.integers(0, 31)))
    w.mul_(data.draw(st.sampled_from([0.05, 1.0])))  # gates of all sizes
    y = NATIVE.gated(name, x, w, b)

    gate, up = (x.double() @ w.double().T + (0 if b is None else b.double())).chunk(2, -1)
    sums = x.double().abs() @ w.double().abs().T + (0 if b is None else b.double().abs())
    gate_error, up_error = (sums * 2.0**-22).chunk(2, -1)
    active = ACTIVATIONS[name](gate)
    # No activation is steeper than 1.13; e^x, the quotient and what is rounded in float32 are within some units of its last place.
    error = (1.2 * gate_error + 2.0**-20 * (gate.abs() + 1e-3)) * up.abs() + active.abs() * up_error
    assert y.dtype == torch.bfloat16
    assert y.shape == active.shape
    assert ((y.double() - active * up).abs() <= (active * up).abs() * 2.0**-8 + error + 1e-30).all()


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_activated_products_agree_with_float64(kernel: InC, data: st.DataObject):
    name, dtype = data.draw(st.sampled_from(GATES)), data.draw(st.sampled_from(RESULTS))
    rows, columns = data.draw(st.integers(1, MOST)), data.draw(st.sampled_from([1, 31, 33, 257]))
    outputs = data.draw(st.sampled_from([1, 15, 16, 17, 130, 1030]))
    x, w, b = operands(rows, columns, outputs, data.draw(st.booleans()), data.draw(st.integers(0, 31)))
    w.mul_(data.draw(st.sampled_from([0.05, 1.0])))
    added = operands(rows, outputs, 1, False)[0] if data.draw(st.booleans()) else None
    y = kernel.multiply(x, w, b, added, dtype, name)

    product = x.double() @ w.double().T + (0 if b is None else b.double())
    sums = x.double().abs() @ w.double().abs().T + (0 if b is None else b.double().abs())
    exact = ACTIVATIONS[name](product) + (0 if added is None else added.double())
    rounding = exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 2.0**-22)
    error = sums * 2.0**-21 + 2.0**-20 * (product.abs() + 1e-3)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= rounding + error + 1e-30).all()


@pytest.mark.parametrize("kernel", [NATIVE, WITHOUT_TILES])
@pytest.mark.parametrize(("columns", "outputs"), [(5, 33), (96, 17), (257, 130), (2056, 29)])
@pytest.mark.parametrize("finish", ["plain", "wide", "finished", "gated"])
def test_a_row_has_the_bits_that_it_has_alone_however_many_there_are_beside_it(
    kernel, finish, columns, outputs
):
    x, w, b = operands(540, columns, 2 * outputs, True)
    added = operands(540, 2 * outputs, 1, False)[0]

    def multiply(rows: slice) -> torch.Tensor | None:
        if finish == "gated":
            return kernel.gated("silu", x[rows], w, b)
        if finish == "finished":
            return kernel.multiply(x[rows], w, b, added[rows], activation="gelu")
        dtype = torch.float32 if finish == "wide" else torch.bfloat16
        return kernel.multiply(x[rows], w, None, None, dtype)

    alone = torch.cat([multiply(slice(row, row + 1)) for row in range(len(x))])
    for rows in (*range(2, 10), 16, 17, 32, 33, 64, 65, 130, 300, 512, 513, 540):
        assert torch.equal(multiply(slice(rows)), alone[:rows])


@pytest.mark.parametrize(("rows", "columns"), [(300, 8192), (1200, 70), (70, 1 << 15), (70, (1 << 15) + 1)])
def test_rows_that_are_multiplied_in_several_parts_are_all_multiplied(rows: int, columns: int):
    """More elements than caches hold, more rows than are multiplied at a time, and columns up to what is brought near and beyond."""
    x, w, b = operands(rows, columns, 13, True)
    for kernel in (NATIVE, WITHOUT_TILES):
        assert_right(kernel.multiply(x, w, b), x, w, b)
        assert_right(kernel.multiply(x, w, b, None, torch.float32), x, w, b)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gates_that_are_large_or_no_number_come_out_as_from_torch(name: str):
    values = [
        torch.nan,
        torch.inf,
        -torch.inf,
        3e38,
        -3e38,
        200.0,
        -200.0,
        -88.0,
        0.0,
        -0.0,
        1e-38,
        20.0,
        -20.0,
    ]
    w = torch.tensor([*values, *[1.0] * len(values)]).bfloat16().unsqueeze(1)
    y = NATIVE.gated(name, torch.ones(1, 1).bfloat16(), w, None)
    expected = ACTIVATIONS[name](torch.tensor(values).bfloat16().double()).bfloat16()
    torch.testing.assert_close(y[0], expected, rtol=2**-8, atol=1e-36, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_threads_share_gates_and_change_nothing(rows: int):
    x, w, b = operands(rows, 257, 2006, True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(NATIVE.gated("silu", x, w, b))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("rows", few_of(range(1, 9), 3))
@pytest.mark.parametrize("columns", [257, 2048, 8191])
def test_threads_share_the_outputs_and_change_nothing(rows: int, columns: int):
    x, w, b = operands(rows, columns, 1003, True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(NATIVE.multiply(x, w, b))
    finally:
        torch.set_num_threads(before)
    assert_right(results[0], x, w, b)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, -3e38])
def test_what_is_no_number_or_too_large_comes_out_as_from_torch(value: float):
    x, w = torch.ones(1, 40).bfloat16(), torch.ones(3, 40).bfloat16()
    w[1, 38] = value
    y = NATIVE.multiply(x, w, None)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w), equal_nan=True)


def test_results_round_to_the_nearest_ties_to_even():
    sums = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-7, 3.0, -1 - 2**-8])
    x = torch.eye(1, 32).repeat(1, 2).bfloat16()  # two products: a part that bfloat16 holds, and the rest
    high = sums.bfloat16()
    low = (sums - high.float()).bfloat16()
    w = torch.zeros(len(sums), 64).bfloat16()
    w[:, 0], w[:, 32] = high, low
    assert torch.equal(NATIVE.multiply(x, w, None, None, torch.float32)[0], sums)
    assert torch.equal(NATIVE.multiply(x, w, None)[0], sums.bfloat16())


@pytest.mark.parametrize("kernel", KERNELS)
def test_operands_that_do_not_fit_are_left_to_others(kernel: InC):
    x, w = torch.ones(1, 64).bfloat16(), torch.ones(8, 64).bfloat16()
    assert kernel.multiply(x, w) is not None
    assert kernel.multiply(x.expand(MOST + 1, 64).contiguous(), w) is not None
    assert kernel.multiply(x[:0], w) is None
    assert kernel.multiply(x.float(), w) is None
    assert kernel.multiply(x, w, torch.ones(8)) is None


def test_a_large_weight_in_pieces_is_left_to_others():
    x, w = torch.ones(2, 1024).bfloat16(), torch.ones(1024, 300).bfloat16()
    assert NATIVE.multiply(x, w.T) is None
    assert NATIVE.multiply(x, w.T.contiguous()) is not None


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_weight_without_outputs_gives_none(kernel: InC):
    assert kernel.multiply(torch.ones(1, 4).bfloat16(), torch.ones(0, 4).bfloat16(), None).shape == (1, 0)


@pytest.mark.parametrize("rows", [1, 17])
def test_a_weight_without_columns_gives_its_bias(rows: int):
    bias, nothing = torch.arange(5.0).bfloat16(), torch.empty(0).bfloat16()
    y = torch.full((rows, 5), torch.nan).bfloat16()
    extension.NATIVE.multiply(rows, 0, 5, 0, 4, 0, 1, nothing, nothing, bias, None, None, y)
    assert y.equal(bias.expand(rows, 5))


def test_a_wrong_number_of_rows_is_refused_before_memory_is_touched():
    x, y = torch.zeros(1 << 14).bfloat16(), torch.full((1 << 14,), torch.nan)
    for name in ("multiply", "multiply_gated"):
        kernel, absent = getattr(extension.NATIVE, name), [None] * (2 if name == "multiply" else 1)
        sizes = (8, 8, *[0] * (2 if name == "multiply" else 1), 1, 1)
        with pytest.raises(ValueError, match="1 row or more, got 0"):
            kernel(0, *sizes, x, x, *absent, None, y)
        with pytest.raises(ValueError, match=f"{name}: rows is -1, it must be from 0 to 2\\^40"):
            kernel(-1, *sizes, x, x, *absent, None, y)
    assert y.isnan().all()
    with pytest.raises(TypeError, match="multiply takes 13 arguments, got 2"):
        extension.NATIVE.multiply(0, 0)
