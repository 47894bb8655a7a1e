# SPDX-License-Identifier: Apache-2.0
"""Every kernel in C, by the table that says what it takes: it is not called with one byte less, nor with sizes that make no sense."""

from __future__ import annotations

import random

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import ARGUMENTS, bits, call, call_by_row, drawn, may_be_absent, needed, operands_of

from nnfront.backends.cpu.extension import KERNELS, NATIVE
from nnfront.backends.cpu.tape_builder import OFFSET_BITS, ROW

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]

EACH_WAY = [(kernel, call) for kernel in ARGUMENTS] + few_of(
    [(kernel, call_by_row) for kernel in ARGUMENTS], 6
)


def test_the_table_is_read_as_c_reads_it():
    assert set(KERNELS) == set(ARGUMENTS)
    for kernel, arguments in ARGUMENTS.items():
        assert [name for _, name, _ in arguments] == list(KERNELS[kernel])
        assert all(need for kind, _, need in arguments if kind in ("IN", "OUT"))


@pytest.mark.parametrize(("kernel", "run"), EACH_WAY)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_an_operand_that_is_a_byte_too_small_is_refused_and_nothing_is_written(kernel, run, seed):
    torch.manual_seed(seed)
    sizes = drawn(kernel, random.Random(seed))
    operands = operands_of(kernel, sizes)
    before = bits(operands)
    for name, count in needed(kernel, sizes).items():
        if not count or operands[name] is None:
            continue
        for less in {1, min(2, count), max(count // 2, 1), count}:
            short = operands | {name: operands[name][: count - less].clone()}
            with pytest.raises(
                ValueError, match=f"^{kernel}: {name} has {count - less} bytes, {count} are needed$"
            ):
                run(kernel, sizes, short)
        if name not in may_be_absent(kernel):
            with pytest.raises(ValueError, match=f"^{kernel}: {name} has 0 bytes, {count} are needed$"):
                run(kernel, sizes, operands | {name: None})
    assert bits(operands) == before
    run(kernel, sizes, operands)


@pytest.mark.parametrize(("kernel", "run"), EACH_WAY)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_sizes_that_are_negative_or_huge_are_refused(kernel, run, seed):
    torch.manual_seed(seed)
    sizes = drawn(kernel, random.Random(seed))
    operands = operands_of(kernel, sizes)
    before = bits(operands)
    for name in (name for kind, name, _ in ARGUMENTS[kernel] if kind == "SIZE"):
        for wrong in (-1, -(1 << 40), -(1 << 63), (1 << 40) + 1, 1 << 62, (1 << 63) - 1):
            with pytest.raises(
                ValueError, match=rf"^{kernel}: {name} is {wrong}, it must be from 0 to 2\^40$"
            ):
                run(kernel, sizes | {name: wrong}, operands)
    assert bits(operands) == before


# Of these a kernel's need does not grow with the number.
FREE = {
    "threads",
    "next_bias_token",
    "window",
    "is_wide",
    "is_centered",
    "is_interleaved",
    "has_wide_sinks",
    "next_bias",
    "next_bias_head",
    "bias_bytes",
    "positions",
    "activation",
    "gate",
    "with_tiles",
    "is_rounded",
    "is_wide_state",
    "has_gates_of_keys",
    "is_normed",
    "next_q",
    "next_k",
    "next_v",
    "next_row",
    "next_table",
    "stored",
    "operation",
    "is_wide_x",
    "is_transposed",
    *(f"other{i}" for i in range(4)),
    *(f"{name}kind" for name in ("", "x_", "other_", "y_", "scale_")),
    *(f"values{i}" for i in range(4)),
}


@pytest.mark.parametrize("kernel", ARGUMENTS)
def test_sizes_whose_product_is_beyond_all_memory_are_refused(kernel):
    sizes = drawn(kernel, random.Random(0))
    operands = operands_of(kernel, sizes)
    unused = FREE if operands.get("pages") is not None else FREE | {"columns", "pool"}
    unused = unused | {"groups"} if sizes.get("stored", 0) > 5 else unused
    names = [name for kind, name, _ in ARGUMENTS[kernel] if kind == "SIZE" and name not in unused]
    for chosen in ([name] for name in names), [names]:
        for some in chosen:
            with pytest.raises(ValueError, match=r"are needed$|groups of|heads of|a packed weight"):
                call(kernel, sizes | dict.fromkeys(some, 1 << 40), operands)


def test_a_token_that_has_no_place_is_refused():
    sizes = drawn("append_and_attend", random.Random(0))
    operands = operands_of("append_and_attend", sizes)
    before = bits({name: operands[name] for name in ("keys", "values", "y")})
    for length in (0, -1, -(1 << 31)):
        lengths = torch.full((sizes["batch"],), length, dtype=torch.int32)
        with pytest.raises(
            ValueError, match=rf"at least {sizes['tokens']} tokens in each sequence, got {length}"
        ):
            call("append_and_attend", sizes, operands | {"lengths": lengths})
    with pytest.raises(ValueError, match="a cache with room for a token"):
        call("append_and_attend", sizes | {"capacity": 0}, operands)
    assert bits({name: operands[name] for name in ("keys", "values", "y")}) == before


def test_what_is_no_memory_of_the_cpu_is_no_operand():
    assert NATIVE is not None
    both, y = torch.zeros(1, 4).bfloat16(), torch.zeros(1, 2).bfloat16()
    NATIVE.gate(1, 2, 0, 1, both, y)
    for wrong, message in [
        (y.to("meta"), "meta"),
        (y.to_sparse(), "storage"),
        ("here", "str"),
        ((both, -1), "a place -1 bytes into 8"),
        ((both, 9), "a place 9 bytes into 8"),
        ((both, 1), "gate: both has 7 bytes, 8 are needed"),
        ((both, 0, 0), "a tensor and an offset, got a tuple of 3"),
        (both[:, :1].expand(1, 4), "gate: both has 2 bytes, 8 are needed"),
        (both.float().to("meta").bfloat16(), "meta"),
    ]:
        with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
            NATIVE.gate(1, 2, 0, 1, wrong, y)
    with pytest.raises(TypeError):
        NATIVE.run_sequence()
    with pytest.raises(OverflowError):
        NATIVE.run_sequence(torch.zeros(1, ROW, dtype=torch.int64), 1 << 64)


def test_rows_that_are_no_rows_are_refused():
    assert NATIVE is not None
    multiply, x = list(KERNELS).index("multiply"), torch.zeros(64)
    place = 1 << OFFSET_BITS
    for row, message in [
        ([len(KERNELS)], f"there is no kernel {len(KERNELS)}"),
        ([-1], "there is no kernel -1"),
        ([multiply, 0, 1, 4, 1, 0, 4, 1, 1, x.data_ptr()], "multiply: argument 7 is no place"),
        ([multiply, 1 << 7, 1, 4, 1, 0, 4, 1, 1, 2 * place], "multiply: there is no memory 2"),
        ([multiply, 1 << 7, 1, 4, 1, 0, 4, 1, 1, -place], "multiply: there is no memory -1"),
        ([multiply, 1 << 7, 1, 4, 1, 0, 4, 1, 1, place + 257], "a place 257 bytes into 256"),
        ([multiply, 1, place], "multiply: argument 0 is no number"),
        ([multiply, 1 << 7, 1, 4, 1, 0, 4, 1, 1, 0], "a number is no place"),
    ]:
        rows = torch.tensor([row + [0] * (ROW - len(row))], dtype=torch.int64)
        with pytest.raises(ValueError, match=f"^{message}$"):
            NATIVE.run_sequence(rows, 7 if message == "a number is no place" else None, x)
