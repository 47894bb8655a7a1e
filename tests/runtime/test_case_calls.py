# SPDX-License-Identifier: Apache-2.0
"""Special cases in a session: the right one runs and is counted, and `explain` says which, why, and what asking costs."""

from __future__ import annotations

import threading

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.table import resolver
from nnfront.errors import RunError, VerifyError
from nnfront.ir import OPS
from nnfront.lower import Run, Structure
from nnfront.runtime.cases import CaseList, Explanation

CASES = [
    {"batch": 1},
    {"batch": (2, 8), "seq": nn.multiple_of(16)},
    {"seq": [nn.multiple_of(4), (4, 12)], "mask": nn.causal},
    {"scale": 0.0},
    {"mask": nn.zeros},
]


class Model(nn.Module):
    def __init__(self):
        self.proj = nn.Linear(4, 4, bias=False)

    def forward(self, x, mask, scale):
        return self.proj(x) * scale + op.unsqueeze(op.sum(op.exp(mask), -1), -1)


def raw(cases):
    method = {
        "x": spec.Tensor(["batch", "seq", 4]),
        "mask": spec.Tensor(["seq", "seq"]),
        "scale": spec.Tensor([]),
    }
    return {"forward": {**method, "$": {"special_cases": cases}} if cases else method}


WEIGHTS = {"proj.weight": torch.randn(4, 4)}


def session(cases=CASES, text=False):
    ir = Model().export(raw(cases))
    if text:
        ir = nn.ir.parse(str(nn.passes.special_cases(ir)))
    return nn.compile(ir).load(WEIGHTS)


def call(batch, seq, mask="random", scale=2.0):
    masks = {
        "random": torch.randn(seq, seq),
        "zeros": torch.zeros(seq, seq),
        "causal": torch.full((seq, seq), -torch.inf).triu(1),
    }
    return torch.randn(batch, seq, 4), masks[mask], torch.tensor(scale)


CALLS = [
    (call(1, 3), "batch == 1"),
    (call(1, 16, "causal"), "batch == 1"),
    (call(2, 16), "2 <= batch <= 8 and seq % 16 == 0"),
    (call(8, 32, "zeros", 0.0), "2 <= batch <= 8 and seq % 16 == 0"),
    (call(9, 8, "causal"), "seq % 4 == 0 and 4 <= seq <= 12 and mask is causal"),
    (call(9, 16, "causal"), "general"),
    (call(9, 8, "random", 0.0), "scale == 0.0"),
    (call(9, 7, "zeros"), "mask == 0"),
    (call(2, 7), "general"),
]


@pytest.mark.parametrize("text", [False, True], ids=["compiled", "read back from text"])
def test_the_first_case_that_holds_runs_is_counted_and_gives_the_same(text):
    special, general = session(text=text), session(())
    expected = dict.fromkeys([*special.hits("forward")], 0)
    for args, case in CALLS:
        torch.testing.assert_close(special["forward"](*args), general["forward"](*args))
        expected[case] += 1
        assert special.hits("forward") == expected
        assert special.explain("forward", *args).taken == case
    assert list(expected) == [*(c for c in special["forward"].program.cases), "general"]


def test_nothing_runs_and_nothing_is_counted_by_explain():
    special = session()
    before = special.hits("forward")
    special.explain("forward", *call(1, 3))
    assert special.hits("forward") == before == dict.fromkeys(before, 0)


