# SPDX-License-Identifier: Apache-2.0
"""The layers of a cache must get the same tokens in every call: what a method's instructions say about it before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nnfront.dims import Size, same
from nnfront.errors import LowerError
from nnfront.ir import TensorType
from nnfront.lower.instructions import Block, Branch, Run, Slot, place


@dataclass(frozen=True, slots=True)
class _Layer:
    """A handle: which layer of which cache it is of, how many tokens that has got, by how many calls, and where the last one is."""

    cache: str
    index: int
    tokens: Size = 0
    calls: int = 0
    where: str = ""


def check_layers(method: str, body: Block, slots: Sequence[Slot]) -> None:
    """Raise LowerError if layers of a cache get different numbers of tokens whatever the arguments are.

    What only a call can say, as when branches differ, is checked behind each call.
    """
    _Check(method, slots).block(body)


class _Check:
    def __init__(self, method: str, slots: Sequence[Slot]) -> None:
        self.method, self.slots = method, slots
        self.layers: dict[int, _Layer] = {}

    def block(self, block: Block) -> None:
        for instruction in block.instructions:
            match instruction:
                case Run(body=Block() as inside):
                    self.block(inside)
                case Run(op="cache_split"):
                    cache = self.slots[instruction.inputs[0]].name
                    self.layers |= {slot: _Layer(cache, i) for i, slot in enumerate(instruction.outputs)}
                case Run(op="cache_join"):
                    self.compare(instruction)
                case Run(op="attention"):
                    self.append(instruction)
                case Branch():
                    self.block(instruction.then)
                    self.block(instruction.otherwise)
                    results = zip(instruction.then.results, instruction.otherwise.results, strict=True)
                    for output, (a, b) in zip(instruction.outputs, results, strict=True):
                        one, other = self.layers.get(a), self.layers.get(b)
                        if one and other and same(one.tokens, other.tokens):
                            self.layers[output] = one

    def append(self, attention: Run) -> None:
        before, k = self.layers.get(attention.inputs[3]), self.slots[attention.inputs[1]].type
        if before is not None and isinstance(k, TensorType):
            tokens, where = before.tokens + k.shape[1], place(self.method, attention)
            after = replace(before, tokens=tokens, calls=before.calls + 1, where=where)
            self.layers[attention.outputs[1]] = after

    def compare(self, join: Run) -> None:
        layers = [self.layers[slot] for slot in join.inputs if slot in self.layers]
        calls = Counter(layer.calls for layer in layers).most_common()
        usual = next((layer for layer in layers if layer.calls == calls[0][0]), None)
        for layer in layers:
            if usual and layer.calls != usual.calls and not same(layer.tokens, usual.tokens):
                raise LowerError(
                    f"{self.method}: layers of the cache {layer.cache!r} get different numbers of tokens",
                    details=[
                        f"layer {each.index} gets {each.tokens if each.calls else 'no'} tokens"
                        for each in (layer, usual)
                    ],
                    where=layer.where or usual.where,
                    help="let one attention append to each layer: cache=cache[i] in layer i",
                )
