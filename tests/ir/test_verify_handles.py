# SPDX-License-Identifier: Apache-2.0
"""Rules V19 and V20: each is broken by an example that breaks it alone."""

from __future__ import annotations

import pytest
from verify_checks import HEADS, LAYER, only, rules

from nnfront.ir import (
    IRModule,
    parse,
    violations,
)

STATE = f"def f[batch, seq, max_seq](q: input {HEADS}, cache: state {LAYER}) -> {{result}} {{{{ {{body}} }}}}"


def test_v19_state_that_does_not_come_back() -> None:
    module = parse(STATE.format(result=HEADS, body="return q"))
    assert rules(module) == {"V19"}
    assert violations(module)[0].what == "V19: the result must be a tuple of a value and 1 written handles"


def test_v19_state_that_comes_back_in_another_place() -> None:
    module = parse(
        STATE.format(result=f"({LAYER}, {HEADS})", body=f"r: ({LAYER}, {HEADS}) = (cache, q) return r")
    )
    assert only(module).what == "V19: the state 'cache' does not come back in its place"


def handles(body: str, *, other: bool = False) -> IRModule:
    """A function over a cache that returns `r`; with `other`, it gets another pair of a tensor and a handle as well."""
    more = f", other: input ({HEADS}, {LAYER})" if other else ""
    return parse(f"""
        def f[batch, seq, max_seq](q: input {HEADS}, c: input bool[], cache: state {LAYER}{more}) -> ({HEADS}, {LAYER}) {{
            {body}
            return r
        }}
    """)


WRITE = f"({HEADS}, {LAYER}) = attention(q, q, q, cache)"


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (
            f"a: {WRITE} r: {WRITE} h: {LAYER} = a[1] u: ({LAYER},) = (h,)",
            "handle 'cache' is used again: 'a' used it up",
        ),
        (
            f"r: {WRITE} p: int64[batch, seq] = cache_positions(cache, seq=seq)",
            "handle 'cache' is read after 'r' used it up",
        ),
        (f"a: {WRITE} r: ({HEADS}, {LAYER}) = (q, cache)", "handle 'cache' is used again: 'a' used it up"),
        (
            f"a: {WRITE} h: {LAYER} = a[1] g: {LAYER} = a[1] r: ({HEADS}, {LAYER}) = (q, h)",
            "handle 'a[1]' is used again: 'h' used it up",
        ),
        (
            f"a: {WRITE} h: {LAYER} = a[1] r: ({HEADS}, {LAYER}) = a",
            "handle 'a[1]' is used again: 'h' used it up",
        ),
        (
            f"r: ({HEADS}, {LAYER}) = if c {{ w: {WRITE} yield w }} else {{ p: ({HEADS}, {LAYER}) = (q, cache) yield p }} "
            f"z: ({LAYER},) = (cache,)",
            "handle 'cache' is used again: 'w' used it up",
        ),
    ],
    ids=[
        "written twice",
        "read after the write",
        "returned after the write",
        "taken twice",
        "taken and kept",
        "used behind an if",
    ],
)
def test_v20_handle_that_is_used_up(body: str, problem: str) -> None:
    errors = [error.what for error in violations(handles(body))]
    assert errors[0] == f"V20: the {problem}"
    assert all(error.startswith("V20") for error in errors)


def test_v20_written_handle_that_is_lost() -> None:
    module = parse(f"""
        private def g[batch, seq, max_seq](q: input {HEADS}, cache: input {LAYER}) -> {HEADS} {{
            a: {WRITE}
            y: {HEADS} = a[0]
            return y
        }}
    """)
    assert only(module).what == "V20: the handle 'a[1]' is never passed on or given back"


def test_v20_state_that_is_lost() -> None:
    module = handles(f"r: ({HEADS}, {LAYER}) = other", other=True)
    assert only(module).what == "V20: the handle 'cache' is never passed on or given back"


def test_v20_only_one_branch_writes() -> None:
    module = handles(f"""
        y: {HEADS} = if c {{ w: {WRITE} h: {LAYER} = w[1] u: {HEADS} = w[0] t: ({LAYER},) = (h,) yield u }} else {{ yield q }}
        r: ({HEADS}, {LAYER}) = (y, cache)
    """)
    assert rules(module) == {"V20"}
    assert "V20: only one branch uses up the handle 'cache'" in [error.what for error in violations(module)]


@pytest.mark.parametrize(
    "body",
    [
        f"p: int64[batch, seq] = cache_positions(cache, seq=seq) r: {WRITE}",
        f"r: ({HEADS}, {LAYER}) = (q, cache)",
        f"h: {LAYER} = cache r: ({HEADS}, {LAYER}) = attention(q, q, q, h)",
        f"r: ({HEADS}, {LAYER}) = if c {{ w: {WRITE} yield w }} else {{ p: ({HEADS}, {LAYER}) = (q, cache) yield p }}",
    ],
    ids=["read before the write", "returned unwritten", "renamed", "passed on by the other branch"],
)
def test_v20_sound_uses_of_a_handle(body: str) -> None:
    assert violations(handles(body)) == []


def test_v20_input_may_merely_be_read() -> None:
    module = parse(f"""
        private def g[batch, seq, max_seq](q: input {HEADS}, cache: input {LAYER}) -> int64[batch, seq] {{
            a: int64[batch, seq] = cache_positions(cache, seq=seq)
            b: int64[batch, seq] = cache_positions(cache, seq=seq)
            return b
        }}
    """)
    assert violations(module) == []
