# SPDX-License-Identifier: Apache-2.0
"""From IR to flat instructions: what a program holds, and that it means what the IR says (against torch)."""

import pytest
import torch

import nnfront.ops
from nnfront.backends.lowering import lower
from nnfront.errors import LowerError
from nnfront.ir import parse
from nnfront.lower import Branch, MethodProgram, Run
from nnfront.session import Session


def program(text: str, name: str = "main") -> MethodProgram:
    return lower(parse(text)).methods[name]


def session(text: str, **weights: torch.Tensor) -> Session:
    return Session(lower(parse(text)), weights)


def kernels(method: MethodProgram) -> list[str]:
    return [i.kernel for i in method.body.walk() if isinstance(i, Run)]


TWO_LAYERS = """
private def layer[rows, wide](x: input float32[rows, wide], w: weight float32[wide, wide]) -> float32[rows, wide] {
    y: float32[rows, wide] = linear(x, w)          # at proj (model.py:7)
    z: float32[rows, wide] = relu(y)               # at act (model.py:8)
    return z
}
def main[batch](x: input float32[batch, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[batch, 4] {
    y: float32[batch, 4] = @layer(x, a)            # at layers.0 (model.py:20)
    z: float32[batch, 4] = @layer(y, b)            # at layers.1 (model.py:20)
    return z
}
"""


def test_calls_of_functions_are_written_out():
    assert kernels(program(TWO_LAYERS)) == ["linear", "relu", "linear", "relu"]


def test_an_instruction_names_the_callers_module_and_then_its_own():
    runs = program(TWO_LAYERS).body.instructions
    assert [r.module for r in runs] == ["layers.0.proj", "layers.0.act", "layers.1.proj", "layers.1.act"]
    assert [r.line for r in runs] == ["model.py:7", "model.py:8"] * 2


def test_a_shared_body_reads_the_weights_of_its_caller():
    x, a, b = torch.randn(3, 4), torch.randn(4, 4), torch.randn(4, 4)
    expected = torch.relu(torch.relu(x @ a.T) @ b.T)
    torch.testing.assert_close(session(TWO_LAYERS, a=a, b=b)["main"](x), expected)


def test_a_callees_dims_become_those_of_each_caller():
    text = """
    private def flat[rows, columns](x: input float32[rows, columns]) -> float32[rows*columns] {
        y: float32[rows*columns] = reshape(x, shape=(rows*columns,))
        return y
    }
    def main[n, m](x: input float32[n, m], y: input float32[m, 3]) -> (float32[m*n], float32[3*m]) {
        a: float32[m*n] = @flat(x)
        b: float32[3*m] = @flat(y)
        both: (float32[m*n], float32[3*m]) = (a, b)
        return both
    }
    """
    x, y = torch.randn(2, 5), torch.randn(5, 3)
    a, b = session(text)["main"](x, y)
    assert torch.equal(a, x.reshape(-1))
    assert torch.equal(b, y.reshape(-1))


def test_tuples_and_their_fields_cost_no_instruction():
    text = """
    def main[n](x: input float32[n, 4], pair: input (float32[n], (float32[n],))) -> {a: float32[n, 2], b: (float32[n], float32[n])} {
        parts: (float32[n, 2], float32[n, 2]) = split(x, indices_or_sections=2, axis=1)
        second: float32[n, 2] = parts[1]
        p: float32[n] = pair[0]
        q: (float32[n],) = pair[1]
        r: float32[n] = q[0]
        inner: (float32[n], float32[n]) = (r, p)
        result: {a: float32[n, 2], b: (float32[n], float32[n])} = {a: second, b: inner}
        return result
    }
    """
    assert kernels(program(text)) == ["split"]
    x, p, r = torch.randn(3, 4), torch.randn(3), torch.randn(3)
    result = session(text)["main"](x, (p, (r,)))
    assert list(result) == ["a", "b"]
    assert torch.equal(result["a"], x[:, 2:])
    assert result["b"][0] is r
    assert result["b"][1] is p


def test_the_program_lists_who_binds_each_dim():
    text = """
    def main[m: 1..8, n, vocab, k](x: input float32[2*n, m], k: input int64(k), w: weight float32[vocab, m]) -> float32[2*n, vocab] {
        y: float32[2*n, vocab] = linear(x, w)
        return y
    }
    """
    bound = {str(b.symbol): str(b.place) for b in program(text).dims}
    assert bound == {"vocab": "'w' axis 0", "m": "'w' axis 1", "k": "'k'", "n": "'x' axis 0"}


