# SPDX-License-Identifier: Apache-2.0
"""A key for each result of a weight transform: equal keys mean equal bytes, whatever the program around it looks like.

The key of a weight is its content; the key of a computed value is its op, attributes and the keys of its operands; names of
results and variables take no part. So a result keeps its key when a model gains a layer, and changes it when one of the tensors
it is made of does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from nnfront.dims import Dim, Symbol, evaluate
from nnfront.lower import MethodProgram, Run, ScalarType, Slot
from nnfront.transform.schedule import groups_of

VERSION = "1"
"""Part of every key, as is torch's version: it grows when an op changes its meaning."""


def result_keys(
    program: MethodProgram, only: Collection[str], content: Callable[[str], str], dims: Mapping[Symbol, int]
) -> dict[str, str]:
    """Return the keys of the results named in `only`. Results behind effects, branches and shapes found on the way have none.

    `content` gives what a weight is: its dtype, shape and the hash of its bytes. It is asked for the weights that these results
    need, each once. `dims` are the sizes that weights bind.
    """
    results = {name: slot for name, slot in program.results.items() if name in only}
    weights = {w.structure.slot: w.name for w in program.weights if w.structure.is_leaf}
    keys: dict[int, str | None] = {}

    def key_of(slot: int) -> str | None:
        if slot not in keys:
            keys[slot] = (
                weight_key(content(weights[slot])) if slot in weights else _key_of(program.slots[slot], dims)
            )
        return keys[slot]

    for _, instructions in groups_of(program.body.instructions, {}, results.values()):
        for instruction in instructions:
            if isinstance(instruction, Run) and instruction.is_pure:
                operands = [key_of(i) for i in (*instruction.inputs, *instruction.sized.values())]
                keys.update(_keys_of(instruction, operands))
            else:
                keys.update(dict.fromkeys(instruction.outputs))
    found = {name: key_of(slot) for name, slot in results.items()}
    return {name: key for name, key in found.items() if key is not None}


def weight_key(content: str) -> str:
    """The key of a result that is a weight as it is."""
    return _hash("weight", content)


def _keys_of(run: Run, operands: list[str | None]) -> dict[int, str | None]:
    known = [key for key in operands if key is not None]
    if len(known) < len(operands):
        return dict.fromkeys(run.outputs)
    text = repr((VERSION, torch.__version__, run.op, sorted(run.attrs.items()), list(run.sized)))
    return {slot: _hash("run", text, str(i), *known) for i, slot in enumerate(run.outputs)}


def _key_of(slot: Slot, dims: Mapping[Symbol, int]) -> str | None:
    """The key of what no instruction makes: a constant, a dim or a size."""
    if slot.kind == "constant":
        return _hash("constant", str(slot.type), getattr(slot.value, "data", repr(slot.value)))
    value = slot.type.value if slot.kind == "dim" and isinstance(slot.type, ScalarType) else slot.value
    number = _number(value, dims)
    return None if number is None else _hash("size", repr(number))


def _number(value: Any, dims: Mapping[Symbol, int]) -> Any:
    """A size, or a nested tuple of them, as numbers; None if a dim in it has none."""
    if isinstance(value, (tuple, list)):
        parts = [_number(part, dims) for part in value]
        return None if None in parts else parts
    if isinstance(value, Dim):
        return evaluate(value, dims) if all(symbol in dims for symbol in value.symbols) else None
    return value


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else bytes(part)
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
