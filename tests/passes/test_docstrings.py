# SPDX-License-Identifier: Apache-2.0
"""What the docstring of each pass shows is what the pass does."""

from __future__ import annotations

import re
import sys

import pytest
from pass_checks import expect, expect_same_results, module

from nnfront.passes import PASSES

# Passes that give inputs a value, make an argument of one, or take other weights, change the signature, and other dtypes round otherwise; the
# others keep what is computed.
CHANGING = {
    "add_adapters",
    "apply_dtype_policy",
    "bind_dims",
    "bind_params",
    "external_attention",
    "input_moments",
    "quantize_activations",
    "quantize_weights",
    "shard_weights",
    "split_embedding",
}


def block(name, doc):
    """The indented lines behind `name:`."""
    found = re.search(rf"^{name}:\n((?:    .*\n|\n(?=    ))+)", doc, re.MULTILINE)
    assert found, f"there is no '{name}:'"
    return found[1]


@pytest.mark.parametrize("name", sorted(PASSES))
def test_docstring_shows_what_the_pass_does(name):
    doc = sys.modules[f"nnfront.passes.{name}"].__doc__
    example = re.search(r"^example: (.*)$", doc, re.MULTILINE)
    before = module(block("before", doc))
    after = eval(example[1] if example else f"{name}(ir)", {name: PASSES[name], "ir": before})
    expect(after, block("after", doc))
    if name not in CHANGING:
        expect_same_results(before, after)


@pytest.mark.parametrize("name", sorted(PASSES))
def test_a_pass_says_in_a_line_what_it_does(name):
    assert PASSES[name].__doc__.splitlines()[0].endswith(".")
