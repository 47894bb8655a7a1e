# SPDX-License-Identifier: Apache-2.0
"""`verify_variants` passes variants that are right, and names what is wrong with others."""

from __future__ import annotations

import pytest
import torch
from few_of import few_of
from nnfront_models import llama

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import RunError
from nnfront.runtime import Method

TEXT = """
private def main_case_0(x: input float32[4], k: input int64) -> (float32[4], int64) {{
    y: float32[4] = multiply(x, {factor})
    r: (float32[4], int64) = (y, {count})
    return r
}}
private def main_general[n](x: input float32[n], k: input int64) -> (float32[n], int64) {{
    y: float32[n] = multiply(x, 2.0)
    r: (float32[n], int64) = (y, k)
    return r
}}
def main[n](x: input float32[n], k: input int64) -> (float32[n], int64) attrs(cases={{"n == 4": {{n: 4}}}}) {{
    is_case: bool = within(dim(n), ranges=(({number}, {number}, None),))
    r: (float32[n], int64) = if is_case {{
        e: () = enter_case(case="n == 4")
        a: (float32[4], int64) = @main_case_0(x, k)
        yield a
    }} else {{
        f: () = enter_case(case="general")
        b: (float32[n], int64) = @main_general(x, k)
        yield b
    }}
    return r
}}
"""


def variants(factor=2.0, count="k", number=4):
    return nn.ir.parse(TEXT.format(factor=factor, count=count, number=number))


def test_variants_that_are_right_pass_with_a_report():
    report = nn.verify_variants(variants(), "main", samples=2)
    assert str(report) == "main:\n  n == 4: 2 samples, largest difference 0.0e+00 (n = 4; n = 4)"
    assert [v.case for v in report.variants] == ["n == 4"]


@pytest.mark.parametrize(
    ("ir", "what", "detail"),
    [
        (
            variants(factor=2.5),
            "main: the variant for 'n == 4' is not what the general function is, with n = 4",
            "largest difference in the result[0]: 0.25 of its largest number, 0.0001 allowed",
        ),
        (
            variants(count="-1"),
            "main: the variant for 'n == 4' is not what the general function is, with n = 4",
            "the result[1] is -1, the general function gives ",
        ),
    ],
    ids=["numbers", "host value"],
)
def test_a_variant_that_differs_is_named_with_sizes_and_difference(ir, what, detail):
    with pytest.raises(RunError) as caught:
        nn.verify_variants(ir, "main")
    assert caught.value.what == what
    assert caught.value.details[0].startswith(detail)


def test_what_is_allowed_can_be_said():
    nn.verify_variants(variants(factor=2.5), "main", tolerance=0.3)
    with pytest.raises(RunError, match=r"1e-06 allowed"):
        nn.verify_variants(variants(factor=2.0001), "main", tolerance=1e-6)
    nn.verify_variants(variants(factor=2.0001), "main")


def test_a_dispatch_that_takes_the_wrong_case_is_named():
    # The case says another number than the condition asks for.
    ir = nn.ir.parse(str(variants()).replace('"n == 4": {n: 4}', '"n == 4": {n: 5}'))
    with pytest.raises(RunError) as caught:
        nn.verify_variants(ir, "main")
    assert str(caught.value) == "main takes the wrong case with n = 5\n  got 'general', expected 'n == 4'"


def test_a_case_that_asks_about_a_product_of_dims_is_run_where_it_holds():
    ir = nn.passes.bind_dims(variants(), {"n": "2*rows"})
    assert nn.verify_variants(ir, "main").variants[0].sizes == ({"rows": 2},) * 3
    with pytest.raises(RunError, match=r"is not what the general function is, with rows = 2\n"):
        nn.verify_variants(nn.passes.bind_dims(variants(factor=2.5), {"n": "2*rows"}), "main")


def test_a_case_that_the_weights_do_not_meet_is_not_run():
    ir = nn.ir.parse(
        "def main[d](x: input float32[d], w: weight float32[d]) -> float32[d] { y: float32[d] = add(x, w) return y }"
    )
    executable = nn.compile(nn.passes.special_cases(ir, "main", [{"d": 3}]))
    for d, expected in ((3, 3), (5, 0)):
        report = nn.verify_variants(executable.load({"w": torch.ones(d)}), "main")
        assert len(report.variants[0].sizes) == expected
    assert str(report) == "main:\n  d == 3: no sample, since no input was found that meets it"


