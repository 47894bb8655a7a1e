# SPDX-License-Identifier: Apache-2.0
"""The driver: declarations in the place of primitive functions, checks after every pass, dumps, pipelines."""

from __future__ import annotations

import functools

import pytest
from pass_checks import module

from nnfront.errors import PassError, VerifyError
from nnfront.ir import IRModule, first_difference, parse
from nnfront.passes import PIPELINES, bind_dims, canonicalize, run
from nnfront.passes.base import Pass
from nnfront.passes.effects import Declaration, impure_functions

# Work that every pass would love to change, in functions that are not theirs.
POISON = """
    again: float32[n, 4] = reshape(x, shape=(n, 4))
    dead: float32[n, 4] = exp(x)
    twice: float32[n, 4] = exp(x)
    t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    u: float32[4, 4] = permute_dims(t, axes=(1, 0))
    half: float32[] = multiply(const(float32[], [4.0]), 0.5)
    h: float32[n, 4] = linear(again, u, None)
    g: float32[n, 4] = silu(h)
    y: float32[n, 4] = multiply(g, half)
    return y
"""
MODULE = f"""
private def unused(x: input float32[4]) -> float32[4] {{
    return x
}}
fused def kernel[n](x: input float32[n, 4], w: input float32[4, 4]) -> float32[n, 4] {{{POISON}}}
external def plugin[n](x: input float32[n, 4], w: input float32[4, 4]) -> float32[n, 4] {{{POISON}}}
private def body[n](x: input float32[n, 4], w: input float32[4, 4]) -> float32[n, 4] {{{POISON}}}
def main[n](x: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {{
    a: float32[n, 4] = @kernel(x, w)
    b: float32[n, 4] = @plugin(a, w)
    c: float32[n, 4] = @body(b, w)
    return c
}}
"""


def spoiled(ir):
    """A module with every function emptied."""
    return ir.with_functions(
        f.with_(bindings=(), result=f.params[0]) for f in ir.functions if f.name != "plugin"
    )


def test_a_pass_sees_a_declaration_and_what_it_does_to_it_is_undone():
    ir = module(MODULE)
    seen: list[IRModule] = []

    def spoil(ir: IRModule) -> IRModule:
        """Spoil everything."""
        seen.append(ir)
        return spoiled(ir)

    after = Pass(spoil, sees_primitive=False)(ir)
    assert isinstance(seen[0]["kernel"], Declaration)
    assert seen[0]["kernel"].bindings == ()
    assert seen[0]["kernel"].type == ir["kernel"].type
    assert after["kernel"] is ir["kernel"]
    assert after["plugin"] is ir["plugin"]
    assert after["body"].bindings == ()


def test_a_pass_that_asks_may_change_fused_functions_and_drop_external_ones():
    ir = module(MODULE.replace("@plugin", "@body"))
    after = Pass(spoiled, sees_primitive=True)(ir)
    assert after["kernel"].bindings == ()
    assert "plugin" not in after


def test_a_declaration_knows_what_its_body_calls_and_whether_it_has_an_effect():
    ir = module(
        """
        private def quiet(x: input float32[4]) -> float32[4] { return x }
        private def loud(x: input float32[4]) -> float32[4] { p: () = print_(x) return x }
        fused def a(x: input float32[4]) -> float32[4] { y: float32[4] = @quiet(x) return y }
        fused def b(x: input float32[4]) -> float32[4] { y: float32[4] = @loud(x) return y }
        """
    )
    seen: list[IRModule] = []
    Pass(looking(seen), sees_primitive=False)(ir)
    assert (seen[0]["a"].callees, seen[0]["a"].is_pure) == (("quiet",), True)
    assert (seen[0]["b"].callees, seen[0]["b"].is_pure) == (("loud",), False)
    assert impure_functions(seen[0]) == impure_functions(ir) == {"loud", "b"}


def looking(seen):
    def look(ir: IRModule) -> IRModule:
        """Look and leave."""
        seen.append(ir)
        return ir

    return look


def test_a_module_without_change_is_the_same_object():
    ir = module(
        "fused def f(x: input float32[4]) -> float32[4] { return x } def main(x: input float32[4]) -> float32[4] { return x }"
    )
    assert canonicalize(ir) is ir


def broken(ir: IRModule) -> IRModule:
    """Call a function that is not there."""
    return parse("def main(x: input float32[4]) -> float32[5] { y: float32[5] = exp(x) return y }")


def test_what_a_pass_changes_is_verified_when_asked(monkeypatch):
    ir = module("def main(x: input float32[4]) -> float32[4] { return x }")
    with pytest.raises(VerifyError, match="V18: 'y' has another type"):
        Pass(broken, sees_primitive=False)(ir)
    monkeypatch.delenv("NNFRONT_CHECK")
    assert Pass(broken, sees_primitive=False)(ir)["main"].result_type.shape == (5,)


def test_every_step_is_written_when_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("NNFRONT_DUMP", str(tmp_path / "dump"))
    ir = module(MODULE)
    after = run(ir, [canonicalize, functools.partial(bind_dims, dims={"n": 2})])
    files = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert files == ["00_canonicalize.nnir", "01_bind_dims.nnir"]
    assert first_difference(parse((tmp_path / "dump" / files[-1]).read_text()), after) is None


def test_a_pipeline_runs_by_its_name():
    ir = module(MODULE)
    expected = ir
    for step in PIPELINES["simplify"]:
        expected = step(expected)
    assert first_difference(run(ir, "simplify"), expected) is None


def test_a_pipeline_that_is_not_there_is_named():
    with pytest.raises(PassError) as caught:
        run(module(MODULE), "simplfy")
    assert str(caught.value) == "there is no pipeline 'simplfy'\n  help: use one of 'simplify', 'cpu', 'cuda'"


def test_a_module_with_its_own_functions_in_their_order_is_itself():
    ir = module(MODULE)
    assert ir.with_functions(list(ir.functions)) is ir
    assert list(ir.with_functions(reversed(ir.functions))) == list(reversed(list(ir)))
    assert list(ir.with_functions(ir.functions[:-1])) == list(ir)[:-1]
