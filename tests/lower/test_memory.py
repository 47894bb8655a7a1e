# SPDX-License-Identifier: Apache-2.0
"""Memory plans: lifetimes against what torch allocates when the program runs."""

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_checks import measured_peak
from random_programs import FLAGS, programs

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import tape
from nnfront.backends.lowering import lower
from nnfront.backends.table import memory_policy
from nnfront.errors import LowerError
from nnfront.ir import parse
from nnfront.lower import MethodProgram
from nnfront.memory.plan import MemoryPlan, plan_memory
from nnfront.memory.report import report_memory
from nnfront.session import Session
from nnfront.state.use import Use

MEMORY = memory_policy("cpu")

ROW = 4 * 4  # bytes of float32[4]


def method(text: str) -> MethodProgram:
    return lower(parse(text)).methods["main"]


def names_alive(plan: MemoryPlan) -> list[list[str]]:
    return [[b.name for b in plan.buffers if b.is_alive(i)] for i in range(len(plan.steps))]


CHAIN = """
def main[n: 1..1000](x: input float32[n, 4]) -> float32[n, 4] {
    a: float32[n, 4] = tanh(x)
    b: float32[n, 4] = exp(a)
    c: float32[n, 4] = sin(b)
    d: float32[n, 4] = cos(c)
    return d
}
"""


def test_a_value_is_alive_from_where_it_is_made_to_where_it_is_read_last():
    plan = plan_memory(method(CHAIN), {"n": 2}, MEMORY)
    assert names_alive(plan) == [["a"], ["a", "b"], ["b", "c"], ["c", "d"]]
    assert plan.live == (2 * ROW, 4 * ROW, 4 * ROW, 4 * ROW)
    assert (plan.peak, plan.peak_step) == (4 * ROW, 1)


def test_a_view_keeps_the_memory_of_what_it_is_a_view_of():
    plan = plan_memory(
        method(
            """
            def main(x: input float32[8, 4]) -> float32[8, 2] {
                a: float32[8, 4] = tanh(x)
                parts: (float32[8, 2], float32[8, 2]) = split(a, indices_or_sections=2, axis=1)
                left: float32[8, 2] = parts[0]
                b: float32[8, 2] = exp(left)
                right: float32[8, 2] = parts[1]
                c: float32[8, 2] = add(b, right)
                return c
            }
            """
        ),
        {},
        MEMORY,
    )
    assert names_alive(plan) == [["a"], ["a"], ["a", "in exp", "b"], ["a", "b", "c"]]  # left in one piece


@pytest.mark.parametrize(("axes", "copies"), [("(0, 1)", False), ("(1, 0)", True)])
def test_a_reshape_is_a_copy_only_where_the_strides_ask_for_one(axes, copies):
    shape = "8, 4" if axes == "(0, 1)" else "4, 8"
    plan = plan_memory(
        method(
            f"""
            def main(x: input float32[8, 4]) -> float32[32] {{
                a: float32[8, 4] = tanh(x)
                t: float32[{shape}] = permute_dims(a, axes={axes})
                r: float32[32] = reshape(t, shape=(32,))
                y: float32[32] = exp(r)
                return y
            }}
            """
        ),
        {},
        MEMORY,
    )
    assert [b.name for b in plan.buffers] == (["a", "r", "y"] if copies else ["a", "y"])


BRANCHES = """
def main(x: input float32[8, 4], flag: input bool) -> float32[8, 4] {
    case: float32[8, 4] = if flag {
        a: float32[8, 4] = tanh(x)
        b: float32[8, 4] = exp(a)
        yield b
    } else {
        c: float32[8, 4] = sin(x)
        yield c
    }
    y: float32[8, 4] = cos(case)
    z: float32[8, 4] = sin(y)
    return z
}
"""


def test_a_branch_holds_nothing_while_the_other_one_runs_and_their_results_are_one():
    plan = plan_memory(method(BRANCHES), {}, MEMORY)
    kernels = [step.kernel for step in plan.steps]
    assert kernels == ["if", "tanh", "exp", "sin", "join", "cos", "sin"]
    assert names_alive(plan) == [[], ["a"], ["a", "b"], ["b"], ["b"], ["b", "y"], ["y", "z"]]
    merged = next(b for b in plan.buffers if b.name == "b")
    assert merged.ranges == ((2, 2), (3, 3), (4, 5))


