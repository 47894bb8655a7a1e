# SPDX-License-Identifier: Apache-2.0
"""`Method`: one method with its weights, ready to be called."""

from __future__ import annotations

import copy
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nnfront.backends.backend import After
from nnfront.backends.device import current, default_device
from nnfront.backends.registry import backend_of
from nnfront.backends.table import resolver
from nnfront.dims import Symbol, substitute
from nnfront.errors import RunError
from nnfront.lower import Block, Instruction, MethodProgram, Run
from nnfront.lower.cost import bytes_of, flops_of
from nnfront.memory.free_memory import is_out_of_memory
from nnfront.runtime.bind_arguments import Known, arrange
from nnfront.runtime.cases import CaseList, Explanation, Hits, explain_call
from nnfront.runtime.dispatch_tree import find_route
from nnfront.runtime.execute import Code, Frame, Join, execute, prepare
from nnfront.runtime.fast_check import compile_check, put
from nnfront.runtime.load_frame import Values, left_open, loaded_frame, matched_dims
from nnfront.runtime.out_of_memory import call_error
from nnfront.runtime.profile import RUNS, Clock, Event, Profile
from nnfront.runtime.results import result_maker
from nnfront.state.use import Use


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Loaded:
    """A frame with the weights in place, and what makes a caller's result of a frame that has run."""

    template: Frame
    result: Callable[[Frame], Any]


class LoadedMethods:
    """What the methods of a session run with, by name: replaced for all of them at once, while calls in flight keep what they took."""

    def __init__(self) -> None:
        self.loaded: Mapping[str, Loaded] = {}


