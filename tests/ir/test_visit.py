# SPDX-License-Identifier: Apache-2.0
"""A mutator keeps the identity of all that it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from ir_modules import modules

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.ir import (
    OPS,
    Atom,
    Binding,
    Call,
    Expr,
    If,
    IRModule,
    Mutator,
    Scalar,
    Var,
    parse_function,
    substitute_atoms,
    used_vars,
)

FUNCTION = parse_function("""
    def f(c: input bool[], x: input float32[2], w: weight float32[2]) -> float32[2] {
        a: float32[2] = add(x, w)
        b: float32[2] = if c {
            d: float32[2] = multiply(a, 2.0)
            e: float32[2] = add(d, x)
            yield e
        } else {
            yield w
        }
        t: (float32[2], float32[2]) = (b, a)
        p: float32[2] = t[0]
        m: float32[2] = match_shape(p, float32[2])
        return m
    }
""")


def test_used_vars_of_an_if_are_those_that_it_does_not_bind() -> None:
    chosen = FUNCTION.bindings[1].value
    assert [var.name for var in used_vars(chosen)] == ["c", "a", "x", "w"]


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(modules())
def test_mutator_that_does_nothing_returns_the_same_function(module: IRModule) -> None:
    assert all(Mutator().function(function) is function for function in module.functions)


class AddIsMultiply(Mutator):
    def expr(self, expr: Expr) -> Expr:
        expr = super().expr(expr)
        if (
            isinstance(expr, Call)
            and expr.op is OPS["add"]
            and isinstance(expr.args[0], Var)
            and expr.args[0].name == "d"
        ):
            return Call(OPS["multiply"], expr.args)
        return expr


def test_mutator_keeps_what_it_leaves_alone() -> None:
    changed = AddIsMultiply().function(FUNCTION)
    assert str(changed) == str(FUNCTION).replace("add(d, x)", "multiply(d, x)")
    assert [new is old for new, old in zip(changed.bindings, FUNCTION.bindings, strict=True)] == [
        True,
        False,
        True,
        True,
        True,
    ]
    new, old = changed.bindings[1].value, FUNCTION.bindings[1].value
    assert isinstance(new, If)
    assert isinstance(old, If)
    assert new.otherwise is old.otherwise
    assert new.then.bindings[0] is old.then.bindings[0]
    assert changed.bindings[1].var is FUNCTION.bindings[1].var
    assert changed.params is FUNCTION.params


def test_mutator_may_drop_and_replace_bindings() -> None:
    class Forward(Mutator):
        """Uses of a field of a tuple become uses of what was put into it."""

        def binding(self, binding: Binding) -> Sequence[Binding]:
            if binding.var.name == "p":
                self.replaced[binding.var] = self.fields[0]
                return ()
            if binding.var.name == "t":
                self.fields = [self.atom(atom) for atom in binding.value.fields]  # type: ignore[union-attr]
                return ()
            return super().binding(binding)

    changed = Forward().function(FUNCTION)
    assert [str(line).strip() for line in str(changed).split("\n")[-4:]] == [
        "}",
        "m: float32[2] = match_shape(b, float32[2])",
        "return m",
        "}",
    ]


def test_mutator_replaces_the_result() -> None:
    mutator = Mutator()
    mutator.replaced[FUNCTION.bindings[-1].var] = FUNCTION.params[1]
    changed = mutator.function(FUNCTION)
    assert changed.result is FUNCTION.params[1]
    assert changed.bindings[:4] == FUNCTION.bindings[:4]


def test_substitution_reaches_into_branches_and_shares_the_rest() -> None:
    x, w = FUNCTION.params[1:]
    chosen = FUNCTION.bindings[1].value
    changed = substitute_atoms(chosen, {w: Scalar(1.0)})
    assert isinstance(chosen, If)
    assert isinstance(changed, If)
    assert changed.then is chosen.then
    assert isinstance(changed.otherwise.result, Scalar)
    assert substitute_atoms(chosen, {FUNCTION.bindings[4].var: x}) is chosen
    assert substitute_atoms(chosen, {}) is chosen


def test_substitution_of_operands_of_every_expression() -> None:
    one = Scalar(1.0)
    mapping: dict[Var, Atom] = {var: one for var in (*FUNCTION.params, *(b.var for b in FUNCTION.bindings))}
    for binding in FUNCTION.bindings:
        assert list(used_vars(substitute_atoms(binding.value, mapping))) == []