def test_explain_says_what_holds_what_fails_and_what_each_check_costs():
    special = session()
    special["forward"](*call(9, 7, "zeros"))
    text = str(special.explain("forward", *call(9, 8, "zeros")))
    assert text == (
        "forward: mask == 0\n"
        "  dims: batch = 9, seq = 8\n"
        "  case 0, batch == 1: does not hold; taken 0 times so far\n"
        "    batch == 1: no, batch is 9 (reads no memory)\n"
        "  case 1, 2 <= batch <= 8 and seq % 16 == 0: does not hold; taken 0 times so far\n"
        "    2 <= batch <= 8: no, batch is 9 (reads no memory)\n"
        "    seq % 16 == 0: no, seq is 8 (reads no memory)\n"
        "  case 2, seq % 4 == 0 and 4 <= seq <= 12 and mask is causal: does not hold; taken 0 times so far\n"
        "    seq % 4 == 0: yes, seq is 8 (reads no memory)\n"
        "    4 <= seq <= 12: yes, seq is 8 (reads no memory)\n"
        "    mask is causal: no, 28 of 64 elements differ (reads 256 bytes)\n"
        "  case 3, scale == 0.0: does not hold; taken 0 times so far\n"
        "    scale == 0.0: no, scale is 2.0 (reads 4 bytes)\n"
        "  case 4, mask == 0: holds, and runs; taken once so far\n"
        "    mask == 0: yes, all 64 elements are right (reads 256 bytes)\n"
        "  general: comes last; taken 0 times so far"
    )


def test_explain_says_what_would_hold_too_and_what_is_not_asked():
    explained = session().explain("forward", *call(1, 5, "causal"))
    assert isinstance(explained, Explanation)
    assert [case.holds for case in explained.cases] == [True, False, False, False, False]
    assert str(explained.cases[2].checks[2]) == "mask is causal: not asked (reads 100 bytes)"
    later = str(session().explain("forward", *call(1, 5, "zeros")))
    assert "case 4, mask == 0: holds, but comes later" in later
    assert str(session().explain("forward", *call(3, 5))).endswith("general: runs; taken 0 times so far")


def test_explain_takes_arguments_by_name_and_checks_them():
    x, mask, scale = call(1, 3)
    special = session()
    assert special.explain("forward", x, scale=scale, mask=mask).taken == "batch == 1"
    with pytest.raises(RunError, match=r"^forward: argument 'mask' axis 0 is 'seq' = 2, but"):
        special.explain("forward", x, mask[:2, :2], scale)
    with pytest.raises(RunError, match=r"^there is no method 'forwrd'"):
        special.explain("forwrd", x, mask, scale)


def test_explain_without_arguments_lists_the_cases():
    special = session([{"batch": 1}])
    special["forward"](*call(1, 3))
    special["forward"](*call(2, 3))
    special["forward"](*call(3, 3))
    listed = special.explain("forward")
    assert isinstance(listed, CaseList)
    assert str(listed) == "forward:\n  batch == 1: taken once\n  general: taken 2 times"


def test_a_method_without_cases_says_so():
    plain = session(())
    assert plain.hits("forward") == {}
    assert str(plain.explain("forward")) == "forward: there are no special cases"
    explained = plain.explain("forward", *call(2, 3))
    assert str(explained) == "forward: general\n  dims: batch = 2, seq = 3\n  there are no special cases"


def test_no_count_is_lost_among_threads():
    special = session([{"batch": 1}, {"batch": 2}])
    args = {n: call(n, 2) for n in (1, 2, 3)}

    def work():
        for i in range(300):
            special["forward"](*args[1 + i % 3])
            if i % 50 == 0:
                special.hits("forward")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert special.hits("forward") == {"batch == 1": 400, "batch == 2": 400, "general": 400}


def test_one_case_alone_can_be_run_for_any_arguments():
    special, general = session(), session(())
    args = call(9, 8, "causal")
    for case in ("scale == 0.0", "mask == 0"):
        alone = special["forward"].only(case)
        assert not torch.allclose(alone(*args), general["forward"](*args))
        assert {n for n, count in alone.hits.items() if count} == {case}
    torch.testing.assert_close(special["forward"].only("general")(*args), general["forward"](*args))
    assert not any(special.hits("forward").values())
    with pytest.raises(RunError) as caught:
        special["forward"].only("batch == 2")
    assert caught.value.what == "forward has no case 'batch == 2'"


