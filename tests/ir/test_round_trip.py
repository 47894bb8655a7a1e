# SPDX-License-Identifier: Apache-2.0
"""Whatever can be printed is read back as the same module, and prints as the same text."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ir_modules import modules, renamed

from nnfront.errors import ParseError
from nnfront.ir import IRModule, first_difference, parse, parse_function

PROPERTY = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@PROPERTY
@given(modules())
def test_text_reads_back_as_the_same_module(module: IRModule) -> None:
    text = str(module)
    again = parse(text)
    assert str(again) == text
    assert first_difference(module, again) is None
    assert again == module


@PROPERTY
@given(modules())
def test_each_function_reads_back_by_itself(module: IRModule) -> None:
    for function in module.functions:
        assert parse_function(str(function)) == function


@PROPERTY
@given(modules())
def test_provenance_is_in_the_text_that_asks_for_it_only(module: IRModule) -> None:
    text = module.text(provenance=True)
    again = parse(text)
    assert again == module
    assert str(again) == str(module)


@PROPERTY
@given(modules())
def test_equality_is_reflexive_and_ignores_local_names(module: IRModule) -> None:
    assert module == module.with_functions(module.functions)
    assert first_difference(module, renamed(module, "local_")) is None


@PROPERTY
@given(modules(), st.data())
def test_modules_differ_exactly_if_their_texts_do(module: IRModule, data: Any) -> None:
    module = renamed(module, "local_")
    text = str(module)
    tokens = text.split(" ")
    at = data.draw(st.integers(0, len(tokens) - 1))
    tokens[at] = data.draw(st.sampled_from([*tokens, "7", "float16[7],", "local_0,"]))
    try:
        changed = renamed(parse(" ".join(tokens)), "local_")
    except ParseError:
        return
    assert (first_difference(module, changed) is None) == (str(changed) == text)


@PROPERTY
@given(modules(), st.data())
def test_mangled_text_is_a_parse_error_or_a_module(module: IRModule, data: Any) -> None:
    text = str(module)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        end = at + data.draw(st.integers(0, 12))
        text = (
            text[:at]
            + data.draw(
                st.sampled_from(["", "(", "]", '"', "[0", " if ", "9" * 30, "-", "@", "\\", "é", "\n", "#"])
            )
            + text[end:]
        )
    with contextlib.suppress(ParseError):
        str(parse(text))
