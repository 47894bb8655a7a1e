# SPDX-License-Identifier: Apache-2.0
"""The CRC-32 of the extension is zlib's, of any bytes anywhere behind any others."""

import random
import zlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nnfront.artefact.integrity import crc32

NOISE = random.Random(0).randbytes(9000)

pytestmark = pytest.mark.skipif(crc32 is zlib.crc32, reason="the extension was not built for this processor")


@given(begin=st.integers(0, 70), size=st.integers(0, 5000), crc=st.integers(0, 2**32 - 1))
@example(0, 63, 0)
@example(1, 64, 0)
@example(2, 65, 2**32 - 1)
@example(3, 127, 1)
@example(15, 128, 1 << 31)
@settings(max_examples=200, deadline=None)
def test_it_is_zlibs(begin: int, size: int, crc: int) -> None:
    data = memoryview(NOISE)[begin : begin + size]
    assert crc32(data, crc) == zlib.crc32(data, crc)


@given(cuts=st.lists(st.integers(0, len(NOISE)), max_size=6).map(sorted))
@settings(max_examples=60, deadline=None)
def test_pieces_give_what_the_whole_gives(cuts: list[int]) -> None:
    crc = 0
    for begin, end in zip([0, *cuts], [*cuts, len(NOISE)], strict=True):
        crc = crc32(NOISE[begin:end], crc)
    assert crc == zlib.crc32(NOISE)


def test_bytes_that_do_not_differ_from_none_count() -> None:
    assert [crc32(bytes(size), 0) for size in range(300)] == [zlib.crc32(bytes(size)) for size in range(300)]


def test_other_things_than_bytes_are_refused() -> None:
    with pytest.raises(TypeError):
        crc32([1, 2], 0)  # type: ignore[arg-type]
