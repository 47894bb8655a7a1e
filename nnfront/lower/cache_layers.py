# SPDX-License-Identifier: Apache-2.0
"""The layers of a cache must get the same tokens in every call: what a method's instructions say about it before it runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nnfront.dims import Size, same
from nnfront.errors import LowerError
from nnfront.ir import StateLayerType, TensorType
from nnfront.lower.instructions import Block, Branch, Run, Slot, place

TOKENS = ""
"""Stands among the names of what a layer keeps of each sequence for all that it keeps of tokens."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A handle: which layer of which cache it is of, how many tokens each of its storages has got, by how many calls, and where the last one is."""

    cache: str
    index: int
    tokens: Mapping[str, Size]
    calls: int = 0
    where: str = ""

    @property
    def text(self) -> str:
        """How many tokens it gets, in words."""
        texts = {
            name: "no tokens" if isinstance(n, int) and not n else f"{n} tokens"
            for name, n in self.tokens.items()
        }
        if len(set(texts.values())) == 1:
            return next(iter(texts.values()))
        return ", ".join(f"{text} in {name!r}" if name else text for name, text in texts.items())

    def is_like(self, other: _Layer) -> bool:
        """Whether all storages of both have got as many tokens."""
        mine, others = [*self.tokens.values()], [*other.tokens.values()]
        return all(same(mine[0], tokens) for tokens in (*mine, *others))


def check_layers(method: str, body: Block, slots: Sequence[Slot]) -> dict[str, frozenset[int]]:
    """Return which layers of each cache are read by more than the attention that appends to them.

    Raises LowerError if layers of a cache get different numbers of tokens whatever the arguments are. What only a call can say, as when
    branches differ, is checked behind each call.
    """
    check = _Check(method, slots)
    check.block(body)
    return {cache: frozenset(layers) for cache, layers in check.shared.items()}


class _Check:
    def __init__(self, method: str, slots: Sequence[Slot]) -> None:
        self.method, self.slots = method, slots
        self.layers: dict[int, _Layer] = {}
        self.shared: defaultdict[str, set[int]] = defaultdict(set)

    def block(self, block: Block) -> None:
        for instruction in block.instructions:
            match instruction:
                case Run(body=Block() as inside):
                    self.block(inside)
                case Run(op="cache_split"):
                    cache = self.slots[instruction.inputs[0]].name
                    for i, slot in enumerate(instruction.outputs):
                        self.layers[slot] = _Layer(cache, i, self.storages(slot))
                case Run(op="cache_join"):
                    self.compare(instruction)
                case Run(op="attention"):
                    self.append(instruction)
                case Run(op="cache_append"):
                    keys = self.slots[instruction.inputs[1]].type
                    assert isinstance(keys, TensorType)
                    layer, (written,) = instruction.inputs[0], instruction.outputs
                    self.count(instruction, layer, written, TOKENS, keys.shape[1])
                case Run(op="cache_write"):
                    self.write(instruction)
                case Branch():
                    self.block(instruction.then)
                    self.block(instruction.otherwise)
                    results = zip(instruction.then.results, instruction.otherwise.results, strict=True)
                    for output, (a, b) in zip(instruction.outputs, results, strict=True):
                        one, other = self.layers.get(a), self.layers.get(b)
                        if one and other and one.is_like(other):
                            self.layers[output] = one

    def storages(self, slot: int) -> dict[str, Size]:
        type = self.slots[slot].type
        assert isinstance(type, StateLayerType)
        tokens = [TOKENS] if type.per_token else []
        return dict.fromkeys([*tokens, *(buffer.name for buffer in type.per_sequence)], 0)

    def append(self, attention: Run) -> None:
        k, layer = self.slots[attention.inputs[1]].type, attention.inputs[3]
        if isinstance(k, TensorType) and len(attention.outputs) > 1:
            self.count(attention, layer, attention.outputs[1], TOKENS, k.shape[1])
        elif layer in self.layers:  # it reads
            found = self.layers[attention.outputs[1]] = self.layers[layer]
            self.shared[found.cache].add(found.index)

    def write(self, write: Run) -> None:
        held = write.sized.get("seq")
        seq: Size = write.attrs["seq"] if held is None else self.slots[held].value
        self.count(write, write.inputs[0], write.outputs[0], write.attrs["name"], seq)

    def count(self, run: Run, layer: int, written: int, storage: str, tokens: Size) -> None:
        """Count tokens of a storage."""
        before = self.layers.get(layer)
        if before is not None:
            after = {**before.tokens, storage: before.tokens[storage] + tokens}
            self.layers[written] = replace(
                before, tokens=after, calls=before.calls + 1, where=place(self.method, run)
            )

    def compare(self, join: Run) -> None:
        layers = [self.layers[slot] for slot in join.inputs if slot in self.layers]
        calls = Counter(layer.calls for layer in layers).most_common()
        usual = next((layer for layer in layers if layer.calls == calls[0][0]), None)
        for layer in layers:
            if usual and layer.calls != usual.calls and not layer.is_like(usual):
                raise LowerError(
                    f"{self.method}: layers of the cache {layer.cache!r} get different numbers of tokens",
                    details=[f"layer {each.index} gets {each.text}" for each in (layer, usual)],
                    where=layer.where or usual.where,
                    help="let one attention append to each layer: cache=cache[i] in layer i",
                )
