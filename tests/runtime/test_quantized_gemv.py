# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows with a weight in 8 or 4 bits, by the kernel in C, against float64."""

import ctypes
import mmap
import sys
from dataclasses import replace

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_case import BLOCKS, GUARD, TABLES, WAYS, Case, as_stored, format_of, in_16_bits, in_c, meaning

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.quantized_gemv import GROUPS, MOST_ROWS, find_dequantizer, stored_as, table_of
from nnfront.ir import OPS
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

pytestmark = pytest.mark.usefixtures("instructions")
native_only = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
NO_VALUES = (0, 0, 0, 0)


@native_only
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_few_rows_agree_with_float64_wherever_operands_lie(data: st.DataObject):
    stored, group = data.draw(st.sampled_from(WAYS + TABLES + BLOCKS))
    columns = data.draw(
        st.sampled_from([128, 256, 384, 1024, 4224])
        if stored in BLOCK_FORMATS
        else st.sampled_from([1, 2, 31, 32, 63, 64, 65, 127, 129, 1000, 8192])
        if group is None
        else st.sampled_from([1, 2, 3, 5, 8, 33, 64]).map(lambda n: n * group)
    )
    outputs, bias = data.draw(st.sampled_from([1, 2, 3, 15, 16, 17, 34, 101])), data.draw(st.booleans())
    rows = data.draw(st.one_of(st.integers(1, 8), st.sampled_from([9, 15, 16, 17, 32, 49, 64])))
    offset, with_tiles, are_wide = (
        data.draw(st.integers(0, 63)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    case = Case(stored, group, rows, columns, outputs, offset, with_tiles=with_tiles, are_wide=are_wide)
    case.check(case.run(bias), bias)


@native_only
@pytest.mark.parametrize("columns", few_of([384, 8192], 1))
@pytest.mark.parametrize(("stored", "group"), WAYS + TABLES + BLOCKS, ids=str)
def test_a_row_has_the_bits_that_it_has_alone_however_many_there_are_beside_it(stored, group, columns):
    case = Case(stored, group, 300, columns, 61, with_tiles=False)
    x = case.x.unsqueeze(1)  # a token of as many sequences

    def multiply(rows: slice) -> torch.Tensor:
        case.x = x[rows]
        return case.run()

    alone = torch.cat([multiply(slice(row, row + 1)) for row in range(len(x))])
    for rows in (*range(2, 10), 16, 17, 64, 150, 300):
        assert torch.equal(multiply(slice(rows)), alone[:rows])


@native_only
@pytest.mark.parametrize("rows", [7, 20])
@pytest.mark.parametrize(("stored", "group"), WAYS + TABLES + BLOCKS, ids=str)
def test_a_row_that_no_sum_holds_changes_no_other(stored, group, rows):
    case = Case(stored, group, rows, 384, 19, with_tiles=False)
    x = case.x
    x[1, 300], x[2, 7], x[5, :2] = torch.inf, torch.nan, torch.tensor([1e38, -1e38])
    together, alone = case.run(), []
    for row in x.split(1):
        case.x = row
        alone.append(case.run())
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=0, equal_nan=True)
    assert together[[0, 3, 4, 6]].isfinite().all()


@native_only
@pytest.mark.parametrize(("stored", "group"), WAYS + TABLES, ids=str)
def test_each_quantized_value_in_each_lane_is_what_it_stands_for(stored, group):
    columns = 2 * (group or 64) + (group or 40)  # vectors as a whole and a part of one
    kinds, per_byte = (16, 2) if stored.endswith("4") else (256, 1)
    quantized = torch.arange(kinds, dtype=torch.uint8) * (17 if per_byte == 2 else 1)
    rows = quantized.unsqueeze(1).expand(kinds, columns // per_byte)
    weight = as_stored(stored, rows.contiguous())
    groups = 1 if group is None else columns // group
    scales = torch.ones(
        kinds,
        groups,
        dtype=torch.float32 if FORMATS.get(stored, FORMATS["int8"]).read_scales else torch.bfloat16,
    )
    scales = torch.full((kinds, groups), 127, dtype=torch.uint8) if stored == "mxfp4" else scales
    zeros = torch.zeros(kinds, groups, dtype=torch.uint8) if stored == "uint4" else None
    expected = meaning(stored, rows)[:, :1].T.bfloat16()
    units = torch.eye(columns).bfloat16()
    for first in range(0, columns, 8):
        x = units[first : first + 8]
        y = in_c(format_of(stored, group), x, weight, scales, zeros, None)
        torch.testing.assert_close(y, expected.expand(len(x), -1), rtol=0, atol=0, equal_nan=True)


@native_only
def test_each_scale_of_8_bits_in_each_place_is_what_it_stands_for():
    groups = 9  # a step of vectors and a part of one
    quantized = torch.arange(256)[:, None] + torch.arange(groups)
    scales = (quantized % 256).to(torch.uint8).view(torch.float8_e4m3fn)
    ones = torch.full((256, 8 * groups), 0x22, dtype=torch.uint8)
    x = torch.eye(groups).repeat_interleave(16, 1) * (torch.arange(16 * groups) % 16 == 3)
    y = in_c(FORMATS["nvfp4"], x.bfloat16(), ones, scales, torch.full((256, 1), 0.5), None)
    expected = (
        torch.eye(groups).double() @ (scales.double() / 2).T
    )  # a scale that is no number makes none of its output
    torch.testing.assert_close(y, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)


@native_only
@pytest.mark.parametrize("outputs", [1, 3, 16, 19])
@pytest.mark.parametrize(("index", "stored", "group"), [(0, "int8", 0), (4, "int4", 32)])
def test_nothing_is_written_beside_the_result(index, stored, group, outputs):
    case = Case(stored, group or None, 2, 96, outputs)
    y = torch.full((2 * outputs + 2 * GUARD,), torch.nan).bfloat16()
    given = case.weight, case.scales, None, case.x, case.bias, None, torch.empty(1024), y[GUARD:]
    groups = 96 // group if group else 1
    NATIVE.multiply_quantized(index, 2, 96, outputs, groups, 0, *NO_VALUES, 0, 1, 1, 1.0, *given)
    case.check(y[GUARD:-GUARD].view(2, outputs))
    assert y[:GUARD].isnan().all()
    assert y[-GUARD:].isnan().all()


class Fenced:
    """Memory whose last byte is the last one of a page, before a page that nobody may read."""

    def __init__(self, values: torch.Tensor) -> None:
        count, page = values.numel() * values.element_size(), mmap.PAGESIZE
        self.size = -(-count // page) * page
        self.map = mmap.mmap(-1, self.size + page)
        self.bytes = (ctypes.c_uint8 * len(self.map)).from_buffer(self.map)
        self.address = ctypes.addressof(self.bytes) + self.size
        assert self.allow(0) == 0
        part = torch.frombuffer(self.map, dtype=torch.uint8, count=count, offset=self.size - count)
        self.values = part.view(values.dtype).view(values.shape).copy_(values)

    def allow(self, how: int) -> int:
        return ctypes.CDLL(None).mprotect(ctypes.c_void_p(self.address), mmap.PAGESIZE, how)


@native_only
@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by a call of Linux")
@pytest.mark.parametrize(("stored", "group"), WAYS + TABLES + BLOCKS, ids=str)
def test_nothing_is_read_behind_an_operand(stored, group):
    """A read there ends the process."""
    sizes = [1, 15, 20, 40, 50, 64, 100] if group is None else [group, 3 * group, 5 * group]
    for columns in [128, 256, 640] if stored in BLOCK_FORMATS else sizes:
        case = Case(stored, group, 2, columns, 17, most_zero=16)
        fences = {}
        for name in ("x", "weight", "scales", "zeros", "bias"):
            if getattr(case, name) is not None:
                fences[name] = Fenced(getattr(case, name))
                setattr(case, name, fences[name].values)
        case.check(case.run())
        for fence in fences.values():
            assert fence.allow(mmap.PROT_READ | mmap.PROT_WRITE) == 0


@native_only
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("most", [16, 17, 255])
def test_any_zero_point_is_subtracted(group, most):
    """However much larger it is than any number of four bits."""
    case = Case("uint4", group, 3, 4 * group, 40, most_zero=most)
    case.zeros[7] = most
    case.dense[7] = (meaning("uint4", case.weight)[7] - most) * case.scales[7].double().repeat_interleave(
        group
    )
    case.check(case.run())


@native_only
@pytest.mark.parametrize(("stored", "group"), [(s, g) for s in ("int4", "uint4") for g in GROUPS], ids=str)
def test_numbers_far_below_their_neighbours_are_off_by_the_last_of_16_bits_at_most(stored, group):
    case = Case(stored, group, 9, 5 * 128, 17)
    case.x.mul_(torch.exp2(-torch.randint(0, 14, case.x.shape).bfloat16()))
    case.x[0, :128], case.x[1, 64:128], case.x[2] = 0.0, 1e-30, 1e35
    x = case.x.double()
    largest = x.abs().unflatten(-1, (-1, 32)).amax(-1).repeat_interleave(32, -1)
    assert ((in_16_bits(x) - x).abs() <= largest * 2.0**-15).all()
    case.check(case.run())


@native_only
@pytest.mark.parametrize(("stored", "group"), WAYS + TABLES + BLOCKS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), few_of([(5, 2176), (1, 384), (2, 8192), (8, 8192), (19, 640)]))
def test_threads_share_the_outputs_and_change_nothing(stored, group, rows, columns):
    case = Case(stored, group, rows, columns, 203, most_zero=17)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append(case.run())
    finally:
        torch.set_num_threads(before)
    case.check(results[0])
    assert all(torch.equal(result, results[0]) for result in results)


@native_only
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_weight_is_dequantised_to_what_it_stands_for_rounded_once(data: st.DataObject):
    stored, group = data.draw(st.sampled_from(WAYS + TABLES + BLOCKS))
    columns = data.draw(
        st.sampled_from([128, 256, 384, 1024])
        if stored in BLOCK_FORMATS
        else st.integers(1, 300)
        if group is None
        else st.integers(1, 17).map(lambda n: n * group)
    )
    outputs, offset = data.draw(st.integers(1, 40)), data.draw(st.integers(0, 63))
    case = Case(stored, group, 1, columns, outputs, offset, most_zero=255, are_wide=data.draw(st.booleans()))
    assert case.rounded().shape == (outputs, columns)


@native_only
@pytest.mark.parametrize("name", [name for name, f in FORMATS.items() if f.values])
def test_a_table_of_values_lies_in_bytes_as_it_is(name):
    numbers, unit = table_of(FORMATS[name])
    found = [
        torch.tensor(n >> 8 * i & 255, dtype=torch.uint8).view(torch.int8).item()
        for n in numbers
        for i in range(4)
    ]
    assert tuple(value * unit for value in found) == FORMATS[name].values


@native_only
def test_what_is_no_number_stays_none_and_where_it_is():
    weight = torch.ones(3, 100).to(torch.float8_e4m3fn)
    weight[1, 98] = torch.nan
    ones = torch.ones(3, 1)
    y = in_c(format_of("fp8", None), torch.ones(1, 100).bfloat16(), weight, ones, None, None)
    torch.testing.assert_close(y, torch.tensor([[100, torch.nan, 100]]).bfloat16(), equal_nan=True)
    x = torch.ones(2, 96).bfloat16()
    x[0, 95] = torch.inf
    quantized = torch.full((2, 48), 0x9F, dtype=torch.uint8)  # -1 in the low half, -7 in the high one
    y = in_c(format_of("int4", 32), x, quantized, torch.ones(2, 3).bfloat16(), None, None)
    assert torch.equal(y, torch.tensor([[-torch.inf] * 2, [-384.0] * 2]).bfloat16())


@native_only
@pytest.mark.parametrize(("stored", "group"), BLOCKS, ids=str)
def test_blocks_multiply_what_no_sum_holds(stored, group):
    """Minima are taken from sums of x, which say nothing of infinities and of what is near the largest number."""
    case = Case(stored, group, 3, 384, 5)
    case.x[0, 301], case.x[1, 7], case.x[2, :2] = torch.inf, torch.nan, torch.tensor([1e36, -1e36])
    y, exact = case.run(False), case.x.double() @ case.dense.T
    assert torch.equal(y[0], exact[0].bfloat16())
    assert y[1].isnan().all()
    torch.testing.assert_close(y[2].double(), exact[2], rtol=2**-7, atol=1e31)


@native_only
@pytest.mark.parametrize(("stored", "group"), [("int4", 32), ("uint4", 64), ("mxfp4", 32), ("nl4", 16)])
@pytest.mark.parametrize("rows", [3, 7])
def test_groups_multiply_what_no_sum_holds(stored, group, rows):
    """Zero points are taken from sums of x, which say nothing of infinities and of what is near the largest number."""
    case = Case(stored, group, rows, 384, 5, most_zero=255)
    case.weight.bitwise_or_(0x11)
    if stored == "uint4":
        case.zeros[:, 301 // group] = 100
        case.dense = meaning(stored, case.weight) - case.zeros.double().repeat_interleave(group, 1)
        case.dense *= case.scales.double().repeat_interleave(group, 1)
    else:
        scales = case.scales.double()
        if stored == "mxfp4":
            scales = 2.0 ** (scales - 127)
        elif case.zeros is not None:
            scales = scales * case.zeros.double()
        case.dense = meaning(stored, case.weight) * scales.repeat_interleave(group, 1)
    case.x[0, 301], case.x[1, 7], case.x[2, :2] = torch.inf, torch.nan, torch.tensor([1e36, -1e36])
    y, exact = case.run(False), case.x.double() @ case.dense.T
    assert torch.equal(y[0], exact[0].bfloat16())
    assert y[1].isnan().all()
    torch.testing.assert_close(y[2].double(), exact[2], rtol=2**-7, atol=1e31)


@native_only
def test_blocks_of_any_bytes_are_what_the_op_says_they_are():
    for stored in BLOCK_FORMATS:
        block = FORMATS[stored].block
        weight = torch.randint(0, 256, (64, block.row_bytes(384)), dtype=torch.uint8)
        for first in range(
            0, weight.shape[1], block.bytes
        ):  # of floats that are none there is nothing to compare
            for at in (block.unit, 2) if stored != "q6_k" else (block.unit,):
                end = min(first + block.bytes, weight.shape[1])
                weight[:, end + at + 1 if at < 0 else first + at + 1] &= 0x3B
        dense = OPS["dequantize_blocks"].run((weight,), {"format": stored, "dtype": "float64"})
        x, format = torch.eye(384).bfloat16(), FORMATS[stored]
        found = torch.cat([in_c(format, part, weight, None, None, None) for part in x.split(8)])
        scale = dense.abs().amax(1)  # of the parts that a number is made of
        error = (found.double() - dense.T).abs()
        assert (error <= dense.T.abs() * 2**-8 + scale * 2**-15).all()


@native_only
def test_operands_that_do_not_fit_are_left_to_others():
    case = Case("int4", 32, 2, 64, 6)
    x, w, s, b = case.x, case.weight, case.scales, case.bias

    def takes(format: QuantFormat, *operands: torch.Tensor | None) -> bool:
        return in_c(format, *operands) is not None

    int4, uint4 = case.format, format_of("uint4", 32)
    assert takes(int4, x, w, s, None, b)
    assert not takes(int4, x.float(), w, s, None, None)
    assert not takes(int4, torch.ones(MOST_ROWS + 1, 64).bfloat16(), w, s, None, None)
    assert not takes(int4, x[:0], w, s, None, None)
    assert not takes(int4, x, w, s.half(), None, None)
    assert not takes(int4, x, w, s, None, b.float())
    zeros = torch.zeros(6, 2, dtype=torch.uint8)
    assert not takes(int4, x, w, s, zeros, None)
    assert takes(uint4, x, w, s, zeros, None)
    assert not takes(uint4, x, w, s, None, None)


@native_only
def test_small_operands_in_pieces_are_copied_for_the_kernel():
    case = Case("uint4", 32, 2, 64, 6)
    whole = case.x, case.weight, case.scales, case.zeros, case.bias
    y = in_c(case.format, *whole)
    for i, operand in enumerate(whole):
        apart = torch.stack([operand, operand], -1)[..., 0]
        assert not apart.is_contiguous()
        assert torch.equal(in_c(case.format, *whole[:i], apart, *whole[i + 1 :]), y)


@native_only
def test_a_large_weight_in_pieces_is_left_to_others():
    case = Case("int8", None, 2, 1024, 300)
    assert in_c(case.format, case.x, case.weight, case.scales, None, None) is not None
    weight = case.weight.T.contiguous().T
    assert in_c(case.format, case.x, weight, case.scales, None, None) is None


def test_without_the_extension_or_for_other_groups_there_is_no_kernel():
    assert stored_as(format_of("int4", 16)) is None
    assert stored_as(format_of("int4", None)) is None
    assert stored_as(replace(FORMATS["int8"], symmetric=False)) is None
    assert stored_as(replace(FORMATS["int4"], axis=0)) is None
    assert stored_as(FORMATS["uint8"]) is None
    assert find_dequantizer(None, FORMATS["int8"]) is None
    assert find_dequantizer(NATIVE, FORMATS["uint8"]) is None


@native_only
def test_a_weight_without_outputs_gives_none():
    y = in_c(
        format_of("int8", None),
        torch.ones(1, 4).bfloat16(),
        torch.ones(0, 4, dtype=torch.int8),
        torch.ones(0, 1).bfloat16(),
        None,
        None,
    )
    assert y.shape == (1, 0)


@native_only
def test_wrong_numbers_are_refused_before_memory_is_touched():
    y = torch.full((512,), torch.nan)

    def call(stored: int, columns: int, groups: int, kind: int = 0) -> None:
        operands = [torch.zeros(512)] * 4
        sizes = stored, 1, columns, 4, groups, kind, *NO_VALUES, 0, 1, 1, 1.0
        NATIVE.multiply_quantized(*sizes, *operands, None, None, torch.empty(512), y)

    with pytest.raises(ValueError, match="multiply_quantized: stored is -1, it must be from 0 to 2\\^40"):
        call(-1, 64, 1)
    with pytest.raises(ValueError, match="0 to 9 for how values are stored, got 10"):
        call(10, 64, 1)
    with pytest.raises(ValueError, match="0 to 3 for what scales are, got 4"):
        call(0, 64, 1, 4)
    with pytest.raises(ValueError, match="scales in float8 of values of a table, got 0 for how values are"):
        call(0, 64, 1, 3)
    with pytest.raises(ValueError, match="columns that 128 divides, got 64"):
        call(7, 64, 1)
    for columns, groups in ((64, 0), (64, 4), (96, 2), (96, 1), (100, 3)):
        with pytest.raises(ValueError, match=f"groups of 32, 64 or 128, got {groups} of {columns} columns"):
            call(4, columns, groups)
    with pytest.raises(ValueError, match="groups of 128, got 2 of 128 columns"):
        call(3, 128, 2)
    with pytest.raises(ValueError, match="groups of all columns, got 2 of 64 columns"):
        call(0, 64, 2)
    with pytest.raises(TypeError, match="multiply_quantized takes 22 arguments, got 1"):
        NATIVE.multiply_quantized(0)
    assert y.isnan().all()
