# SPDX-License-Identifier: Apache-2.0
"""Storage of quantised weights: exact inverses, every nibble in every lane, and the unpacking assembly against it."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nnfront_kernels import KernelError
from nnfront_kernels.nibbles import UNPACK_BF16, UNPACK_BF16_FROM, UNPACK_FP16, UNPACK_FP16_FROM
from nnfront_kernels.quantized import (
    GROUPS,
    dequantize_int4,
    dequantize_int8,
    pack_int4,
    unpack_int4,
)


@pytest.mark.parametrize("group", GROUPS)
def test_every_nibble_in_every_lane_survives_packing(group):
    # Row r, column k holds (r + k) % 16: each column sees each value.
    nibbles = (torch.arange(16)[:, None] + torch.arange(2 * group)[None, :]) % 16
    assert torch.equal(unpack_int4(pack_int4(nibbles, group), group).long(), nibbles)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 5),
    groups=st.integers(0, 4),
    group=st.sampled_from(GROUPS),
    seed=st.integers(0, 2**31),
)
def test_unpack_undoes_pack(rows, groups, group, seed):
    nibbles = torch.randint(0, 16, (rows, groups * group), generator=torch.Generator().manual_seed(seed))
    packed = pack_int4(nibbles, group)
    assert packed.shape == (rows, groups * group // 2)
    assert torch.equal(unpack_int4(packed, group).long(), nibbles)


@settings(max_examples=20, deadline=None)
@given(group=st.sampled_from(GROUPS), seed=st.integers(0, 2**31))
def test_pack_undoes_unpack(group, seed):
    packed = torch.randint(0, 256, (3, group), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    assert torch.equal(pack_int4(unpack_int4(packed, group), group), packed)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 31])
def test_a_weight_lies_where_the_docstring_says(group, k):
    nibbles = torch.zeros(1, 2 * group, dtype=torch.long)
    nibbles[0, group + k if k < group // 2 else k] = 9
    byte = k % (group // 2) // 4 * 4 + {0: 0, 1: 2, 2: 1, 3: 3}[k % 4]
    want = torch.zeros(1, group, dtype=torch.uint8)
    want[0, byte + (group // 2 if k < group // 2 else 0)] = 9 << (0 if k < group // 2 else 4)
    assert torch.equal(pack_int4(nibbles, group), want)


def run_assembly(text: str, word: torch.Tensor, dtype: torch.dtype, off: int = 0) -> list[torch.Tensor]:
    """The outputs $0..$3 of the unpacking assembly for int32 words, each as pairs of `dtype` [..., 2]; `off`: what a pair is moved by."""
    pair = torch.tensor([off, off], dtype=dtype).view(torch.uint16).long()
    registers = {"$4": word, "$5": pair[0] | pair[1] << 16}

    def value(name: str) -> torch.Tensor:
        return (
            registers[name]
            if name in registers
            else torch.tensor(int(name, 16) if "x" in name else int(name))
        )

    def lanes(bits: torch.Tensor) -> torch.Tensor:
        return torch.stack([bits & 0xFFFF, bits >> 16 & 0xFFFF], -1).to(torch.uint16).view(dtype)

    for line in text.strip("{} \n").split(";"):
        opcode, _, operands = line.strip().partition(" ")
        names = [name.strip() for name in operands.split(",")]
        if opcode == "shr.u32":
            registers[names[0]] = (value(names[1]) & 0xFFFFFFFF) >> value(names[2])
        elif opcode == "lop3.b32":
            assert names[4] == "0xEA"  # the truth table of (a & b) | c
            registers[names[0]] = (value(names[1]) & value(names[2])) | value(names[3])
        elif opcode == "mov.b32":
            registers[names[0]] = value(names[1])
        elif opcode == "fma.rn.bf16x2":
            a, b, c = (lanes(value(name)).double() for name in names[1:])
            registers[names[0]] = (a * b + c).to(dtype)
        elif opcode == "sub.f16x2":
            registers[names[0]] = lanes(value(names[1])) - lanes(value(names[2]))
        else:
            assert opcode in ("", ".reg"), f"the model has no {opcode}"
    return [registers[f"${i}"] for i in range(4)]


@pytest.mark.parametrize(
    ("text", "dtype", "own"),
    [
        (UNPACK_BF16.value, torch.bfloat16, None),
        (UNPACK_FP16.value, torch.float16, None),
        (UNPACK_BF16_FROM.value, torch.bfloat16, lambda zero: -128 - zero),
        (UNPACK_FP16_FROM.value, torch.float16, lambda zero: 1024 + zero),
    ],
    ids=["bf16", "fp16", "bf16 zero points", "fp16 zero points"],
)
def test_the_assembly_unpacks_every_byte_in_every_lane(text, dtype, own):
    group = 32
    nibbles = (
        torch.arange(256)[:, None] * torch.tensor([1, 3, 5, 7] * 8)[None, :] + torch.arange(group)
    ) % 16
    nibbles[:, 16:] = (torch.arange(256)[:, None] // 16 + torch.arange(16)) % 16
    words = pack_int4(nibbles, group).view(torch.int32).long() & 0xFFFFFFFF  # [256, 4]
    for zero in (8,) if own is None else range(17):
        out = run_assembly(text, words, dtype, 0 if own is None else own(zero))
        low, high = torch.cat(out[:2], -1), torch.cat(out[2:], -1)  # the element order of pack=4
        assert torch.equal(low.flatten(1).long(), nibbles[:, :16] - zero)
        assert torch.equal(high.flatten(1).long(), nibbles[:, 16:] - zero)


def test_the_assembly_has_one_instruction_for_each_pair_and_step():
    # 3 shifts, 4 lop3 and 4 subtractions for eight weights; the constants stay outside of the loop.
    opcodes = re.findall(r"^(\w+)\.", UNPACK_FP16.value, re.MULTILINE)
    assert {name: opcodes.count(name) for name in set(opcodes)} == {"shr": 3, "lop3": 4, "sub": 4, "mov": 1}


def stored(kind: torch.dtype, group: int, groups: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of two rows in groups, and where the scales [K // G, N] of each are."""
    low, high = (0, 16) if kind == torch.uint8 else (-128, 128)
    q = torch.randint(low, high, (2, groups * group), generator=torch.Generator().manual_seed(0)).to(kind)
    return q, (torch.arange(groups * group) // group).expand(2, -1)


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_int4_stands_for_what_is_above_its_zero_point_times_its_scale(group, zero_points):
    nibbles, at = stored(torch.uint8, group)
    scales, zeros = torch.rand(4, 2), torch.randint(0, 16, (4, 2), dtype=torch.uint8)
    dense = dequantize_int4(pack_int4(nibbles, group), scales, zeros if zero_points else None, group)
    middle = zeros.float().T.gather(1, at) if zero_points else 8
    assert torch.equal(dense, (nibbles.float() - middle) * scales.T.gather(1, at))


@pytest.mark.parametrize("groups", [1, 4])
def test_int8_stands_for_itself_times_its_scale(groups):
    q, at = stored(torch.int8, 32, groups)
    scales = torch.rand(groups, 2)
    assert torch.equal(dequantize_int8(q, scales), q.float() * scales.T.gather(1, at))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack_int4(torch.zeros(2, 48), 32), r"int4 groups are 32, 64 or 128 and divide K, got group 32 and shape \[2, 48\]"),
        (lambda: pack_int4(torch.full((1, 32), 16), 32), r"int4 values must be in 0..15, got 16..16"),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_refused(call, message):
    with pytest.raises(KernelError, match=message):
        call()
