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

from nnfront.backends.cpu import quantized_linear
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.gemv import MOST_ROWS
from nnfront.backends.cpu.quantized_gemv import GROUPS, find_dequantizer, stored_as, table_of
from nnfront.backends.cpu.quantized_linear import product
from nnfront.ir import OPS
from nnfront.lower import Run, Structure
from nnfront.quant_format import BLOCK_FORMATS, FORMATS, QuantFormat

pytestmark = pytest.mark.usefixtures("instructions")
native_only = pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
BLOCKS = [(name, FORMATS[name].group_size) for name in BLOCK_FORMATS]
WAYS = [("int8", None), ("fp8", None), ("fp8", 128)] + [
    (s, g) for s in ("int8_groups", "int4", "uint4") for g in GROUPS
]
TABLES = [(name, FORMATS[name].group_size) for name in ("mxfp4", "nvfp4", "nl4")]
NO_VALUES = (0, 0, 0, 0)
# Rows from which tiles take what codes in groups of 16 stand for, rounded to bfloat16, where there are tiles.
BY_TILES = 6
GUARD = 64


def inside(values: torch.Tensor, offset: int, beside: float | int) -> torch.Tensor:
    """The values at an odd place of a larger buffer, beside others that would show."""
    buffer = torch.full((values.numel() + 2 * GUARD,), beside, dtype=values.dtype)
    return buffer[GUARD + offset :][: values.numel()].view(values.shape).copy_(values)


def format_of(stored: str, group: int | None) -> QuantFormat:
    return replace(FORMATS["int8" if stored == "int8_groups" else stored], group_size=group)


