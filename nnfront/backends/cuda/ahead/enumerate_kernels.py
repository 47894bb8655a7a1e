# SPDX-License-Identifier: Apache-2.0
"""Which kernels a program will launch, found by running its kernels on tensors without data; and those compiled, without a GPU.

For a grid of sizes, each instruction that has a kernel for the GPU is called with tensors of the meta device, under a launcher that keeps
the plans: what runs is what will run, but for the GPU. Views in front of it run as well, as strides and offsets decide how a
kernel is compiled; all else is a fresh tensor of the type that the program says. So it takes no longer for many equal layers than for one,
both ways of a branch are seen, and ops that need data do not have to run.

What is not foreseen Triton compiles where the program runs: kernels of a user's own, and those of instructions that `CompiledKernels.notes` names.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from nnfront.backends.cuda.ahead.call_sizes import BITS, EARLIER, PAGE, PAGES, Sizes, check_sizes, grid
from nnfront.backends.cuda.ahead.cubin import CompiledKernels, Cubin, read_cubin
from nnfront.backends.cuda.captured_cache import enumerate_copies
from nnfront.backends.cuda.graph_safety import states_in_place, tokens_by_torch, why_not
from nnfront.backends.cuda.kernel_package import arch_of, kernel_module
from nnfront.backends.cuda.sampling import enumerate_draws
from nnfront.backends.cuda.table import ON_DEVICE
from nnfront.backends.device import META, default_device, overriding_device
from nnfront.backends.registry import parts_of
from nnfront.backends.table import resolver
from nnfront.dims import Dim, Symbol, evaluate
from nnfront.errors import LowerError, RunError
from nnfront.lower import (
    Branch,
    Instruction,
    Match,
    MethodProgram,
    Program,
    Run,
    ScalarType,
    ShapeType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
    type_text,
)
from nnfront.runtime.bind_arguments import match_step
from nnfront.runtime.execute import Frame, execute, prepare
from nnfront.runtime.fast_check import put
from nnfront.runtime.load_frame import loaded_frame
from nnfront.state.cache import Cache
from nnfront.state.contiguous import make_cache


def kernels_of(
    program: Program,
    known: Mapping[Symbol, int],
    sizes: Sizes | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    draws: bool = False,
) -> CompiledKernels | None:
    """Return all kernels that a program may launch, compiled for the architecture that its target names; None if it names none.

    `known` are the dims that weights have bound. `sizes` are the sizes that calls will have, by the name of the dim; for others it is
    powers of two inside their range. `progress` is told how many kernels of how many are compiled. `draws`: also the kernels that draw
    tokens from what `decode` returns.
    Raises LowerError for a name or a size that no method has, and where Triton interprets kernels.
    """
    if parts_of(program.target).arch is None:
        return None
    ahead = kernel_module("ahead")
    if not ahead.can_compile():
        raise LowerError(
            "kernels cannot be compiled in a process where Triton interprets them",
            help="unset TRITON_INTERPRET, or compile for 'cuda'",
        )
    arch = arch_of(program.target)
    plans, notes = enumerate_plans(program, known, sizes or {}, draws=draws)
    made: list[Cubin] = []
    threads = min(os.cpu_count() or 1, 16)
    with ahead.without_paths(), _without_collections(), ThreadPoolExecutor(threads) as pool:
        waiting = [pool.submit(ahead.build, plan, arch) for plan in plans.values()]
        try:
            for build in waiting:
                made.append(read_cubin(*build.result()))
                if progress is not None:
                    progress(len(made), len(waiting))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return CompiledKernels(arch, tuple(sorted(made, key=lambda cubin: (cubin.kernel, cubin.key))), notes)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Let threads parse kernels at once: in CPython 3.11 a collection in the middle of `ast.parse` may let another thread parse, and then
    one of them fails with "AST constructor recursion depth mismatch" (python/cpython#106905). Garbage of 41 kernels is 50 MiB.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def enumerate_plans(
    program: Program, known: Mapping[Symbol, int], sizes: Sizes, *, draws: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a plan for each specialisation that the methods launch, by its key, and for methods that are not seen in full why."""
    arch, common, ahead = arch_of(program.target), kernel_module("common"), kernel_module("ahead")
    check_sizes(program, known, sizes)
    plans: dict[str, Any] = {}
    notes: dict[str, str] = {}
    seen: set[Any] = set()

    def collect(plan: Any) -> None:
        mark = ahead.fingerprint(plan)
        if mark not in seen:
            seen.add(mark)
            plans.setdefault(ahead.key_of(plan, arch), plan)

    with overriding_device(META), default_device(META), torch.no_grad():
        with common.planning_for(arch), common.launched_by(collect):
            for method in program.methods.values():
                stage = _Stage(method, known)
                for numbers in grid(method, known, sizes) if stage.launches else ():
                    stage.replay(numbers)
                if stage.missed:
                    notes[method.name] = "; ".join(stage.missed)
            if draws:
                _draw(program)
    return plans, notes


