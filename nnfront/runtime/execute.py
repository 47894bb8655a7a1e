# SPDX-License-Identifier: Apache-2.0
"""Run blocks of a program over a frame: a list with one place for each slot.

Everything that can be decided before a call is: `prepare` turns each instruction into a *step*, a small function of the frame that
has its kernel, slots and constant attributes built in. `execute` only calls one step after the other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from nnfront.backends.backend import Frame as Frame
from nnfront.backends.backend import Pair
from nnfront.backends.backend import Step as Step
from nnfront.dims import Dim, Symbol, evaluator
from nnfront.errors import NnfrontError, RunError
from nnfront.lower import Block, Branch, Instruction, Match, Run, Slot, Structure, name_of, place, value_text
from nnfront.memory.free_memory import is_out_of_memory
from nnfront.runtime.bind_arguments import match_step
from nnfront.runtime.returned import Check, returned_check
from nnfront.state.between import BETWEEN

# From a kernel call to the function that does it: operands by position, sized attributes by keyword.
Resolve: TypeAlias = Callable[[Run], Callable[..., Any]]
# From steps and their instructions to fewer steps that do the same.
Join: TypeAlias = Callable[[Sequence[Pair], Sequence[Slot], str], Sequence[Pair]]


@dataclass(frozen=True, slots=True)
class Code:
    """A block ready to run: its steps, and the instruction behind each of them (None: sizes)."""

    steps: tuple[Step, ...]
    instructions: tuple[Instruction | None, ...]
    method: str = ""

    def __iter__(self) -> Iterator[Pair]:
        return zip(self.steps, self.instructions, strict=True)


def execute(code: Code, frame: Frame) -> None:
    """Run all steps.

    What a step raises says where in the model it comes from. An error that is none of nnfront's becomes the cause of a RunError;
    one that says that memory is short is left to the caller.
    """
    step: Step | None = None
    try:
        for step in code.steps:
            step(frame)
            if (between := BETWEEN.do) is not None:
                between()
    except Exception as error:
        instruction = next((i for s, i in code if s is step), None)
        where = place(code.method, instruction)
        if isinstance(error, NnfrontError):
            error.where = error.where or where
            raise
        if is_out_of_memory(error):
            if not getattr(error, "__notes__", None):
                error.add_note(f"{_name(instruction)}, {where}")
            raise
        raise _failed(instruction, frame, error, where) from error


def _name(instruction: Instruction | None) -> str:
    match instruction:
        case Run():
            return name_of(instruction)
        case Branch():
            return "if"
        case Match():
            return "match_shape"
        case None:
            return "a call"


def _failed(instruction: Instruction | None, frame: Frame, error: Exception, where: str) -> RunError:
    """An instruction whose function did not take its operands."""
    text = next(iter(str(error).splitlines()), "")
    operands = [] if instruction is None else [value_text(frame[i]) for i in instruction.reads()]
    return RunError(
        f"{_name(instruction)} failed with {type(error).__name__}{f': {text}' if text else ''}",
        details=[f"operands: {', '.join(operands)}"] if operands else [],
        where=where,
    )


def prepare(
    block: Block,
    slots: Sequence[Slot],
    resolve: Resolve,
    dims: Mapping[Symbol, int],
    method: str = "",
    join: Join | None = None,
    target: str = "cpu",
) -> Code:
    """Turn a block into steps. `resolve` gives the function for each kernel, `dims` the slot of each dim.

    `method` is the name for errors. `join` makes one step of several where a target can. `target` is the program's.
    """
    pairs: list[Pair] = []
    if block.sizes:
        pairs.append((size_step(block.sizes, slots, dims), None))
    for instruction in block.instructions:
        match instruction:
            case Run():
                check = returned_check(instruction, slots, dims, target)
                step = _run_step(instruction, resolve(instruction), check)
                pairs.append((_checked(step, instruction) if checks_nan() else step, instruction))
            case Branch():
                then = prepare(instruction.then, slots, resolve, dims, method, join, target)
                otherwise = prepare(instruction.otherwise, slots, resolve, dims, method, join, target)
                pairs.append((_branch_step(instruction, then, otherwise), instruction))
            case Match():
                pairs.append((match_step(instruction, slots[instruction.input].name), instruction))
                if instruction.sizes:
                    pairs.append((size_step(instruction.sizes, slots, dims), None))
    if join is not None and not checks_nan():
        pairs = list(join(pairs, slots, method))
    return Code(tuple(step for step, _ in pairs), tuple(instruction for _, instruction in pairs), method)


def initial_frame(slots: Sequence[Slot]) -> Frame:
    """Return a frame with the constants in their places and None everywhere else."""
    return [_constant(slot.value) if slot.kind == "constant" else None for slot in slots]


def _constant(value: Any) -> Any:
    data = getattr(value, "data", None)
    if data is None:
        return value
    dtype: torch.dtype = getattr(torch, value.type.dtype)
    if not data:
        return torch.empty(value.type.shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(value.type.shape)


def size_step(indices: Sequence[int], slots: Sequence[Slot], dims: Mapping[Symbol, int]) -> Step:
    """Return the step that computes sizes from dims: numbers, or nested tuples of numbers."""
    flat: list[Dim] = []
    constants: list[Any] = []  # by their numbers: the source holds nothing that the program says

    def source(value: Any) -> str:
        if isinstance(value, (tuple, list)):
            return f"({''.join(source(part) + ', ' for part in value)})"
        name, values = ("v", flat) if isinstance(value, Dim) else ("c", constants)
        values.append(value)
        return f"{name}[{len(values) - 1}]"

    body = "".join(f" frame[{i}] = {source(slots[i].value)}\n" for i in indices)
    symbols = list(dict.fromkeys(symbol for dim in flat for symbol in dim.symbols))
    known = "".join(f"frame[{dims[symbol]}], " for symbol in symbols)
    scope: dict[str, Any] = {"run": evaluator(flat, symbols), "c": constants}
    exec(f"def step(frame):\n v = run(({known}))\n{body}", scope)
    step: Step = scope["step"]
    return step


def _run_step(run: Run, call: Callable[..., Any], check: Check | None) -> Step:
    outputs = run.outputs
    make = _run_maker(
        len(run.inputs),
        tuple(run.sized),
        _target(run.result),
        len(outputs),
        len(run.frees),
        check is not None,
    )
    step: Step = make(call, check, *run.inputs, *run.sized.values(), *outputs, *run.frees)
    return step


def _target(result: Structure) -> str:
    """What a result is assigned to: `frame[o0] = `, or `(frame[o0], frame[o1], ) = ` if it is taken apart."""
    count = itertools.count()

    def source(part: Structure) -> str:
        return (
            f"frame[o{next(count)}]"
            if part.is_leaf
            else f"({''.join(f'{source(p)}, ' for p in part.fields)})"
        )

    # What returns no fields may return anything.
    return f"{source(result)} = " if result.is_leaf or result.fields else ""


@cache
def _run_maker(
    inputs: int, keywords: tuple[str, ...], target: str, outputs: int, frees: int, is_checked: bool
) -> Callable[..., Step]:
    """Return a maker of steps of one form: the call, the indices of its operands, results and frees become closure variables."""
    assert all(map(str.isidentifier, keywords)), "attributes are called like the parameters of type rules"
    counts = (("a", inputs), ("k", len(keywords)), ("o", outputs), ("f", frees))
    indices = [f"{kind}{i}" for kind, n in counts for i in range(n)]
    operands = [f"frame[a{i}]" for i in range(inputs)] + [f"{k}=frame[k{i}]" for i, k in enumerate(keywords)]
    result = f"call({', '.join(operands)})"
    clear = "  " + "".join(f"frame[f{i}] = " for i in range(frees)) + "None\n" if frees else ""
    source = (
        f"def make({', '.join(['call', 'check', *indices])}):\n"
        " def step(frame):\n"
        f"  {target}{f'check(frame, {result})' if is_checked else result}\n"
        f"{clear}"
        " return step\n"
    )
    scope: dict[str, Any] = {}
    exec(source, scope)
    maker: Callable[..., Step] = scope["make"]
    return maker


def checks_nan() -> bool:
    """NNFRONT_CHECK_NAN=1: methods made while it is set stop at the first instruction that makes a NaN of operands without one."""
    return os.environ.get("NNFRONT_CHECK_NAN") == "1"


def _checked(step: Step, run: Run) -> Step:
    def checked(frame: Frame) -> None:
        before = [frame[slot] for slot in run.inputs]
        step(frame)
        if any(_has_nan(frame[slot]) for slot in run.outputs) and not any(map(_has_nan, before)):
            raise RunError(f"{run.op} made a NaN", details=["its operands have none"])

    return checked


def _has_nan(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _branch_step(branch: Branch, then: Code, otherwise: Code) -> Step:
    condition, outputs, frees = branch.condition, branch.outputs, branch.frees
    results = branch.then.results, branch.otherwise.results

    def step(frame: Frame) -> None:
        taken = bool(frame[condition])
        execute(then if taken else otherwise, frame)
        values = [frame[i] for i in results[0 if taken else 1]]
        for output, value in zip(outputs, values, strict=True):
            frame[output] = value
        for i in frees:
            frame[i] = None

    return step
