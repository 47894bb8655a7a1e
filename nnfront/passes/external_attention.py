# SPDX-License-Identifier: Apache-2.0
"""Leave the cache to another engine: attention over it becomes a call of that engine's attention, and positions come as an argument.

before:
    def hidden[batch, max_seq](
        q: input float32[batch, 1, 4, 8],
        k: input float32[batch, 1, 2, 8],
        cache: state cache(1 * layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16)),
    ) -> (
        float32[batch, 1, 4, 8],
        cache(1 * layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16)),
    ) {
        layers: (layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16),) = cache_split(cache)
        layer: layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16) = layers[0]
        counted: int64[batch, 1] = cache_positions(layer, seq=1)
        at: int64[batch, 1, 1, 1] = reshape(counted, shape=(batch, 1, 1, 1))
        moved: float32[batch, 1, 4, 8] = add(q, at)
        both: (
            float32[batch, 1, 4, 8],
            layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16),
        ) = attention(moved, k, k, layer)  # at layers.0.self_attn
        y: float32[batch, 1, 4, 8] = both[0]
        written: layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16) = both[1]
        joined: cache(1 * layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16)) = cache_join(written)
        results: (
            float32[batch, 1, 4, 8],
            cache(1 * layer(batch=batch, max_seq=max_seq, per_token={keys: float32[2, 8], values: float32[2, 8]}, window=16)),
        ) = (y, joined)
        return results
    }
after:
    def hidden[batch](
        q: input float32[batch, 1, 4, 8],
        k: input float32[batch, 1, 2, 8],
        positions: input int64[batch, 1],
        engine: input object("engine"),
    ) -> float32[batch, 1, 4, 8] attrs(
        attention=({
            module: "layers.0.self_attn",
            heads: 4,
            kv_heads: 2,
            head_size: 8,
            scale: 0.35355339059327379,
            window: 16,
            softcap: None,
            has_sinks: False,
            reads: None,
        },),
    ) {
        at: int64[batch, 1, 1, 1] = reshape(positions, shape=(batch, 1, 1, 1))
        moved: float32[batch, 1, 4, 8] = add(q, at)
        both: float32[batch, 1, 4, 8] = extern(engine, 0, moved, k, k, name="nnfront.attend", out=type(float32[batch, 1, 4, 8]))
        return both
    }

Each token is a sequence of its own, of one token: which tokens belong together, and what came before them, the engine alone knows. It is an
object, `ExternalAttention`, which each call gets with the number of the attention that is meant: its place in the function's attribute `attention`,
where `calls_of` reads what it is.

keeps:   formulas over weights; functions without a cache.
leaves:  no private functions.
raises:  PassError, with the layer, for what no such engine computes: a latent that is stored once for keys and values, biases, attention to
         later tokens, states of whole sequences; and for what looks at all tokens of a call, as these are those of others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import torch

from nnfront import ops
from nnfront.dims import same
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Function,
    IRModule,
    Names,
    ObjectType,
    Param,
    Projection,
    Scalar,
    StateLayerType,
    StateType,
    TensorType,
    Tuple,
    Var,
    substitute_atoms,
    tensor_type,
    used_vars,
)
from nnfront.passes.base import module_pass
from nnfront.passes.inline import inline

ATTEND = "nnfront.attend"
"""The external function that calls the engine."""
LISTED = "attention"
"""The attribute of a function that says what each attention is."""

_ACROSS = (ops.sum, ops.prod, ops.max, ops.min, ops.mean, ops.var, ops.any, ops.all, ops.argmax, ops.argmin, ops.cumsum, ops.sort, ops.argsort, ops.topk)  # fmt: skip
"""Ops that look at all elements along an axis."""


class ExternalAttention(Protocol):
    """What an engine is to a method: its attention, over what it keeps itself of the tokens that came before."""

    def attend(self, number: int, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Store k and v of tokens where attention `number` keeps them, and attend: q [tokens, 1, heads, head_size] to the same.

        others: k and v [tokens, 1, kv_heads, head_size], unless it reads those of another attention, then its sinks [heads], if it has any.
        """