def test_a_dim_that_nothing_binds_is_an_error():
    text = "def main[n, m](x: input float32[m + n]) -> float32[m + n] { return x }"
    message = "main: nothing says what 'm' is\n  it occurs in 'x' axis 0, which is 'm \\+ n'\n  help: make 'm' an axis of some argument"
    with pytest.raises(LowerError, match=message):
        lower(parse(text))


def test_work_that_nobody_reads_is_dropped_and_effects_stay():
    text = """
    def main[n](x: input float32[n]) -> float32[n] {
        a: float32[n] = cos(x)
        b: float32[n] = sin(a)
        c: () = print_(x)
        d: float32[n] = exp(x)
        return d
    }
    """
    assert kernels(program(text)) == ["print_", "exp"]


def test_views_of_weights_and_small_tables_are_made_at_load():
    text = """
    def main[n](x: input float32[n, 4], w: weight float32[6, 4], v: weight float32[2, 4]) -> (float32[n, 6], float32[8, 4]) {
        t: float32[4, 6] = permute_dims(w, axes=(1, 0))
        y: float32[n, 6] = matmul(x, t)
        table: float32[6] = arange(start=0, end=6)
        shifted: float32[n, 6] = add(y, table)
        copied: float32[8, 4] = concat(w, v)
        both: (float32[n, 6], float32[8, 4]) = (shifted, copied)
        return both
    }
    """
    method = program(text)
    assert [i.kernel for i in method.setup.instructions if isinstance(i, Run)] == ["arange"]
    assert kernels(method) == ["linear_plain", "add", "concat"]  # a copy of weights would take memory
    x, w, v = torch.randn(3, 4), torch.randn(6, 4), torch.randn(2, 4)
    y, both = session(text, w=w, v=v)["main"](x)
    torch.testing.assert_close(y, x @ w.T + torch.arange(6.0))
    assert torch.equal(both, torch.cat([w, v]))


def test_what_an_external_function_may_write_to_is_made_anew_for_each_call():
    text = """
    def main[n](x: input float32[n]) -> float32[4] {
        buffer: float32[4] = zeros(shape=(4,))
        scratch: float32[4] = empty(shape=(4,))
        written: float32[4] = extern(buffer, scratch, name="test_lower.add_one", out=type(float32[4]))
        return written
    }
    """
    assert not program(text).setup.instructions

    def add_one(buffer, scratch):
        buffer += 1
        return buffer

    nnfront.ops.control._EXTERNS.pop("test_lower.add_one", None)
    nnfront.ops.register_extern("test_lower.add_one", add_one)
    run = session(text)["main"]
    assert [run(torch.ones(1)).tolist() for _ in range(2)] == [[1.0] * 4] * 2


CHOICE = """
def main[n](flag: input bool, x: input float32[n], y: input float32[n]) -> (float32[n], float32[n]) {
    both: float32[n] = add(x, y)
    result: (float32[n], float32[n]) = if flag {
        a: float32[n] = exp(x)
        b: float32[n] = multiply(a, both)
        t: (float32[n], float32[n]) = (b, x)
        yield t
    } else {
        c: float32[n] = negative(both)
        t_1: (float32[n], float32[n]) = (both, c)
        yield t_1
    }
    first: float32[n] = result[0]
    second: float32[n] = result[1]
    sum: float32[n] = add(first, second)
    pair: (float32[n], float32[n]) = (sum, second)
    return pair
}
"""


@pytest.mark.parametrize("flag", [True, False])
def test_an_if_runs_one_branch_and_both_see_what_is_outside(flag):
    x, y = torch.randn(3), torch.randn(3)
    first, second = (torch.exp(x) * (x + y), x) if flag else (x + y, -(x + y))
    total, last = session(CHOICE)["main"](flag, x, y)
    torch.testing.assert_close(total, first + second)
    torch.testing.assert_close(last, second)