def test_a_method_without_cases_is_refused():
    ir = nn.ir.parse("def main(x: input float32[2]) -> float32[2] { y: float32[2] = relu(x) return y }")
    with pytest.raises(RunError) as caught:
        nn.verify_variants(ir, "main")
    assert str(caught.value) == (
        "main has no special cases\n"
        '  help: give it some: nn.passes.special_cases(ir, ...), or "$": {"special_cases": [...]} in the spec'
    )


def test_a_session_keeps_its_weights_and_its_counts():
    ir = nn.passes.special_cases(
        llama.build(llama.TINY).export(llama.export_spec(llama.TINY)), "decode", [{"batch": 1}]
    )
    executable = nn.compile(ir)
    weights = {n: torch.randn(p.shape) * 0.1 for n, p in llama.build(llama.TINY).named_parameters()}
    session = executable.load(weights)
    nn.verify_variants(session, "decode")
    assert session.hits("decode") == {"batch == 1": 0, "general": 0}
    nn.verify_variants(executable, "decode", weights)
    with pytest.raises(RunError, match=r"^a session has its weights"):
        nn.verify_variants(session, "decode", weights)


@pytest.mark.parametrize(
    ("dtype", "lifts"),
    few_of([("bfloat16", True), ("float32", True), ("float32", False), ("bfloat16", False)]),
)
def test_a_language_model_in_special_cases(dtype, lifts):
    from dataclasses import replace

    config = replace(llama.TINY, dtype=dtype)
    methods = llama.export_spec(config)
    methods["decode"]["$"] = {"special_cases": [{"batch": 1}, {"batch": (2, 8)}]}
    methods["prefill"]["$"] = {"special_cases": [{"batch": 1, "seq": nn.multiple_of(16)}, {"batch": 1}]}
    methods["logits"]["$"] = {"special_cases": [{"seq": 1}]}
    ir = llama.build(config).export(methods)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True) if lifts else ir
    executable = nn.compile(ir)
    for method in methods:
        report = nn.verify_variants(executable, method, samples=3, dims={"max_seq": 80})
        assert len(report.variants) == len(methods[method]["$"]["special_cases"])
    assert all(
        "max_seq = 80" in str(report)
        for report in [nn.verify_variants(executable, "decode", dims={"max_seq": 80})]
    )


class Picky(nn.Module):
    def forward(self, ids, x, mask, cache):
        b, s, _ = x.shape
        x = op.reshape(x, (b, s, 1, 4))
        y = op.attention(x, x, x, cache=cache[0])
        return {"y": y, "ids": op.sum(op.astype(ids, "float32")) / op.sum(op.exp(mask)), "size": s}


def test_inputs_are_drawn_inside_facts_cases_and_ranges(monkeypatch):
    seen = []
    original = Method.__call__

    def note(self, ids, x, mask, cache):
        seen.append((self, int(ids.min()), int(ids.max()), tuple(x.shape), mask, cache.lengths))
        return original(self, ids, x, mask, cache)

    seq = nn.Dim("seq", min=2, max=40, multiple_of=2)
    methods = {
        "forward": {
            "ids": spec.Tensor([64], "int64"),
            "x": spec.Tensor(["batch", seq, 4]),
            "mask": spec.Tensor([seq, seq]),
            "cache": spec.Cache(layers=1, kv_heads=1, head_size=4, window=5),
            "$": {"special_cases": [{"seq": (10, 30), "mask": nn.causal}, {"batch": 3}]},
        }
    }
    executable = nn.compile(Picky().export(methods))
    monkeypatch.setattr(Method, "__call__", note)
    nn.verify_variants(executable, "forward", samples=4, ranges={"ids": (7, 9)})
    monkeypatch.undo()
    assert {(low, high) for _, low, high, *_ in seen} == {(7, 9)}
    assert all(2 <= shape[1] <= 40 and shape[1] % 2 == 0 for _, _, _, shape, *_ in seen)
    assert {shape[1] for _, _, _, shape, *_ in seen[:6]} == {10, 30}
    assert all(len(set(lengths)) <= 1 for *_, lengths in seen)
    assert any(lengths and lengths[0] == 3 for *_, lengths in seen)