def test_replaced_weights_are_those_of_every_variant():
    special = session()
    special.update({"proj.weight": torch.zeros(4, 4)})
    x, mask, scale = call(1, 3)
    expected = mask.exp().sum(-1)[:, None].expand(1, 3, 4)
    torch.testing.assert_close(special["forward"](x, mask, scale), expected)
    torch.testing.assert_close(special["forward"].only("general")(x, mask, scale), expected)


def test_a_call_that_is_refused_is_not_counted():
    special = session()
    x, mask, scale = call(1, 3)
    with pytest.raises(RunError):
        special["forward"](x, mask[:2], scale)
    assert not any(special.hits("forward").values())


MASKED = """
def main[q, k](x: input float32[q, k], mask: input float32[q, k], s: input float32[]) -> float32[q, k] {
    y: float32[q, k] = add(x, mask)
    z: float32[q, k] = multiply(y, s)
    return z
}
"""
MANY_MASKS = [
    torch.zeros(0, 0),
    torch.zeros(1, 1),
    torch.zeros(2, 1),
    torch.zeros(2, 2),
    torch.full((2, 2), -torch.inf).triu(1),
    torch.full((2, 2), -1e9).triu(1),
]


@pytest.mark.parametrize(
    "lists",
    [
        [[{"mask": nn.zeros}], [{"mask": nn.causal}]],
        [[{"mask": nn.causal}], [{"mask": nn.zeros}]],
        [[{"mask": nn.causal, "q": 1}], [{"mask": nn.zeros, "k": 1}]],
        [[{"mask": nn.causal}], [{"mask": nn.causal(-1e9)}]],
        [[{"mask": nn.zeros}, {"s": 0}], [{"mask": nn.causal, "s": nn.zeros}], [{"q": (1, 2)}]],
        [[{"mask": [nn.zeros, nn.causal]}, {"s": [1, 1.0]}]],
    ],
    ids=["causal of zeros", "zeros of causal", "with dims", "two causal masks", "three", "in one case"],
)
def test_of_cases_of_cases_that_hold_at_once_the_one_that_runs_is_counted_and_explained(lists):
    ir = nn.ir.parse(MASKED)
    for cases in lists:
        ir = nn.passes.special_cases(ir, "main", cases)
    special = nn.compile(ir).load({})
    for mask in MANY_MASKS:
        for s in (0.0, 1.0):
            x = torch.randn(mask.shape)
            args = (x, mask, torch.tensor(s))
            before = special.hits("main")
            torch.testing.assert_close(special["main"](*args), (x + mask) * s, equal_nan=True)
            ran = [case for case, count in special.hits("main").items() if count > before[case]]
            assert ran == [special.explain("main", *args).taken], (mask, s)
    nn.verify_variants(special, "main")


def test_a_case_of_two_values_holds_where_both_do_and_explain_says_each():
    special = nn.compile(
        nn.passes.special_cases(nn.ir.parse(MASKED), "main", [{"mask": [nn.zeros, nn.causal]}])
    ).load({})
    said = special.explain("main", torch.zeros(2, 2), torch.zeros(2, 2), torch.tensor(1.0))
    assert said.taken == "general"
    assert [str(check) for check in said.cases[0].checks] == [
        "mask == 0: yes, all 4 elements are right (reads 16 bytes)",
        "mask is causal: no, 1 of 4 elements differ (reads 16 bytes)",
    ]
    assert special.explain("main", *[torch.zeros(3, 1)] * 2, torch.tensor(1.0)).taken == (
        "mask == 0 and mask is causal"
    )


RANGES = [
    ((3, 3, None),),
    ((None, 5, 2),),
    ((2, None, None), (None, None, 3)),
    ((None, None, None),),
    ((0.5, 1.5, None),),
]


