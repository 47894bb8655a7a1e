# SPDX-License-Identifier: Apache-2.0
"""`Method`: one method with its weights, ready to be called."""

from __future__ import annotations

from typing import Any

import torch

from nnfront.lower import MethodProgram
from nnfront.runtime.check import compile_check
from nnfront.runtime.cpu import resolve
from nnfront.runtime.execute import execute, prepare
from nnfront.runtime.loading import Values, loaded_frame, matched_dims
from nnfront.runtime.results import result_maker, split_results
from nnfront.runtime.signature import Known, arrange


class Method:
    """A method with its weights. Call it with torch tensors; it may run in several threads at once."""

    def __init__(self, program: MethodProgram, weights: Values, known: Known) -> None:
        """`known` are the dims that weights bind, those of this method and of others."""
        self.program = program
        self.name = program.name
        self._template = loaded_frame(program, weights, known)
        self._check = compile_check(program, known)
        dims = {b.symbol: b.slot for b in program.dims} | matched_dims(program)
        first, last = split_results(program.body)
        self._code = prepare(first, program.slots, resolve, dims, self.name)
        self._last = prepare(last, program.slots, resolve, dims, self.name)
        with torch.inference_mode():
            execute(prepare(program.setup, program.slots, resolve, dims, self.name), self._template)
        self._result = result_maker(program, self._template)
        self._count = len(program.arguments)
        self._states = [i for i, a in enumerate(program.arguments) if a.role == "state"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it: arguments by position, in the order of the signature, or by name.

        Returns torch tensors, or tuples and dicts of them, as the model's method does. States (caches) are written in place.
        Raises RunError, before anything runs, if the arguments do not fit the signature.
        """
        frame = self._template.copy()
        if kwargs or len(args) != self._count:
            args = tuple(arrange(self.program, args, kwargs))
        self._check(frame, args)
        marks = [args[i].mark() for i in self._states]
        try:
            with torch.inference_mode():
                execute(self._code, frame)
            with torch.no_grad():
                execute(self._last, frame)
                return self._result(frame)
        except BaseException:
            for i, mark in zip(self._states, marks, strict=True):
                args[i].restore(mark)
            raise

    def __repr__(self) -> str:
        return f"<Method {self.name}({', '.join(a.name for a in self.program.arguments)})>"
