# SPDX-License-Identifier: Apache-2.0
"""The cheapest values to keep, against all possibilities tried one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront.passes.lifting.min_cut import min_cut


def kept_by(made, operands, read):
    """What must be kept if `made` is computed at load and everything else that is read, directly or not, on each call."""
    kept, pending = set(), list(read)
    while pending:
        node = pending.pop()
        if node in made:
            kept.add(node)
        else:
            pending.extend(operands[node])
    return kept


def possibilities(sizes, operands, read):
    """Every set of nodes that can be computed at load, with what is kept then and its bytes."""
    bases = {node for node in sizes if not operands[node]}
    rest = [node for node in sizes if operands[node]]
    for count in range(len(rest) + 1):
        for chosen in itertools.combinations(rest, count):
            made = bases | set(chosen)
            if all(set(operands[node]) <= made for node in chosen):
                kept = kept_by(made, operands, read)
                if all(sizes[node] is not None for node in kept):
                    yield sum(sizes[node] for node in kept), made, kept


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 7))
    operands, sizes = {}, {}
    for node in range(count):
        before = st.sampled_from(range(node)) if node else st.nothing()
        operands[node] = draw(st.lists(before, max_size=3, unique=True)) if node else []
        weight = st.integers(0, 6)
        sizes[node] = draw(weight if not operands[node] else st.one_of(weight, st.none()))
    read = draw(st.sets(st.sampled_from(range(count)), min_size=1))
    return sizes, operands, read


@settings(max_examples=100, deadline=None, derandomize=True)
@given(graphs())
def test_nothing_takes_fewer_bytes(graph):
    sizes, operands, read = graph
    kept = min_cut(sizes, operands, read)
    assert sum(sizes[node] for node in kept) == min(
        total for total, _, _ in possibilities(sizes, operands, read)
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(graphs())
def test_of_several_the_one_that_computes_most_at_load(graph):
    sizes, operands, read = graph
    kept = min_cut(sizes, operands, read)
    found = list(possibilities(sizes, operands, read))
    least = min(total for total, _, _ in found)
    most = max((made for total, made, _ in found if total == least), key=len)
    assert kept == kept_by(most, operands, read)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [((4, 4), {1}), ((4, 5), {0}), ((4, None), {0})],
    ids=["a draw moves", "growth stays", "what cannot be kept stays"],
)
def test_one_value_of_one_weight(sizes, kept):
    assert min_cut(dict(enumerate(sizes)), {0: [], 1: [0]}, [1]) == kept


def test_nothing_is_kept_for_what_nobody_reads():
    sizes = {0: 0, 1: None, 2: 0, 3: 0}
    assert min_cut(sizes, {0: [], 1: [0], 2: [], 3: [0, 1, 2]}, [1]) == {0}