@pytest.mark.parametrize("ranges", RANGES)
def test_the_quick_question_answers_as_the_reference_does(ranges):

    run = Run("within", "within", tuple(range(len(ranges))), Structure(9), {"ranges": ranges})
    quick = resolver("cpu")(run)
    numbers = [
        -2,
        0,
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        True,
        False,
        0.5,
        1.5,
        float("nan"),
        torch.tensor(3),
        torch.tensor(1.5),
    ]
    for first in numbers:
        for second in numbers if len(ranges) > 1 else (None,):
            values = [first] if second is None else [first, second]
            assert bool(quick(*values)) is OPS["within"].run(values, {"ranges": ranges})


def test_an_artefact_keeps_the_cases(tmp_path):
    special = session()
    special.save(tmp_path / "model")
    loaded = nn.load(tmp_path / "model")
    for args, case in CALLS:
        torch.testing.assert_close(loaded["forward"](*args), special["forward"](*args))
        assert loaded.explain("forward", *args).taken == case
    assert loaded.hits("forward") == special.hits("forward")


@pytest.mark.parametrize(
    ("attribute", "what"),
    [
        ("cases=3", "f: the attribute 'cases' maps texts to cases"),
        ("cases={n: 4}", "f: the attribute 'cases' maps texts to cases"),
        ("special_cases=({n: 1}, 2)", "f: the attribute 'special_cases' is a tuple of cases"),
    ],
)
def test_text_from_outside_with_cases_that_are_none_is_refused(attribute, what):
    text = f"def f(x: input float32[2]) -> float32[2] attrs({attribute}) {{ return x }}"
    with pytest.raises(VerifyError) as caught:
        nn.ir.admit(text)
    assert caught.value.what == what


def test_the_table_of_what_runs_names_the_case_of_each_op():
    ir = nn.passes.special_cases(Model().export(raw(())), "forward", [{"batch": 1}, {"batch": 2}])
    rows = [line.split("  ")[1:] for line in nn.compile(ir).explain().splitlines() if "  " in line]
    ops_of = {next(cell for cell in row if cell).strip() for row in rows}
    assert {"within", "else: within", "batch == 1: linear", "batch == 2: linear", "general: linear"} <= ops_of
    assert not any("enter_case" in op for op in ops_of)


IF = """
def main(x: input float32[2], flag: input {type}) -> float32[2] {{
    y: float32[2] = if flag {{ a: float32[2] = relu(x) yield a }} else {{ b: float32[2] = negative(x) yield b }}
    return y
}}
"""


@pytest.mark.parametrize(("type", "make"), [("bool", bool), ("bool[]", torch.tensor)])
@pytest.mark.parametrize("flag", [True, False])
def test_a_host_boolean_and_a_tensor_choose_a_branch(type, make, flag):
    method = nn.compile(nn.ir.parse(IF.format(type=type))).load({})["main"]
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(method(x, make(flag)), x.relu() if flag else -x)


def test_a_call_of_sixteen_in_hand_written_ir_runs_where_the_dim_is_sixteen():
    text = """
    private def sixteen(x: input float32[16]) -> float32[4, 4] { y: float32[4, 4] = reshape(x, shape=(4, 4)) return y }
    def main[n](x: input float32[n]) -> float32[n] {
        c: bool = within(dim(n), ranges=((16, 16, None),))
        y: float32[n] = if c {
            a: float32[4, 4] = @sixteen(x)
            b: float32[4, 4] = permute_dims(a, axes=(1, 0))
            d: float32[n] = reshape(b, shape=(n,))
            yield d
        } else {
            yield x
        }
        return y
    }
    """
    ir = nn.ir.parse(text)
    for module in (ir, nn.passes.inline(ir), nn.passes.run(ir, "simplify")):
        nn.ir.verify(module)
        method = nn.compile(module).load({})["main"]
        for n in (15, 16):
            x = torch.arange(float(n))
            assert torch.equal(method(x), x.reshape(4, 4).T.reshape(-1) if n == 16 else x)