def _draw(program: Program) -> None:
    """Draw a token from what `decode` returns."""
    method = program.methods["decode"]
    logits = method.slots[method.result.slot].type if method.result.is_leaf else None
    if isinstance(logits, TensorType) and isinstance(logits.shape[-1], int):
        enumerate_draws(torch.empty(1, logits.shape[-1], dtype=getattr(torch, logits.dtype), device=META))


_LAUNCHING = {kernel.name for kernel in ON_DEVICE}


class _Stage:
    """A method whose instructions are called one by one."""

    def __init__(self, method: MethodProgram, known: Mapping[Symbol, int]) -> None:
        self._called: set[int] = set()  # the instructions that could be called
        self._failed: dict[int, str] = {}  # by the place among those wanted, why one could not be
        self._method = method
        self._calls: dict[int, Callable[..., Any]] = {}
        self._makers: dict[int, Run] = {}
        self._ways: dict[int, int] = {}  # from a branch's result to that of one of its ways
        for instruction in _walk(method.body.instructions):
            if isinstance(instruction, Run):
                self._makers.update((slot, instruction) for slot in instruction.outputs)
            elif isinstance(instruction, Branch):
                self._ways.update(zip(instruction.outputs, instruction.then.results, strict=True))
        self._in_place, self._tokens = states_in_place(method), tokens_by_torch(method)
        self._is_captured = not why_not(method)
        self._copied: set[Any] = set()  # of which caches rows have been copied: sizes of pages, and bits
        self._matches = [i for i in _walk(method.body.instructions) if isinstance(i, Match)]
        self._frame = self._loaded({symbol.name: number for symbol, number in known.items()}, known)
        self.wanted = self._different(
            run
            for run in _walk(method.body.instructions)
            if isinstance(run, Run) and run.kernel in _LAUNCHING
        )

    def replay(self, numbers: Mapping[str, int]) -> None:
        """Call each instruction with the sizes of one point of the grid."""
        frame = self._frame.copy()
        given = [self._argument(argument.type, numbers) for argument in self._method.arguments]
        for argument, value in zip(self._method.arguments, given, strict=True):
            put(frame, argument.structure, value)
        caches = [(value, value.mark()) for value in given if isinstance(value, Cache)]
        try:
            numbers = {**numbers, **self._matched(frame, numbers)}
        except RunError:
            return  # a call with these sizes ends there as well
        if (way := (numbers.get(PAGE), numbers.get(BITS))) not in self._copied:
            self._copied.add(way)
            self._copy(given)
        for place, run in enumerate(self.wanted):
            try:
                self._call(run, frame, numbers)
                self._called.add(place)
            except (ValueError, RuntimeError, NotImplementedError, RunError) as error:
                self._failed.setdefault(place, str(error).partition("\n")[0])
            if any(isinstance(self._method.slots[slot].type, StateLayerType) for slot in run.inputs):
                for cache, mark in caches:  # another way of a branch may write to the same layer
                    for layer in cache:
                        layer.set_lengths(mark.lengths)

    @property
    def launches(self) -> bool:
        """Whether calls may launch something."""
        has_caches = any(isinstance(argument.type, StateType) for argument in self._method.arguments)
        return bool(self.wanted) or (has_caches and self._is_captured)

    def _copy(self, given: Sequence[Any]) -> None:
        """Launch what a captured call copies of caches for torch: the same kernels for any number of sequences and tokens."""
        for argument, value in zip(self._method.arguments, given, strict=True):
            if self._is_captured and isinstance(value, Cache):
                stay = [(i, name) for at, i, name in self._in_place if at == argument.structure.slot]
                enumerate_copies(value, stay, tokens=self._tokens)

    @property
    def missed(self) -> list[str]:
        """The instructions that could not be called with any sizes, and why. One that fails with some is of a way that those do not take."""
        found = [
            (self.wanted[place], why) for place, why in self._failed.items() if place not in self._called
        ]
        return [f"{run.op}{f' at {run.module}' if run.module else ''}: {why}" for run, why in found]

    def _matched(self, frame: Frame, numbers: Mapping[str, int]) -> dict[str, int]:
        """The dims that matches of shapes define."""
        found: dict[str, int] = {}
        for match in self._matches:
            frame[match.input] = self._value(match.input, frame, {**numbers, **found})
            match_step(replace(match, frees=()), "a value")(frame)
            found |= {symbol.name: frame[slot] for symbol, slot in match.defines}
        return found

    def _loaded(self, numbers: Mapping[str, int], known: Mapping[Symbol, int]) -> Frame:
        """The frame after loading weights without data."""
        method, values = self._method, {"weight": {}, "transformed": {}}  # type: tuple[MethodProgram, dict[str, dict[str, Any]]]
        for weight in method.weights:
            values[weight.role][weight.name] = self._argument(weight.type, numbers)
        said = {symbol: (number, "the weights") for symbol, number in known.items()}
        frame = loaded_frame(method, values, said, META)
        dims = {binding.symbol: binding.slot for binding in method.dims}
        call, target = resolver(method.target), method.target
        execute(prepare(method.setup, method.slots, call, dims, method.name, target=target), frame)
        return frame

    def _different(self, runs: Iterator[Run]) -> list[Run]:
        """One of each that are called in the same way: with operands of the same types, through the same views."""
        found: dict[str, Run] = {}
        for run in runs:
            found.setdefault(self._form(run), run)
        return list(found.values())

    def _form(self, run: Run) -> str:
        sized = [f"{name}={self._method.slots[slot]}" for name, slot in run.sized.items()]
        return f"{run.kernel} {run.attrs} {sized} {[self._operand_form(slot) for slot in run.inputs]}"

    def _operand_form(self, slot: int) -> str:
        """What a value is to a kernel: its type, and the views that it comes through."""
        held, maker = self._method.slots[slot], self._makers.get(slot)
        if maker is not None and maker.is_view and isinstance(held.type, TensorType):
            return f"{maker.outputs.index(slot)} of {self._form(maker)}"
        value = self._frame[slot]
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
        return repr(value) if held.type is None else f"{held.kind} {type_text(held.type)}"

    def _call(self, run: Run, frame: Frame, numbers: Mapping[str, int]) -> None:
        call = self._calls.get(id(run))
        if call is None:
            call = self._calls[id(run)] = resolver(self._method.target)(run)
        operands = [self._value(slot, frame, numbers) for slot in run.inputs]
        sized = {name: self._value(slot, frame, numbers) for name, slot in run.sized.items()}
        result = call(*operands, **sized)
        put(frame, run.result, result)

    def _value(self, slot: int, frame: Frame, numbers: Mapping[str, int]) -> Any:
        """The value of a slot: what is there, or made on demand."""
        slot = self._ways.get(slot, slot)
        held = self._method.slots[slot]
        if frame[slot] is not None or held.kind == "constant":
            return frame[slot]
        if held.kind in ("dim", "size"):
            frame[slot] = _evaluated(held.value if held.kind == "size" else numbers.get(held.name), numbers)
            return frame[slot]
        maker = self._makers.get(slot)
        if maker is not None and maker.is_view:
            self._call(maker, frame, numbers)
        elif maker is not None and isinstance(held.type, StateLayerType):
            # What an instruction that has written to a layer returns is that layer.
            given = next(i for i in maker.inputs if isinstance(self._method.slots[i].type, StateLayerType))
            frame[slot] = self._value(given, frame, numbers)
        else:
            frame[slot] = self._argument(held.type, numbers)
        return frame[slot]

    def _argument(self, type: Type | None, numbers: Mapping[str, int]) -> Any:
        match type:
            case TensorType():
                shape = tuple(evaluate(size, numbers) for size in type.shape)
                return torch.empty(shape, dtype=getattr(torch, type.dtype), device=META)
            case ScalarType():
                if type.value is not None:
                    return evaluate(type.value, numbers)
                return {"bool": False, "int64": 1, "float64": 1.0}[type.dtype]
            case ShapeType():
                return tuple(evaluate(size, numbers) for size in type.sizes)
            case TupleType():
                return tuple(self._argument(field, numbers) for field in type.fields)
            case StateType():
                return self._cache(type, numbers)
            case _:
                return None

    def _cache(self, type: StateType, numbers: Mapping[str, int]) -> Cache:
        """A cache that holds some tokens already."""
        page, pages = numbers[PAGE] or None, numbers[PAGES] or None
        coded = "float8_e4m3fn" if numbers[BITS] == 8 else None
        cache = make_cache(type, numbers, self._method.target, page_size=page, pages=pages, stored_as=coded)
        for layer in cache if numbers[EARLIER] else ():
            layer.reserve(numbers[EARLIER])
        return cache


def _walk(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        yield instruction
        if isinstance(instruction, Branch):
            yield from _walk(instruction.then.instructions)
            yield from _walk(instruction.otherwise.instructions)


def _evaluated(size: Any, numbers: Mapping[str, int]) -> Any:
    """A size, or a nested list of sizes, in numbers."""
    if isinstance(size, tuple | list):
        return tuple(_evaluated(part, numbers) for part in size)
    return evaluate(size, numbers) if isinstance(size, Dim) else size
