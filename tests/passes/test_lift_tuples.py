# SPDX-License-Identifier: Apache-2.0
"""Lifting through tuples: a field moves or stays by itself, whatever becomes of what stands beside it."""

from __future__ import annotations

import pytest
import torch
from lift_checks import check_lift

import nnfront

F = "float32[4, 4]"

# What `u` is, in a method with the weights w and v; `inner` returns a tuple, `first` takes one.
FUNCTIONS = f"""
private def first(x: input {F}, t: input ({F}, {F})) -> {F} {{
    u: {F} = t[0]
    y: {F} = matmul(x, u)
    return y
}}
private def second(x: input {F}, t: input ({F}, {F})) -> {F} {{
    y: {F} = @first(x, t)
    return y
}}
private def nested(x: input {F}, t: input (({F}, {F}), {F})) -> {F} {{
    s: ({F}, {F}) = t[0]
    y: {F} = @first(x, s)
    return y
}}
private def unread(x: input {F}, t: input ({F}, {F})) -> {F} {{
    y: {F} = tanh(x)
    return y
}}
private def inner(z: input {F}, w: input {F}) -> ({F}, {F}) {{
    o: {F} = add(z, 1.0)
    t: ({F}, {F}) = (o, w)
    return t
}}
private def pair(w: input {F}, n: input int64) -> ({F}, {F}) {{
    t: ({F}, {F}) = (w, w)
    return t
}}
"""
BODIES = {
    "a field without weights": f"t: ({F}, {F}) = (z, w) u: {F} = t[0] y: {F} = matmul(x, u)",
    "a tuple under two names": f"t: ({F}, {F}) = (z, w) s: ({F}, {F}) = t u: {F} = s[0] y: {F} = matmul(x, u)",
    "a tuple in a tuple": f"t: ({F}, {F}) = (z, w) s: (({F}, {F}), {F}) = (t, v) r: ({F}, {F}) = s[0] u: {F} = r[0] y: {F} = matmul(x, u)",
    "a tuple handed over": f"t: ({F}, {F}) = (z, w) y: {F} = @first(x, t)",
    "a tuple handed on": f"t: ({F}, {F}) = (z, w) y: {F} = @second(x, t)",
    "a nested tuple handed on": f"t: ({F}, {F}) = (z, w) s: (({F}, {F}), {F}) = (t, v) y: {F} = @nested(x, s)",
    "a tuple that is not read": f"t: ({F}, {F}) = (z, w) y: {F} = @unread(x, t)",
    "a tuple that comes back": f"t: ({F}, {F}) = @inner(z, w) u: {F} = t[0] y: {F} = matmul(x, u)",
    "a tuple that comes back and goes on": f"t: ({F}, {F}) = @inner(z, w) y: {F} = @second(x, t)",
    "a field that grows": f"a: float32[8, 4] = concat(w, w) t: (float32[8, 4], {F}) = (a, v) u: float32[8, 4] = t[0] s: {F} = matmul(x, x) r: float32[4, 8] = permute_dims(u, axes=(1, 0)) q: float32[4, 8] = matmul(s, r) p: {F} = matmul(q, u) y: {F} = add(p, w)",
    "in a branch": f"t: ({F}, {F}) = (z, w) y: {F} = if flag {{ u: {F} = t[0] p: {F} = matmul(x, u) yield p }} else {{ r: {F} = t[0] yield r }}",
    "a weight that nobody reads": f"t: ({F}, {F}) = @pair(w, 3) u: {F} = t[0] s: {F} = permute_dims(u, axes=(1, 0)) y: {F} = matmul(x, s)",
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("allow_growth", [False, True])
def test_a_field_does_not_need_what_stands_beside_it(body, allow_growth):
    text = f"""{FUNCTIONS}
    def main(x: input {F}, flag: input bool, w: weight {F}, v: weight {F}) -> {F} {{
        z: {F} = zeros(shape=(4, 4))
        {BODIES[body]}
        return y
    }}
    """
    lifted = check_lift(text, allow_growth=allow_growth)
    assert "v" not in [p.name for p in lifted["main"].weights]
    weights = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}
    x = torch.randn(4, 4)
    before, after = (
        nnfront.compile(ir).load(weights)["main"](x, True) for ir in (nnfront.ir.parse(text), lifted)
    )
    torch.testing.assert_close(after, before)


def test_a_field_without_weights_leaves_nothing_of_the_tuple():
    check_lift(
        f"""
        def main(x: input {F}, w: weight {F}) -> {F} {{
            z: {F} = zeros(shape=(4, 4))
            t: ({F}, {F}) = (z, w)
            u: {F} = t[0]
            y: {F} = matmul(x, u)
            return y
        }}
        """,
        f"""
        transform def main_transform_params(w: weight {F}) -> {{}} {{
            results: {{}} = {{}}
            return results
        }}
        def main(x: input {F}) -> {F} attrs(transform="main_transform_params") {{
            z: {F} = zeros(shape=(4, 4))
            u: {F} = z
            y: {F} = matmul(x, u)
            return y
        }}
        """,
    )


def test_a_field_of_a_tuple_is_handed_over_without_the_rest():
    check_lift(
        f"""
        private def first(x: input {F}, t: input ({F}, {F})) -> {F} {{
            u: {F} = t[0]
            y: {F} = matmul(x, u)
            return y
        }}
        def main(x: input {F}, w: weight {F}) -> {F} {{
            z: {F} = zeros(shape=(4, 4))
            t: ({F}, {F}) = (z, w)
            y: {F} = @first(x, t)
            return y
        }}
        """,
        f"""
        private def first(x: input {F}, u: transformed {F}) -> {F} {{
            y: {F} = matmul(x, u)
            return y
        }}
        transform def main_transform_params(w: weight {F}) -> {{}} {{
            results: {{}} = {{}}
            return results
        }}
        def main(x: input {F}) -> {F} attrs(transform="main_transform_params") {{
            z: {F} = zeros(shape=(4, 4))
            y: {F} = @first(x, z)
            return y
        }}
        """,
    )


def test_a_number_that_a_function_takes_and_does_not_read_is_still_there():
    lifted = check_lift(
        f"""
        private def layer[n](x: input {F}, count: input int64(n)) -> {F} {{
            y: {F} = tanh(x)
            return y
        }}
        def main[n](x: input {F}, count: weight int64(n)) -> {F} {{
            y: {F} = @layer(x, count)
            return y
        }}
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["count"]