def test_the_result_of_a_branch_is_given_back_after_its_last_use():
    inputs = torch.randn(8, 4), True
    text = BRANCHES.replace("8, 4", "4096, 4")
    run = Session(lower(parse(text)), {})["main"]
    inputs = torch.randn(4096, 4), True
    assert measured_peak(lambda: run(*inputs)) == 2 * 4096 * ROW


def test_a_result_that_is_not_made_at_the_end_is_copied_for_the_caller():
    text = """
    def main(x: input float32[512, 4]) -> (float32[512, 4], float32[512, 4]) {
        a: float32[512, 4] = tanh(x)
        b: float32[512, 4] = exp(a)
        c: float32[512, 4] = sin(b)
        r: (float32[512, 4], float32[512, 4]) = (a, c)
        return r
    }
    """
    plan = plan_memory(method(text), {}, MEMORY)
    assert [(b.name, b.kind) for b in plan.buffers][-1] == ("a", "copy")
    run = Session(lower(parse(text)), {})["main"]
    x = torch.randn(512, 4)
    assert plan.peak == measured_peak(lambda: run(x)) == 3 * 512 * ROW


def test_weights_that_are_returned_are_copied_and_arguments_are_not():
    text = """
    def main(x: input float32[8, 4], w: weight float32[8, 4]) -> (float32[8, 4], float32[8, 4]) {
        r: (float32[8, 4], float32[8, 4]) = (x, w)
        return r
    }
    """
    plan = plan_memory(method(text), {}, MEMORY)
    assert [(b.name, b.kind, b.bytes) for b in plan.buffers] == [("w", "copy", 8 * ROW)]
    run = Session(lower(parse(text)), {"w": torch.ones(8, 4)})["main"]
    x = torch.zeros(8, 4)
    assert measured_peak(lambda: run(x)) == 8 * ROW


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ("4, 512", "tanh(transposed)"),
        ("4, 512", "softmax(transposed)"),
        ("4", "sum(transposed, axis=1)"),
        ("4, 2", 'topk(transposed, k=2, ret_type="values")'),
    ],
)
def test_an_operand_in_pieces_that_is_copied_for_a_kernel_is_counted(shape, call):
    text = f"""
    def main(x: input float32[512, 4]) -> float32[{shape}] {{
        transposed: float32[4, 512] = permute_dims(x, axes=(1, 0))
        y: float32[{shape}] = {call}
        return y
    }}
    """
    run, x = Session(lower(parse(text)), {})["main"], torch.randn(512, 4)
    assert plan_memory(method(text), {}, MEMORY).peak == measured_peak(lambda: run(x))


def test_instructions_that_are_one_call_take_no_more_than_planned_but_for_their_results():
    text = """
    def main[n: 1..64](x: input float32[n, 4]) -> float32[n, 4] {
        first: float32[n, 4] = tanh(x)
        twice: float32[2*n, 4] = concat(first, first)
        split: (float32[n, 4], float32[n, 4]) = split(twice, indices_or_sections=2)
        part: float32[n, 4] = split[0]
        tanh: float32[n, 4] = tanh(part)
        add: float32[n, 4] = add(tanh, tanh)
        return add
    }
    """
    run, x = Session(lower(parse(text)), {})["main"], torch.randn(64, 4)
    planned, taken = plan_memory(method(text), {"n": 64}, MEMORY).peak, measured_peak(lambda: run(x))
    assert planned == 3 * x.nbytes
    assert taken == planned + (x.nbytes if tape.NATIVE else 0)


# Properties.


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(ir=programs(), rows=st.sampled_from([1, 2, 7, 64]))
def test_the_peak_is_what_torch_allocates_on_the_path_that_takes_most(ir, rows):
    program = lower(ir)
    plan = plan_memory(program.methods["main"], {"n": rows}, MEMORY)
    with patch.object(tape, "NATIVE", None):  # each instruction is a call, as above
        run = Session(program, {"w": torch.ones(1, 4)})["main"]
    x = torch.randn(rows, 4)
    paths = itertools.product([True, False], repeat=len(FLAGS))
    peaks = [measured_peak(lambda flags=flags: run(x, *flags)) for flags in paths]
    assert max(peaks) <= plan.peak
    if not any(step.kernel == "if" for step in plan.steps):
        assert max(peaks) == plan.peak


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(ir=programs(), rows=st.integers(1, 64))
def test_no_size_within_the_range_takes_more_than_the_bound(ir, rows):
    found = lower(ir).methods["main"]
    bound, plan = plan_memory(found, {}, MEMORY), plan_memory(found, {"n": rows}, MEMORY)
    assert bound.is_bound
    assert not plan.is_bound
    assert plan.peak <= bound.peak


