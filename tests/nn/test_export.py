# SPDX-License-Identifier: Apache-2.0
"""Export is pure, deterministic, re-entrant and thread-safe, and its errors name the place in the author's code."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import DimError, InferError, TraceError, WrongUse

X = spec.Tensor(["batch", 4], "float32")


def export(forward: Any, **arguments: Any) -> Any:
    """Export a module with this forward."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    return made.export({"forward": arguments or {"x": X}})


def state_of(module: nn.Module) -> Any:
    return {name: (dict(vars(m)), id(m)) for name, m in module.named_modules()}


def test_export_changes_neither_module_nor_parameters() -> None:
    module = llama.build(llama.TINY)
    before = state_of(module)
    module.export(llama.export_spec(llama.TINY))
    after = state_of(module)
    assert before.keys() == after.keys()
    for name, (attributes, identity) in before.items():
        assert after[name][1] == identity
        assert all(after[name][0][key] is value for key, value in attributes.items())


def test_text_is_the_same_in_processes_with_different_hash_seeds() -> None:
    script = textwrap.dedent("""
        from nnfront_models import llama
        module = llama.build(llama.TINY).export(llama.export_spec(llama.TINY))
        print(module)
        print(module.summary())
    """)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another than that of this process
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(script, {})
    assert said == here.getvalue()
    assert "def prefill" in said