def test_a_tensor_may_be_the_condition():
    text = """
    def main[n](x: input float32[n]) -> float32[n] {
        total: float32[] = sum(x)
        positive: bool[] = greater(total, 0.0)
        y: float32[n] = if positive { yield x } else { z: float32[n] = negative(x) yield z }
        return y
    }
    """
    run = session(text)["main"]
    assert run(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert run(torch.tensor([1.0, -2.0])).tolist() == [-1.0, 2.0]


def test_results_of_an_if_that_nobody_reads_are_not_computed():
    text = """
    def main[n](flag: input bool, x: input float32[n]) -> float32[n] {
        r: (float32[n], float32[n]) = if flag {
            a: float32[n] = exp(x)
            b: float32[n] = cos(x)
            t: (float32[n], float32[n]) = (a, b)
            yield t
        } else {
            t_1: (float32[n], float32[n]) = (x, x)
            yield t_1
        }
        y: float32[n] = r[0]
        return y
    }
    """
    assert kernels(program(text)) == ["exp"]


def test_sizes_of_a_branch_are_computed_in_the_branch():
    text = """
    def main[n, m](flag: input bool, x: input float32[n], y: input float32[m]) -> float32[n] {
        r: float32[n] = if flag { yield x } else {
            k: float32[n // m] = zeros(shape=(n // m,))
            s: float32[] = sum(k)
            z: float32[n] = add(x, s)
            yield z
        }
        return r
    }
    """
    run = session(text)["main"]
    x = torch.randn(4)
    assert torch.equal(run(True, x, torch.zeros(0)), x)  # n // 0 is never asked for
    assert torch.equal(run(False, x, torch.zeros(2)), x)


MATCHED = """
private def square[n, m, k](x: input float32[n, m]) -> float32[] {
    y: float32[k, k] = match_shape(x, float32[k, k])
    z: float32[k*k] = reshape(y, shape=(k*k,))
    s: float32[] = sum(z)
    return s
}
def main[a, b, c, d](x: input float32[a, b], y: input float32[c, d]) -> float32[] {
    s: float32[] = @square(x)
    t: float32[] = @square(y)
    u: float32[] = add(s, t)
    return u
}
"""


def test_a_dim_that_a_body_defines_is_another_one_in_each_call():
    x, y = torch.randn(2, 2), torch.randn(3, 3)
    torch.testing.assert_close(session(MATCHED)["main"](x, y), x.sum() + y.sum())


@pytest.mark.parametrize("text", [TWO_LAYERS, CHOICE, MATCHED], ids=["calls", "if", "match"])
def test_no_slot_outlives_its_last_reader(text):
    """By brute force: after each instruction, every value slot that was written is either read later or cleared."""
    method = program(text)
    _check_frees(method.body.instructions, set(method.body.results), method)


def _check_frees(instructions, live_after: set[int], method: MethodProgram) -> None:
    alive: set[int] = set()
    for position, instruction in enumerate(instructions):
        later = live_after | {slot for i in instructions[position + 1 :] for slot in _reads(i)}
        if isinstance(instruction, Branch):
            for block in (instruction.then, instruction.otherwise):
                _check_frees(
                    block.instructions, later | set(block.results) | set(_reads(instruction)), method
                )
        alive |= {s for s in (*_reads(instruction), *_writes(instruction)) if _is_value(s, method)}
        alive -= set(instruction.frees)
        assert not set(instruction.frees) & later, "freed too early"
        assert alive <= later, "kept too long"


def _is_value(slot: int, method: MethodProgram) -> bool:
    return method.slots[slot].kind in ("value", "argument")


def _reads(instruction) -> set[int]:
    if isinstance(instruction, Branch):
        inner = {
            s for b in (instruction.then, instruction.otherwise) for i in b.instructions for s in _reads(i)
        }
        made = {
            s for b in (instruction.then, instruction.otherwise) for i in b.instructions for s in _writes(i)
        }
        results = {*instruction.then.results, *instruction.otherwise.results}
        return ({instruction.condition} | inner | results) - made
    return (
        {*instruction.inputs, *instruction.sized.values()}
        if isinstance(instruction, Run)
        else {instruction.input}
    )


def _writes(instruction) -> set[int]:
    return set(getattr(instruction, "outputs", ()))


def test_the_text_of_a_program_is_the_same_every_time_and_says_it_all():
    text = """
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[6*n] {
        y: float32[n, 6] = linear(x, w)                          # at head (model.py:3)
        z: float32[6*n] = reshape(y, shape=(6*n,))
        return z
    }
    """
    expected = """\
program for cpu

main(x: float32[n, 4]):
  dim n from 'x' axis 0
  weight w: float32[6, 4]
  body:
    y: float32[n, 6] = linear(x, w, None)    # head; frees x
    z: float32[6*n] = reshape(y, shape=[6*n])    # frees y
  return z
"""
    assert str(lower(parse(text))) == str(lower(parse(text))) == expected