def meaning(stored: str, codes: torch.Tensor) -> torch.Tensor:
    """What bytes stand for, two values for each byte in 4 bits."""
    if stored.startswith("int8"):
        return codes.view(torch.int8).double()
    if stored == "fp8":
        return codes.view(torch.float8_e4m3fn).double()
    values = torch.stack([codes % 16, codes // 16], -1).flatten(1).double()
    if table := FORMATS[stored].values:
        return torch.tensor(table, dtype=torch.float64)[values.long()]
    return values if stored == "uint4" else (values + 8) % 16 - 8


def as_stored(stored: str, codes: torch.Tensor) -> torch.Tensor:
    """Bytes in the type that the weight has."""
    dtypes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int8_groups": torch.int8}
    return codes.view(dtypes.get(stored, torch.uint8))


def left_to_others(*operands: torch.Tensor | None) -> torch.Tensor:
    """What stands for the other way."""
    return torch.zeros(0)


def in_c(format: QuantFormat, *operands: torch.Tensor | None, with_tiles: bool = True) -> torch.Tensor | None:
    """The product by the kernel in C; None where it is not for these operands."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_linear, "TILES", with_tiles)
        run = Run("", "quantized_product", (), Structure(0))
        y = product(run, format, left_to_others)(*operands)
    return y if y.ndim > 1 else None


class Case:
    """Operands at odd places, and the weight that they stand for."""

    def __init__(
        self,
        stored: str,
        group: int | None,
        rows: int,
        columns: int,
        outputs: int,
        offset: int = 0,
        most_zero: int = 15,
        with_tiles: bool = True,
        are_wide: bool = False,
    ) -> None:
        self.format, self.with_tiles = format_of(stored, group), with_tiles
        self.dequantize = find_dequantizer(NATIVE, format_of(stored, group))
        is_rounded = stored in ("q6_k", "nvfp4", "nl4")
        self.is_rounded = is_rounded and with_tiles and rows >= BY_TILES and NATIVE.has_tiles()
        self.x = inside(torch.randn(rows, columns).bfloat16(), offset, torch.nan)
        self.bias = inside(torch.randn(outputs).bfloat16(), offset, torch.nan)
        self.scales = self.zeros = None
        if stored in BLOCK_FORMATS:
            blocks = OPS["quantize_blocks"].run((torch.randn(outputs, columns),), {"format": stored})
            self.weight = inside(blocks, offset, 0x7F)
            back = {"format": stored, "dtype": "float64"}
            self.dense = OPS["dequantize_blocks"].run((blocks,), back)
            return
        groups = 1 if group is None else columns // group
        per_byte = 2 if stored.endswith("4") else 1
        codes = torch.randint(0, 256, (outputs, columns // per_byte), dtype=torch.uint8)
        if stored == "fp8":
            codes[codes % 128 == 127] -= 1
        scales = torch.rand(outputs, groups) / 8 + 0.01
        scales = scales if stored in ("fp8", "nvfp4", "nl4") or are_wide else scales.bfloat16()
        self.weight = as_stored(stored, inside(codes, offset, 0x7F))
        self.scales = inside(scales, offset % 8, torch.nan)
        if stored == "mxfp4":
            exponents = torch.randint(120, 130, (outputs, groups), dtype=torch.uint8)
            self.scales, scales = inside(exponents, offset, 255), 2.0 ** (exponents.double() - 127)
        values = meaning(stored, codes)
        if stored == "uint4":
            self.zeros = inside(
                torch.randint(0, most_zero + 1, (outputs, groups), dtype=torch.uint8), offset, 255
            )
            values = values - self.zeros.double().repeat_interleave(columns // groups, 1)
        self.dense = values * scales.double().repeat_interleave(columns // groups, 1)

    def run(self, bias: bool = True) -> torch.Tensor:
        operands = self.x, self.weight, self.scales, self.zeros, self.bias if bias else None
        y = in_c(self.format, *operands, with_tiles=self.with_tiles)
        assert y is not None
        return y

    def rounded(self) -> torch.Tensor:
        """What the kernel dequantises the weight to, which must be what it stands for to half of the last bit of bfloat16, and what float32 rounds of scales and minima."""
        y = self.dequantize(self.weight, self.scales, self.zeros).double()
        most = self.dense.abs().amax(1, keepdim=True)
        assert ((y - self.dense).abs() <= self.dense.abs() * 2.0**-8 * 1.0001 + most * 2.0**-22).all()
        return y

    def check(self, y: torch.Tensor, bias: bool = True) -> None:
        """Within the rounding of the result and of a float32 sum of so many products with codes, or with what they stand for in bfloat16."""
        b = self.bias.double() if bias else torch.zeros(len(self.bias)).double()
        dense = self.rounded() if self.is_rounded else self.dense
        exact = self.x.double() @ dense.T + b
        sizes = self.x.double().abs() @ dense.abs().T + b.abs()
        assert y.dtype == torch.bfloat16
        assert y.shape == exact.shape
        assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + sizes * 2.0**-20).all()


@native_only
@settings(max_examples=150, deadline=None)
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
    outputs, bias = data.draw(st.sampled_from([1, 2, 3, 15, 16, 17, 34])), data.draw(st.booleans())
    rows = data.draw(st.one_of(st.integers(1, 8), st.sampled_from([9, 15, 16, 17, 32, 49, 64])))
    offset, with_tiles, are_wide = (
        data.draw(st.integers(0, 63)),
        data.draw(st.booleans()),
        data.draw(st.booleans()),
    )
    case = Case(stored, group, rows, columns, outputs, offset, with_tiles=with_tiles, are_wide=are_wide)
    case.check(case.run(bias), bias)


@native_only
@pytest.mark.parametrize(("stored", "group"), WAYS + TABLES, ids=str)
def test_each_code_in_each_lane_is_what_it_stands_for(stored, group):
    columns = 2 * (group or 64) + (group or 40)  # vectors as a whole and a part of one
    kinds, per_byte = (16, 2) if stored.endswith("4") else (256, 1)
    codes = torch.arange(kinds, dtype=torch.uint8) * (17 if per_byte == 2 else 1)
    rows = codes.unsqueeze(1).expand(kinds, columns // per_byte)
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
@pytest.mark.parametrize("outputs", [1, 3, 16, 19])
@pytest.mark.parametrize(("index", "stored", "group"), [(0, "int8", 0), (4, "int4", 32)])
def test_nothing_is_written_beside_the_result(index, stored, group, outputs):
    case = Case(stored, group or None, 2, 96, outputs)
    y = torch.full((2 * outputs + 2 * GUARD,), torch.nan).bfloat16()
    given = case.weight, case.scales, None, case.x, case.bias, None, y[GUARD:]
    groups = 96 // group if group else 1
    NATIVE.multiply_quantized(index, 2, 96, outputs, groups, 0, *NO_VALUES, 1, 1, 1.0, *given)
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
@settings(max_examples=80, deadline=None)
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
    codes = torch.full((2, 48), 0x9F, dtype=torch.uint8)  # -1 in the low half, -7 in the high one
    y = in_c(format_of("int4", 32), x, codes, torch.ones(2, 3).bfloat16(), None, None)
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
    if case.zeros is not None:
        case.zeros[:, 301 // group] = 100
        case.dense = meaning(stored, case.weight) - case.zeros.double().repeat_interleave(group, 1)
        case.dense *= case.scales.double().repeat_interleave(group, 1)
    else:
        scales = 2.0 ** (case.scales.double() - 127) if stored == "mxfp4" else case.scales.double()
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
        sizes = stored, 1, columns, 4, groups, kind, *NO_VALUES, 1, 1, 1.0
        NATIVE.multiply_quantized(*sizes, *operands, None, None, y)

    with pytest.raises(ValueError, match="multiply_quantized: stored is -1, it must be from 0 to 2\\^40"):
        call(-1, 64, 1)
    with pytest.raises(ValueError, match="0 to 9 for how codes are stored, got 10"):
        call(10, 64, 1)
    with pytest.raises(ValueError, match="0 to 2 for what scales are, got 3"):
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
    with pytest.raises(TypeError, match="multiply_quantized takes 20 arguments, got 1"):
        NATIVE.multiply_quantized(0)
    assert y.isnan().all()