# What a plan looks like.


def test_a_plan_prints_its_buffers():
    text = str(plan_memory(method(CHAIN), {"n": 100}, MEMORY))
    assert text == (
        "main: peak 3,200 bytes at step 1\n"
        "         1,600  0-1  a\n"
        "         1,600  1-2  b\n"
        "         1,600  2-3  c\n"
        "         1,600  3-3  d"
    )


def test_a_report_says_what_is_alive_at_the_peak():
    program = lower(
        parse(
            """
            def main[n](x: input float32[n, 4], w: weight float32[256, 4]) -> float32[n, 256] {
                h: float32[n, 256] = linear(x, w)     # at proj (model.py:1)
                y: float32[n, 256] = tanh(h)          # at act (model.py:2)
                return y
            }
            """
        )
    )
    report = report_memory(program, {"n": 1024}, MEMORY)
    assert str(report) == (
        "memory at n=1024\n"
        "method  arguments  caches  values    workspace  peak      at the peak runs\n"
        "main    16.00 KiB  0 B     2.00 MiB  0 B        2.00 MiB  tanh in act\n"
        "weights 4.00 KiB\n"
        "total 2.00 MiB\n"
        "main takes most, at tanh in act:\n"
        "  1.00 MiB  h  proj\n"
        "  1.00 MiB  y  act"
    )
    assert report.total == 2 * 1024 * 1024 + 4096


def test_a_dim_without_a_number_and_without_an_end_is_named():
    with pytest.raises(LowerError) as caught:
        plan_memory(method(CHAIN.replace("n: 1..1000", "n")), {}, MEMORY)
    assert str(caught.value) == (
        "main: nothing says how large 'n' can be\n"
        "  help: give it a number: memory(n=...), or a greatest value in the spec"
    )


def test_a_number_that_a_dim_cannot_be_is_refused():
    with pytest.raises(LowerError) as caught:
        plan_memory(method(CHAIN), {"n": 2000}, MEMORY)
    assert str(caught.value) == "main: dim 'n' cannot be 2000\n  n is between 1 and 1000"


def test_a_name_that_no_method_has_is_refused():
    with pytest.raises(LowerError) as caught:
        report_memory(lower(parse(CHAIN)), {"m": 2}, MEMORY)
    assert str(caught.value) == "no method has a dim 'm'\n  dims are n"


class Windowed(nn.Module):
    """Two layers, of which the first sees a window."""

    def step(self, x, cache):
        b, s, _ = x.shape
        x = op.reshape(x, (b, s, 1, 4))
        x = op.attention(x, x, x, cache=cache[0], window=4)
        return op.attention(x, x, x, cache=cache[1])


@pytest.mark.parametrize(("seq", "before"), [(9, 7), (3, 13), (1, 5)])
def test_what_a_prompt_longer_than_a_window_keeps_is_planned(seq, before, monkeypatch):
    caches = spec.Cache(2, 1, 4, batch="batch", max_seq="max_seq", window=[4, None])
    ir = Windowed().export({"step": {"x": spec.Tensor(["batch", "seq", 4]), "cache": caches}})
    executable = nn.compile(ir)
    session = executable.load({})
    room = seq + before
    cache = session.make_cache(batch=2, max_seq=room)
    kept = []
    keep = Use.keep
    monkeypatch.setattr(
        Use, "keep", lambda self, layer, chunk: (kept.append(chunk[0]), keep(self, layer, chunk))
    )
    for size in (before, seq):
        kept.clear()
        session["step"](torch.ones(2, size, 4), cache)
    plan = executable.memory(batch=2, seq=seq, max_seq=room).methods["step"].plan
    planned = [b for b in plan.buffers if b.name == "what the window turns over"]
    if seq == 1:
        assert not planned
        assert not kept
    else:
        (buffer,), (chunk,) = planned, kept
        assert buffer.bytes == sum(t.nbytes for t in chunk)
        assert buffer.is_alive(len(plan.steps) - 1)