class Method:
    """A method with its weights. Call it with torch tensors; it may run in several threads at once."""

    def __init__(
        self,
        program: MethodProgram,
        weights: Values,
        known: Known,
        loaded_methods: LoadedMethods | None = None,
        launcher: Any = None,
    ) -> None:
        """`known` are the dims that weights bind, those of this method and of others; methods that change together share a loaded_methods.

        `launcher` launches its kernels instead of Triton.
        """
        self.program = program
        self._launcher = launcher
        self.name = program.name
        self._backend = backend_of(program.target)
        self._device = self._backend.device(program.target)
        self._check = compile_check(program, known, self._device, left_open(program, weights, known))
        self._hits = Hits(program)
        self._setup = self._prepared(program.setup)
        self._route = find_route(program.body, self._prepared)
        self._count = len(program.arguments)
        self._states = [i for i, a in enumerate(program.arguments) if a.role == "state"]
        self._shared = [i for i in self._states if program.arguments[i].name in program.shared]
        self.graphs = self._backend.capture(program, self._device, self._run)
        """What of the method's calls has been captured on a GPU; None if nothing can be."""
        self._after: After | None = None
        self._loaded_methods = loaded_methods or LoadedMethods()
        loaded = self._finished(loaded_frame(program, weights, known, self._device))
        self._loaded_methods.loaded = {**self._loaded_methods.loaded, self.name: loaded}

    def _prepared(self, block: Block, join: Join | None = None) -> Code:
        dims = {b.symbol: b.slot for b in self.program.dims} | matched_dims(self.program)
        resolve, join = resolver(self.program.target), join or self._backend.join
        return prepare(
            block,
            self.program.slots,
            lambda run: self._hits.resolve(run, resolve),
            dims,
            self.name,
            join,
            self.program.target,
        )

    @property
    def hits(self) -> dict[str, int]:
        """How many calls took each special case, `general` for none of them; empty if the method has no cases."""
        return self._hits.read()

    def explain(self, *args: Any, **kwargs: Any) -> Explanation | CaseList:
        """Say which special case a call with these arguments takes and why; nothing runs. Without arguments, list the cases.

        Raises RunError if the arguments do not fit the signature.
        """
        if self._count and not args and not kwargs:
            return CaseList(self.name, self.hits, self._captured)
        frame = self._loaded_methods.loaded[self.name].template.copy()
        self._check(frame, tuple(arrange(self.program, args, kwargs)))
        return explain_call(self.program, frame, self.hits)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run it several times with these arguments, as it runs and instruction by instruction, and say where the time goes.

        Caches are left as they were. Raises RunError as a call does.
        """
        args = tuple(arrange(self.program, args, kwargs))
        clock = Clock(self._device)
        slow = copy.copy(self)
        slow._hits, slow.graphs = Hits(self.program), None
        slow._route = find_route(self.program.body, lambda block: slow._prepared(block, clock.joined))
        marks = [(args[i], args[i].snapshot()) for i in self._states]

        def seconds(method: Method) -> float:
            begin = clock.now()
            method(*args)
            spent = clock.now() - begin
            for cache, mark in marks:
                cache.restore(mark)
            return spent

        times = [seconds(self) for _ in range(RUNS + 1)][1:]
        for _ in range(RUNS + 1):
            clock.begin()
            seconds(slow)
        frame = self._loaded_methods.loaded[self.name].template.copy()
        self._check(frame, args)
        dims = {b.symbol: frame[b.slot] for b in self.program.dims}
        return Profile(
            self.name,
            {symbol.name: number for symbol, number in dims.items()},
            statistics.median(times),
            tuple(self._event(*measured, dims) for measured in clock.measured()),
        )

    def _event(self, instruction: Instruction, seconds: float, dims: Mapping[Symbol, int]) -> Event:
        if not isinstance(instruction, Run):
            return Event("match_shape", "", instruction.module, instruction.line, seconds, 0, 0)
        costs = (cost(instruction, self.program.slots) for cost in (bytes_of, flops_of))
        known = [substitute(size, dims) for size in costs]
        nbytes, flops = (size if isinstance(size, int) else None for size in known)
        run = instruction
        return Event(run.op, run.kernel, run.module, run.line, seconds, nbytes, flops)

    @property
    def _captured(self) -> str:
        """What of its calls is captured, in words; "" on a CPU."""
        if self.graphs is not None or not self._backend.captures:
            return "" if self.graphs is None else str(self.graphs)
        reason = self._backend.why_not_captured(self.program) or "by NNFRONT_GRAPHS or NNFRONT_CHECK_NAN"
        return f"{self.name}: not captured, {reason}"

    def load_dims(self) -> dict[str, int]:
        """The dims that weights have bound, by name."""
        template = self._loaded_methods.loaded[self.name].template
        return {b.symbol.name: template[b.slot] for b in self.program.dims if template[b.slot] is not None}

    def only(self, case: str | None) -> Method:
        """Return this method with one special case, or `general`, taken in every call, whether it holds or not; None: as it is.

        It counts its hits by itself. What it computes is right only for arguments that meet the case. Raises RunError for a case
        that the method does not have.
        """
        known = self.hits
        if case is not None and case not in known:
            raise RunError(
                f"{self.name} has no case {case!r}",
                details=[f"its cases are {', '.join(map(repr, known)) or 'none'}"],
            )
        method = copy.copy(self)
        method._hits = Hits(self.program)
        route = find_route(self.program.body, method._prepared)
        method._route = route if case is None else route.only(case)
        return method

    def followed_by(self, after: After) -> Method:
        """Return this method with a function of its result behind it, which is captured with it where calls are."""
        method = copy.copy(self)
        method._after = after
        method.graphs = None if self.graphs is None else self.graphs.followed_by(after)
        return method

    def with_weights(self, changed: Values) -> Loaded:
        """Return what the method would run with if these weights, of the same types, were in the place of theirs."""
        template = self._loaded_methods.loaded[self.name].template.copy()
        for weight in self.program.weights:
            if weight.name in changed.get(weight.role, {}):
                put(template, weight.structure, changed[weight.role][weight.name])
        return self._finished(template)

    def _finished(self, template: Frame) -> Loaded:
        with default_device(self._device), torch.inference_mode():
            execute(self._setup, template)
        return Loaded(template, result_maker(self.program, template))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: arguments by position, in the order of the signature, or by name.

        Returns torch tensors, or tuples and dicts of them, as the model's method does. States (caches) are written in place.
        Raises RunError, before anything runs, if the arguments do not fit the signature or another call uses a cache; and for what goes
        wrong while it runs, too little memory among it, with the states as they were.
        """
        loaded = self._loaded_methods.loaded[self.name]
        frame = loaded.template.copy()
        if kwargs or len(args) != self._count:
            args = tuple(arrange(self.program, args, kwargs))
        self._check(frame, args)
        uses = self._begin(args)
        marks = [args[i].mark() for i in self._states]
        try:
            if self.graphs is not None:
                with current(self._device):
                    result = self.graphs(loaded, frame, loaded.result)
            else:
                result = self._run(frame, loaded.result)
            self._check_layers(args)
            return result
        except BaseException as error:
            for i, mark in zip(self._states, marks, strict=True):
                args[i].restore(mark)
            if not is_out_of_memory(error):
                raise
            sizes = {b.symbol.name: frame[b.slot] for b in self.program.dims}
            # What the call has made is let go of: that of the frame here, that of kernels with what the traceback holds of them.
            frame.clear()
            traceback.clear_frames(error.__traceback__)
            raise call_error(self.program, sizes, error, self._device) from error
        finally:
            for use in uses:
                use.end()

    def _begin(self, args: Sequence[Any]) -> list[Use]:
        """Take the caches for a call. Raises RunError, with none taken, if another call uses one."""
        taken: list[Use] = []
        for i in self._states:
            use: Use = args[i].use
            if use in taken:
                continue
            if not use.begin(self.name):
                by = use.method
                for other in taken:
                    other.end()
                raise RunError(
                    f"{self.name}: the cache {self.program.arguments[i].name!r} is in use",
                    details=[f"a call of {by!r} has not ended that uses it, or one that shares its memory"],
                    help="a cache belongs to one caller at a time: make one for each thread",
                )
            taken.append(use)
        for i in self._shared:
            args[i].share(self.program.shared[self.program.arguments[i].name])
        return taken

    def _check_layers(self, args: Sequence[Any]) -> None:
        """Raise RunError if a call has given one layer of a cache other tokens than another."""
        for i in self._states:
            uneven = args[i].uneven()
            if uneven is not None:
                raise RunError(
                    f"{self.name}: layers of the cache {self.program.arguments[i].name!r} got different numbers of tokens",
                    details=[f"layer 0 holds {args[i].lengths}", uneven],
                    help="let one attention append to each layer: cache=cache[i] in layer i",
                )

    def _run(self, frame: Frame, result_of: Callable[[Frame], Any] | None = None) -> Any:
        """Do the work of a call whose arguments and dims are in the frame; return what is made of that then, if anything is."""
        with self._backend.launching(self._launcher), default_device(self._device):
            with torch.inference_mode():
                route = self._route
                execute(route.code, frame)
                while route.condition >= 0:
                    route = route.ways[bool(frame[route.condition])]
                    execute(route.code, frame)
            with torch.no_grad():
                execute(route.last, frame)
                if result_of is None:
                    return None
                result = result_of(frame)
                return result if self._after is None else self._after(result)

    def __repr__(self) -> str:
        return f"<Method {self.name}({', '.join(a.name for a in self.program.arguments)})>"
