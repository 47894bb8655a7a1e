# SPDX-License-Identifier: Apache-2.0
"""Products of many rows with a weight in few bits, by matrix tiles, against float64 over what the weight is dequantised to."""

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_case import BLOCKS, TABLES, WAYS, Case, format_of

from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.quantized_gemv import find_many_rows
from nnfront.quant_format import BLOCK_FORMATS, FORMATS

has_tiles = pytest.mark.skipif(NATIVE is None or not NATIVE.has_tiles(), reason="no matrix tiles")


@has_tiles
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_many_rows_agree_with_float64_wherever_operands_lie(data: st.DataObject):
    stored, group = data.draw(st.sampled_from(WAYS + TABLES + BLOCKS))
    columns = data.draw(
        st.sampled_from([128, 384, 1024, 1152])
        if stored in BLOCK_FORMATS
        else st.sampled_from([1, 31, 65, 1000, 1056, 2100])
        if group is None
        else st.sampled_from([1, 3, 8, 33, 65]).map(lambda n: n * group)
    )
    outputs, bias = data.draw(st.sampled_from([1, 15, 17, 33, 140])), data.draw(st.booleans())
    rows, offset = data.draw(st.sampled_from([1, 16, 33, 65, 100, 513])), data.draw(st.integers(0, 63))
    case = Case(
        stored, group, rows, columns, outputs, offset, most_zero=255, are_wide=data.draw(st.booleans())
    )
    case.check(case.run_many(bias), bias)


@has_tiles
@pytest.mark.parametrize(("stored", "group"), few_of(WAYS + TABLES + BLOCKS, 4), ids=str)
def test_threads_share_what_is_dequantised_and_change_nothing(stored, group):
    case = Case(stored, group, 70, 1152, 300)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            results.append(case.run_many())
    finally:
        torch.set_num_threads(before)
    case.check(results[0])
    assert all(torch.equal(result, results[0]) for result in results)


@has_tiles
def test_what_is_no_number_stays_where_it_is():
    case = Case("int4", 32, 70, 96, 40)
    case.x[3, 95], case.x[69, 0] = torch.nan, torch.inf
    y = case.run_many()
    assert y[3].isnan().all()
    assert not y[69].isfinite().any()
    assert y[[*range(3), *range(4, 69)]].isfinite().all()


@has_tiles
def test_no_rows_and_no_outputs_give_none():
    multiply = find_many_rows(NATIVE, FORMATS["int8"])
    weight, scales = torch.ones(3, 64, dtype=torch.int8), torch.ones(3, 1).bfloat16()
    assert multiply(torch.ones(0, 64).bfloat16(), weight, scales, None, None).shape == (0, 3)
    assert multiply(torch.ones(9, 64).bfloat16(), weight[:0], scales[:0], None, None).shape == (9, 0)


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
def test_without_tiles_there_is_no_kernel_for_many_rows():
    assert find_many_rows(None, FORMATS["int8"]) is None
    assert find_many_rows(NATIVE, FORMATS["int8"], with_tiles=False) is None
    assert find_many_rows(NATIVE, FORMATS["uint8"]) is None
    assert (find_many_rows(NATIVE, format_of("int4", 64)) is None) == (not NATIVE.has_tiles())


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.usefixtures("instructions")
def test_wrong_numbers_are_refused_before_memory_is_touched():
    y, work = torch.full((512,), torch.nan), torch.zeros(4096)

    def call(stored: int, columns: int, groups: int, together: int) -> None:
        sizes = stored, 1, columns, 4, groups, 0, 0, 0, 0, 0, together, 1, 1.0
        NATIVE.multiply_dequantized(*sizes, *[torch.zeros(512)] * 4, None, work, y)

    with pytest.raises(ValueError, match="0 to 9 for how values are stored, got 10"):
        call(10, 64, 1, 1)
    with pytest.raises(ValueError, match="groups of 32, 64 or 128, got 3 of 100 columns"):
        call(4, 100, 3, 1)
    with pytest.raises(ValueError, match="rows to multiply together, got 0"):
        call(0, 64, 1, 0)
    if not NATIVE.has_tiles():
        with pytest.raises(ValueError, match="matrix tiles, this processor has none"):
            call(0, 64, 1, 1)
    assert y.isnan().all()