def test_threads_may_export_one_module_with_different_specs() -> None:
    module = llama.build(llama.TINY)
    full = llama.export_spec(llama.TINY)
    specs = [full, {"decode": full["decode"]}, {"logits": full["logits"]}] * 2
    expected = [str(module.export(s)) for s in specs]
    results: list[str] = [""] * len(specs)
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(3):
                results[i] = str(module.export(specs[i]))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(specs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert results == expected


def test_export_inside_a_trace_is_its_own_export() -> None:
    inner = llama.build(llama.TINY)
    texts = []

    def forward(self: nn.Module, x: nn.Tensor) -> nn.Tensor:
        texts.append(str(inner.export(llama.export_spec(llama.TINY))))
        return x * 2.0

    ir = export(forward)
    assert texts == [str(inner.export(llama.export_spec(llama.TINY)))]
    assert len(ir["forward"].bindings) == 1


def test_every_binding_knows_its_module_path_and_source_line() -> None:
    module = llama.build(llama.TINY)
    ir = module.export({"logits": llama.export_spec(llama.TINY)["logits"]}, share_layers=False)
    linear = next(
        b
        for b in ir["logits"].bindings
        if getattr(b.value, "op", None) is not None and b.value.op.name == "linear"
    )
    assert linear.provenance.module == "model.layers.0.self_attn.qkv"
    assert linear.provenance.file.endswith("llama.py")
    assert linear.provenance.line > 0
    assert "# at model.layers.0.self_attn (" in ir.text(provenance=True)


def test_provenance_inside_a_shared_body_is_relative_to_its_caller() -> None:
    ir = llama.build(llama.TINY).export({"logits": llama.export_spec(llama.TINY)["logits"]})
    paths = {b.provenance.module for b in ir["LlamaDecoderLayer"].bindings if b.provenance}
    assert "self_attn" in paths
    calls = [b.provenance.module for b in ir["logits"].bindings if hasattr(b.value, "function")]
    assert calls == ["model.layers.0", "model.layers.1"]


def test_python_numbers_promote_as_in_torch() -> None:
    ir = export(lambda self, x: x * 0.5, x=spec.Tensor(["n"], "int64"))
    assert ir["forward"].result_type.dtype == "float32"
    ir = export(lambda self, x: x * 2, x=spec.Tensor(["n"], "int32"))
    assert ir["forward"].result_type.dtype == "int32"


def test_dims_can_be_computed_with_and_used_as_numbers() -> None:
    ir = export(lambda self, x: op.reshape(x, (x.shape[0] * 2, 2)) * x.shape[0])
    session = nn.compile(ir).load({})
    x = torch.randn(3, 4)
    torch.testing.assert_close(session["forward"](x), x.reshape(6, 2) * 3)


@pytest.mark.parametrize(
    ("forward", "error", "message"),
    [
        (lambda self, x: x if x.shape[0] == 1 else x * 2.0, DimError, "cannot decide whether batch == 1"),
        (lambda self, x: x if x.shape[0] > 1 else x * 2.0, DimError, "batch > 1"),
        (lambda self, x: [x for _ in range(x.shape[0])], DimError, "batch"),
        (lambda self, x: x if x > 0 else -x, TraceError, "the truth of <Tensor bool"),
        (lambda self, x: float(x[0, 0]), TraceError, "is not known when the method is traced"),
        (lambda self, x: op.matmul(x, x), InferError, "inner sizes differ"),
        (lambda self, x: x + "a", WrongUse, "unsupported operand"),
        (lambda self, x: object(), TraceError, "forward returns a object"),
        (
            lambda self, x: setattr(self, "seen", x),
            TraceError,
            "attribute 'seen' of the module changes while",
        ),
    ],
)
def test_what_cannot_be_traced_is_an_error_with_its_line(
    forward: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        export(forward)
    assert "test_export.py:" in str(caught.value)


def test_an_error_names_the_module_path_and_the_method() -> None:
    module = llama.build(llama.TINY)
    module.model.layers[1].mlp.down_proj = nn.Linear(7, 64, bias=False)
    with pytest.raises(
        InferError, match=r"at model\.layers\.1\.mlp\.down_proj in method 'logits' \(.*llama\.py:\d+\)"
    ):
        module.export(llama.export_spec(llama.TINY))


def test_comparisons_of_dims_that_facts_decide_are_allowed() -> None:
    x = spec.Tensor([nn.Dim("batch", min=2), 4], "float32")
    ir = export(lambda self, x: x * 2.0 if x.shape[0] != 1 else x, x=x)
    assert len(ir["forward"].bindings) == 1


def test_a_method_may_return_nothing_numbers_tuples_and_dicts() -> None:
    x = torch.randn(3, 4)

    def run(forward: Any) -> Any:
        return nn.compile(export(forward)).load({})["forward"](x)

    assert run(lambda self, x: None) is None
    assert run(lambda self, x: x.shape[0] * 2) == 6
    a, (b, c) = run(lambda self, x: (x, [x * 2.0, x.shape[0]]))
    torch.testing.assert_close(b, a * 2)
    assert c == 3
    torch.testing.assert_close(run(lambda self, x: {"y": x + 1.0, "z": x})["y"], x + 1)


def test_cond_stays_in_the_ir_and_takes_one_branch() -> None:
    def forward(self: nn.Module, x: nn.Tensor) -> nn.Tensor:
        return op.cond(op.sum(x) > 0.0, lambda: x * 2.0, lambda: op.relu(x) - 1.0)

    ir = export(forward)
    assert "if " in str(ir["forward"])
    run = nn.compile(ir).load({})["forward"]
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        torch.testing.assert_close(run(x), x * 2 if x.sum() > 0 else torch.relu(x) - 1)


def test_branches_of_different_structure_are_refused() -> None:
    with pytest.raises(TraceError, match="the branches return values of different structure"):
        export(lambda self, x: op.cond(op.sum(x) > 0.0, lambda: x, lambda: (x, x)))
    with pytest.raises(TraceError, match="types that nothing covers"):
        export(lambda self, x: op.cond(op.sum(x) > 0.0, lambda: x, lambda: x > 0.0))


def test_param_mode_none_refuses_weights() -> None:
    with pytest.raises(TraceError, match="param_mode is 'none', but the method reads 'weight'"):
        nn.Linear(4, 4, bias=False).export({"forward": {"x": X, "$": {"param_mode": "none"}}})


def test_a_cache_that_is_returned_is_refused_with_help() -> None:
    with pytest.raises(TraceError, match=r"(?s)forward returns a cache.*threaded by itself"):
        export(lambda self, cache: cache, cache=spec.Cache(1, 2, 8))


def test_caches_written_in_one_branch_come_out_of_both() -> None:
    def forward(self: nn.Module, x: nn.Tensor, flag: nn.Tensor, cache: Any) -> nn.Tensor:
        return op.cond(flag, lambda: op.attention(x, x, x, cache=cache[0]), lambda: x)

    ir = export(
        forward,
        x=spec.Tensor(["batch", "seq", 2, 8], "float32"),
        flag=spec.Tensor([], "bool"),
        cache=spec.Cache(1, 2, 8),
    )
    session = nn.compile(ir).load({})
    cache = session.make_cache(batch=1, max_seq=16)
    x = torch.randn(1, 3, 2, 8)
    torch.testing.assert_close(session["forward"](x, torch.tensor(False), cache), x)
    assert cache.length() == 0
    session["forward"](x, torch.tensor(True), cache)
    assert cache.length() == 3


def test_dims_written_by_name_in_the_method_carry_the_facts_of_the_spec() -> None:
    x = spec.Tensor(["batch", nn.Dim("seq", max=64, multiple_of=16), 4], "float32")
    w = nn.Parameter(("seq", 4))

    class Named(nn.Module):
        def __init__(self) -> None:
            self.w = w
            self.wide = op.broadcast_to(self.w, (2, "seq", 4))

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            y = op.reshape(x, ("seq", "batch", 4)) * nn.Dim("seq")
            return op.sum(self.wide, axis=0) + op.sum(y, axis=1)

    ir = Named().export({"forward": {"x": x}})
    assert nn.ir.parse(str(ir)) == ir
    data, weight = torch.randn(2, 32, 4), torch.randn(32, 4)
    expected = weight * 2 + (data.reshape(32, 2, 4) * 32).sum(1)
    torch.testing.assert_close(
        nn.compile(ir).load({"w": weight})["forward"](data), expected, rtol=1e-4, atol=1e-4
    )
