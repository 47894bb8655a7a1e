# SPDX-License-Identifier: Apache-2.0
"""The compiled check of a call against the full one, and both against plain Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.backends.lowering import lower
from nnfront.errors import RunError
from nnfront.ir import parse
from nnfront.runtime.bind_arguments import bind
from nnfront.runtime.execute import initial_frame
from nnfront.session import Session

sizes = st.integers(0, 4)
MIXED = """
def main[a: 1..3, b: %2, c](
    x: input float32[a, b], y: input float32[b, 3], z: input float32[a + b, c], k: input int64(c), t: input (float32[c], float32[a]),
) -> float32[a] {
    v: float32[a] = zeros(shape=(a,))
    return v
}
"""
MIXED_METHOD = Session(lower(parse(MIXED)), {})["main"]


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(sizes, sizes),
    st.tuples(sizes, sizes),
    st.tuples(sizes, sizes),
    st.integers(-1, 4),
    sizes,
    sizes,
)
def test_the_compiled_check_accepts_what_plain_python_accepts(x, y, z, k, s, t):
    args = (torch.ones(x), torch.ones(y), torch.ones(z), k, (torch.ones(s), torch.ones(t)))
    right = (
        1 <= x[0] <= 3
        and x[1] % 2 == 0
        and y == (x[1], 3)
        and z[0] == x[0] + x[1]
        and z[1] == k == s
        and t == x[0]
    )
    assert _accepts(lambda: MIXED_METHOD(*args)) == right
    assert _accepts(lambda: bind(MIXED_METHOD.program, args, {})) == right


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_compiled_check_and_the_full_one_agree(data):
    """Around a right call, so that both answers occur often."""
    a, b, c = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([0, 2])), data.draw(st.integers(0, 2))
    shapes = [[a, b], [b, 3], [a + b, c], [c], [a]]
    k = c
    for _ in range(data.draw(st.integers(0, 2))):
        shape = data.draw(st.sampled_from(shapes))
        shape[data.draw(st.integers(0, len(shape) - 1))] += data.draw(st.sampled_from([0, 1]))
    x, y, z, s, t = (torch.ones(shape) for shape in shapes)
    args = (x, y, z, k, (s, t))
    frame = initial_frame(MIXED_METHOD.program.slots)
    expected = _accepts(lambda: bind(MIXED_METHOD.program, args, {}))
    assert _accepts(lambda: MIXED_METHOD._check(frame, args)) == expected
    if expected:
        numbers = {str(b.symbol): frame[b.slot] for b in MIXED_METHOD.program.dims}
        assert numbers == {"a": x.shape[0], "b": x.shape[1], "c": z.shape[1]}


def _accepts(call) -> bool:
    try:
        call()
    except RunError:
        return False
    return True