ops.register_extern(ATTEND, lambda engine, number, *operands: engine.attend(number, *operands))


@dataclass(frozen=True)
class AttentionCall:
    """One attention of a method. module: whose it is. scale, window, softcap: as for `op.attention`. reads: the number of the attention whose keys and values it sees, None for its own."""

    module: str
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool
    reads: int | None


def calls_of(function: Function) -> tuple[AttentionCall, ...]:
    """What each attention of a function is that this pass has left to an engine, by its number."""
    return tuple(AttentionCall(**each) for each in function.attrs.get(LISTED, ()))


@module_pass()
def external_attention(ir: IRModule) -> IRModule:
    """Let an engine of the caller's attend and keep what is stored of tokens, in all methods over a cache; they compute one token of each sequence."""
    if not any(f.states for f in ir.functions):
        return ir
    ir = inline(ir)
    return ir.with_functions(_Leaving(f).function() if f.states else f for f in ir.functions)


class _Leaving:
    """One function on its way."""

    def __init__(self, old: Function) -> None:
        self.old = old
        names = Names.of(old)
        cache = old.states[0].type
        assert isinstance(cache, StateType)
        self.cache: tuple[StateLayerType, ...] = cache.layers
        self.batch = self.cache[0].batch
        self.positions = Param(names.unique("positions"), TensorType((self.batch, 1), "int64"), "input")
        self.engine = Param(names.unique("engine"), ObjectType("engine"), "input")
        self.layers: dict[Var, int] = {}  # what stood for a layer of the cache
        self.fields: dict[Var, tuple[Atom, ...]] = {}  # what stood for several values, some of them such
        self.replaced: dict[Var, Atom] = {}
        self.writers: dict[int, int] = {}  # the attention that stores what a layer keeps
        self.calls: list[AttentionCall] = []

    def function(self) -> Function:
        """The function over an engine in the place of its cache."""
        bindings = tuple([new for binding in self.old.bindings for new in self.binding(binding)])
        result = self.old.result
        assert isinstance(result, Var)
        params = [p for p in self.old.params if p.role == "input"]
        params += [self.positions, self.engine, *self.old.weights]
        return self.old.with_(
            params=tuple(params),
            bindings=bindings,
            result=self.atom(self.fields[result][0]),
            attrs={**self.old.attrs, LISTED: tuple([asdict(call) for call in self.calls])},
        )

    def atom(self, atom: Atom) -> Atom:
        return self.replaced.get(atom, atom) if isinstance(atom, Var) else atom

    def binding(self, binding: Binding) -> Iterator[Binding]:
        """What takes a binding's place."""
        var, value = binding.var, binding.value
        match value:
            case Call(op=ops.cache_split):
                handles = [Var(var.name, layer) for layer in self.cache]
                self.layers.update(zip(handles, range(len(handles)), strict=True))
                self.fields[var] = tuple(handles)
            case Call(op=ops.cache_join):
                self.fields[var] = ()
            case Call(op=ops.cache_positions):
                if value.attrs["seq"] != 1:
                    raise self._refusal(binding, "takes several tokens of a sequence in one call")
                self.replaced[var] = self.positions
            case Call(op=ops.attention) if self._layer(value.args[3]) is not None:
                yield self._attention(binding, value)
            case Projection() if isinstance(value.tuple, Var) and value.tuple in self.fields:
                field = self.fields[value.tuple][value.index]
                if (layer := self._layer(field)) is not None:
                    self.layers[var] = layer
                else:
                    self.replaced[var] = field
            case Tuple() if any(self._is_gone(field) for field in value.fields):
                self.fields[var] = tuple(map(self.atom, value.fields))
            case _:
                self._check(binding)
                new = substitute_atoms(value, self.replaced)
                yield binding if new is value else Binding(var, new, binding.provenance)

    def _layer(self, atom: Atom | None) -> int | None:
        return self.layers.get(atom) if isinstance(atom, Var) else None

    def _is_gone(self, atom: Atom) -> bool:
        return isinstance(atom, Var) and (atom in self.layers or atom in self.fields)

    def _check(self, binding: Binding) -> None:
        """Refuse what reads or writes the cache, and what looks at all tokens of a call."""
        value = binding.value
        name = value.op.name if isinstance(value, Call) else "a branch"
        if any(self._is_gone(var) for var in used_vars(value)):
            raise self._refusal(binding, f"keeps what no attention reads: {name}")
        if not isinstance(value, Call) or value.op not in _ACROSS:
            return
        x, axis = value.args[0], value.op.full_attrs(value.attrs)["axis"]
        is_first = axis is None or 0 in (axis if isinstance(axis, tuple) else (axis,))
        shape = x.type.shape if isinstance(x, Var) and isinstance(x.type, TensorType) else ()
        if is_first and shape and same(shape[0], self.batch):
            raise self._refusal(binding, f"looks at all tokens of a call, which are those of others: {name}")

    def _attention(self, binding: Binding, value: Call) -> Binding:
        q, k, v, handle, sinks, _ = value.args
        assert q is not None and isinstance(handle, Var)
        layer = self.layers[handle]
        for what in self._lacks(value, layer):
            raise self._refusal(binding, what)
        number = len(self.calls)
        self.calls.append(self._described(binding, value, layer))
        if k is not None:
            self.writers[layer] = number
        operands = [self.atom(each) for each in (q, k, v, sinks) if each is not None]
        attrs = {"name": ATTEND, "out": q.type}
        y = Var(binding.var.name, q.type)
        self.fields[binding.var] = (y, handle)
        return Binding(
            y, Call(ops.extern, (self.engine, Scalar(number), *operands), attrs), binding.provenance
        )

    def _lacks(self, value: Call, layer: int) -> Iterator[str]:
        """What an attention does that engines do not."""
        _, k, _, _, _, bias = value.args
        keys, *values = self.cache[layer].per_token
        if not values:
            yield f"attends to one latent, {keys.shape[-1]} numbers of each token, as keys and values"
        elif keys.shape != values[0].shape:
            yield f"has keys of {keys.shape[-1]} and values of {values[0].shape[-1]} numbers"
        if bias is not None:
            yield "adds a bias to scores"
        if not value.op.full_attrs(value.attrs)["is_causal"]:
            yield "attends to later tokens"
        if k is not None and layer in self.writers:
            yield "stores keys and values where another attention does"
        if k is None and layer not in self.writers:
            yield "reads keys and values that nothing stores"

    def _described(self, binding: Binding, value: Call, layer: int) -> AttentionCall:
        q, k, _, _, sinks, _ = value.args
        attrs, heads = value.op.full_attrs(value.attrs), tensor_type(q).shape[2]
        kv_heads, size = self.cache[layer].per_token[0].shape
        assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(size, int)
        windows = [w for w in (attrs["window"], self.cache[layer].window) if w is not None]
        return AttentionCall(
            module=binding.provenance.module if binding.provenance else "",
            heads=heads,
            kv_heads=kv_heads,
            head_size=size,
            scale=size**-0.5 if attrs["scale"] is None else attrs["scale"],
            window=min(windows, default=None),
            softcap=attrs["softcap"],
            has_sinks=sinks is not None,
            reads=None if k is not None else self.writers[layer],
        )

    def _refusal(self, binding: Binding, what: str) -> PassError:
        module = binding.provenance.module if binding.provenance else ""
        return PassError(
            f"{module or self.old.name} {what}",
            details=["expected attention to keys and values of each token, as other engines keep them"],
            where=str(binding.provenance or ""),
            help="run this model by itself",
        )
