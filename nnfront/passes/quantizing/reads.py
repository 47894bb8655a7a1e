# SPDX-License-Identifier: Apache-2.0
"""Who reads which weight of a method, and what it is by that: an embedding, a head, a router, or the weight of some other product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nnfront import ops
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Expr,
    Function,
    IRModule,
    Op,
    TensorType,
    Var,
    reachable,
    tensor_type,
    variables_of,
    walk_bindings,
)
from nnfront.passes.inline import inline
from nnfront.passes.weight_values import weight_values

TAKEN: dict[Op, tuple[int, ...]] = {
    ops.linear: (1,),
    ops.matmul: (1,),
    ops.take: (0,),
    ops.moe_mlp: (1, 2),
}
"""Operands that can be quantised weights, by the op that reads them."""

CHOOSING = (ops.topk, ops.sort, ops.argsort, ops.argmax, ops.argmin)
"""What makes a choice of its operand, as of experts."""

HEADS = ("lm_head",)

DEQUANTIZING = (ops.dequantize, ops.dequantize_blocks)
OPENING = (*DEQUANTIZING, ops.unpack_int4, ops.astype, ops.multiply)
"""What stands between elements and scales as they are stored and the weight that is read."""


def taken(value: Expr) -> tuple[Atom | None, ...]:
    """The operands of a call that can be quantised weights."""
    places = TAKEN.get(value.op, ()) if isinstance(value, Call) else ()
    return tuple(value.args[place] for place in places) if isinstance(value, Call) else ()


@dataclass(frozen=True)
class Read:
    """One of the `taken` operands of a method's calls.

    weight      what is read; None if it is none, or if its reader is a weight itself
    key         the weight's name; those of one key are one weight, in all methods
    is_transposed   whether the stored weight is the transpose of the matrix [outputs, inputs]
    role        "product", "embedding", "experts", "head" or "router"
    paths       of the module that reads it, of the checkpoint's weights that it is made of, and their modules, and its key
    """

    weight: Var | None
    key: str = ""
    is_transposed: bool = False
    role: str = ""
    paths: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...] | None:
        """[outputs, inputs], or [experts, outputs, inputs]; None if the checkpoint says its sizes."""
        sizes = tensor_type(self.weight).static_shape
        return sizes[::-1] if sizes is not None and self.is_transposed else sizes


@dataclass
class Reads:
    """What methods read. in_order: for each method its reads in the order of its bindings, calls followed; others: ops that read a weight otherwise, by key."""

    in_order: dict[str, list[Read]] = field(default_factory=dict)
    others: dict[str, dict[str, None]] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    """Bytes of weights that are quantised already, by the keys of their elements."""


def find_reads(ir: IRModule) -> Reads:
    """Find who reads which weight."""
    found = Reads()
    # Not the pass: it would verify primitive functions, which are withheld here.
    flat = inline.rewrite(ir, [f.name for f in ir.functions if f.kind == "private"])
    aliases: dict[str, list[str]] = {}
    for alias, name in ir.attrs.get("aliases", {}).items():
        aliases.setdefault(name, []).append(alias)
    for method in flat.methods:
        found.in_order[method.name] = list(_Method(method, aliases, found).reads())
    return found


class _Method:
    """One method, calls inlined."""

    def __init__(self, function: Function, aliases: dict[str, list[str]], found: Reads) -> None:
        self.function, self.aliases, self.found = function, aliases, found
        self.values = weight_values(function)
        self.made = {b.var: b for b in walk_bindings(function.bindings)}
        self.calls = {var: b.value for var, b in self.made.items() if isinstance(b.value, Call)}
        self.declared = set(function.attrs.get("derived", ()))
        choices = [call for call in self.calls.values() if call.op in CHOOSING]
        self.chosen_by = self._products_behind(var for call in choices for var in variables_of(call))
        self.last = self._products_behind([function.result] if isinstance(function.result, Var) else [])
        self.opened = {
            part for var, call in self.calls.items() if call.op in DEQUANTIZING for part in self._parts(var)
        }
        self.tables = {
            tensor_type(call.args[0]).shape[0]
            for call in self.calls.values()
            if _is_embedding(call) and isinstance(call.args[0], Var)
        }

    def reads(self) -> Iterator[Read]:
        for binding in self.made.values():
            operands = taken(binding.value)
            is_weight = binding.var in self.values.all
            for operand in operands:
                read = None if is_weight else self._read(binding, operand)
                yield read or Read(None)
            if not is_weight:
                known = {var for var in operands if isinstance(var, Var) and self._read(binding, var)}
                for var in variables_of(binding.value):
                    if var in self.values.all and var not in known:
                        self._other(var, binding)

    def _other(self, var: Var, binding: Binding) -> None:
        if isinstance(var.type, TensorType):
            reader = binding.value.op.name if isinstance(binding.value, Call) else "a function"
            self.found.others.setdefault(self._key(var), {})[reader] = None
            self.found.types.setdefault(self._key(var), var.type)

    def _read(self, binding: Binding, operand: Atom | None) -> Read | None:
        call = binding.value
        if not isinstance(operand, Var) or operand not in self.values.all or not isinstance(call, Call):
            return None
        if not isinstance(operand.type, TensorType):
            return None
        if call.op is ops.take and not _is_embedding(call):
            return None
        if call.op in (ops.linear, ops.matmul) and operand.type.ndim != 2:
            return None
        weight, is_transposed = operand, call.op is ops.matmul
        if is_transposed and (source := self._transposed(operand)):
            weight, is_transposed = source, False
        module = "" if binding.provenance is None else binding.provenance.module
        made_of = [name for param in self._params(weight) for name in (param, *self.aliases.get(param, ()))]
        paths = dict.fromkeys(
            (module, *(path for name in made_of for path in (name, name.rpartition(".")[0])))
        )
        parts = self._parts(weight) or ((weight,) if binding.var in self.opened else ())
        weight = parts[0] if parts else weight
        key = self._key(weight)
        paths[key] = None
        self.found.types.setdefault(key, tensor_type(weight))
        if parts:
            types = (part.type for part in parts)
            self.found.stored[key] = sum(t.size_bytes or 0 for t in types if isinstance(t, TensorType))
        return Read(weight, key, is_transposed, self._role(binding, call, operand), tuple(paths))

    def _role(self, binding: Binding, call: Call, weight: Var) -> str:
        if call.op is ops.take:
            return "embedding"
        if call.op is ops.moe_mlp:
            return "experts"
        outputs = tensor_type(binding.var).shape[-1]
        module = "" if binding.provenance is None else binding.provenance.module
        if binding.var in self.last and (
            module.rpartition(".")[2] in HEADS or (isinstance(outputs, int) and outputs in self.tables)
        ):
            return "head"
        return "router" if binding.var in self.chosen_by else "product"

    def _key(self, var: Var) -> str:
        name = self.values.names.get(var)
        if name is not None:
            return name
        return var.name if var.name in self.declared else f"{self.function.name}: {var.name}"

    def _transposed(self, var: Var) -> Var | None:
        call = self.calls.get(var)
        if call is None or call.op is not ops.permute_dims or call.attrs["axes"] != (1, 0):
            return None
        return call.args[0] if isinstance(call.args[0], Var) else None

    def _params(self, var: Var) -> list[str]:
        """Names of the weights that a value is made of."""
        return [v.name for v in reachable([var], self._reads) if v not in self.made]

    def _parts(self, var: Var) -> tuple[Var, ...]:
        """What a value is dequantised of where it is read: elements, then scales and zero points, or factors; nothing if it is stored dense."""
        while (value := self._call(var)) is not None and value.op is ops.permute_dims:
            (var,) = variables_of(value)
        if value is None or value.op not in DEQUANTIZING:
            return ()

        def opened(var: Var) -> list[Var]:
            value = self._call(var)
            return variables_of(value) if value is not None and value.op in OPENING else []

        return tuple(part for part in reachable([var], opened) if not opened(part))

    def _call(self, var: Var) -> Call | None:
        """The call that makes a value, if that is not stored itself."""
        return None if var.name in self.declared else self.calls.get(var)

    def _reads(self, var: Var) -> list[Var]:
        """What a value is made of; nothing of a parameter."""
        return variables_of(self.made[var].value) if var in self.made else []

    def _products_behind(self, start: Iterable[Var]) -> set[Var]:
        """The products that values are made of, with no other product in between."""

        def is_product(var: Var) -> bool:
            return var in self.calls and self.calls[var].op in (*TAKEN, ops.attention)

        found = reachable(start, lambda var: [] if is_product(var) else self._reads(var))
        return set(filter(is_product, found))


def _is_embedding(call: Call) -> bool:
    """Whether rows of a matrix are taken."""
    if call.op is not ops.take or call.attrs["axis"] != 0:
        return False
    table = call.args[0]
    return table is not None and isinstance(table.type, TensorType) and table.type.ndim == 2
