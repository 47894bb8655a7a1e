# SPDX-License-Identifier: Apache-2.0
"""Store the weights of linear products in few bits: quantising them is one more formula, which lifting moves to load time.

example: quantize_weights(ir, "int4", group_size=2)
before:
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 6] {
        y: float32[n, 6] = linear(x, w)
        return y
    }
after:
    def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 6] attrs(derived=("w.int4", "w.scales")) {
        quantize: (int8[6, 4], float32[6, 2]) = quantize(w, bits=4, group_size=2, axis=1)
        quantize_1: int8[6, 4] = quantize[0]
        w.scales: float32[6, 2] = quantize[1]
        w.int4: uint8[6, 2] = pack_int4(quantize_1, axis=1)
        unpack_int4: int8[6, 4] = unpack_int4(w.int4, axis=1)
        dequantize: float32[6, 4] = dequantize(unpack_int4, w.scales, group_size=2, axis=1)
        y: float32[n, 6] = linear(x, dequantize)
        return y
    }

The formats are those of `nnfront.quant_format`; `group_size` is for those that come in any groups along the input axis. Elements of float8 have exponents of
their own, so scales for smaller blocks would gain little, and rows can still be joined, reordered and shared out, which blocks of 128 x 128 cannot.

Run it before lifting, which keeps the stored values as it keeps tensors that a module derives. A weight is taken if it depends on weights alone, has constant sizes, and its input axis divides into groups; `skip` are
module paths, with `*`, whose products stay as they are. `matmul` with a matrix of weights is taken for `linear` with its transpose, unless something else reads the
weight, as an embedding does that is the head's weight too.

leaves:  products whose weight is dequantised already; so twice is once.
raises:  PassError for a format that does not exist, and for groups that it does not come in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from nnfront import dtypes, ops
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Call,
    Expr,
    Function,
    FunctionBuilder,
    IRModule,
    Mutator,
    Names,
    Projection,
    TensorType,
    Type,
    Var,
    used_vars,
    walk_bindings,
)
from nnfront.passes.base import module_pass
from nnfront.passes.inline import inline
from nnfront.passes.turn_weights import turned
from nnfront.passes.weight_values import read_as_they_are, weight_values
from nnfront.quant_format import FORMATS, QuantFormat

SKIPPED = ("lm_head", "*.lm_head", "gate", "*.gate", "router", "*.router")
"""Heads, and routers to experts: small errors in their results change which token or expert is the likeliest."""


@module_pass()
def quantize_weights(
    ir: IRModule, scheme: str, group_size: int | None = None, skip: Sequence[str] = SKIPPED
) -> IRModule:
    """Quantise the weights of `linear` products; `scheme` is the name of a format."""
    chosen = _chosen(scheme, group_size)
    kept = read_as_they_are(ir, lambda binding: _right(binding.value))
    functions = [
        _Quantizing(f, chosen, skip, kept).function(f) if f.kind in ("public", "private") else f
        for f in ir.functions
    ]
    if all(new is old for new, old in zip(functions, ir.functions, strict=True)):
        return ir
    return ir.with_functions(functions)


def _chosen(name: str, group_size: int | None) -> QuantFormat:
    if name not in FORMATS:
        raise PassError(
            f"there is no format {name!r} to quantise weights to",
            help=f"use one of {', '.join(map(repr, FORMATS))}",
        )
    found = FORMATS[name]
    if found.fixed_groups and group_size not in (None, found.group_size):
        each = "output channel" if found.group_size is None else f"group of {found.group_size}"
        others = ", ".join(other.name for other in FORMATS.values() if not other.fixed_groups)
        raise PassError(
            f"{name} has a scale for each {each}, got group_size={group_size}",
            help=f"leave group_size out, or use one of {others}",
        )
    return replace(found, group_size=group_size or found.group_size)


@dataclass(frozen=True)
class QuantizedWeight:
    """A value made of weights alone that stays in memory: its bytes before and after, and why it is not quantised, empty if it is."""

    name: str
    bytes_before: int
    bytes_after: int
    reason: str = ""


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize_weights` does to the weights of a module. `str` is one line."""

    scheme: str
    weights: tuple[QuantizedWeight, ...]

    @property
    def quantized(self) -> tuple[QuantizedWeight, ...]:
        """The weights that are quantised."""
        return tuple(w for w in self.weights if not w.reason)

    def __str__(self) -> str:
        left: dict[str, list[QuantizedWeight]] = {}
        for weight in self.weights:
            if weight.reason:
                left.setdefault(weight.reason, []).append(weight)
        others = [f"{_size(w.bytes_before for w in found)} of {reason}" for reason, found in left.items()]
        return (
            f"quantised to {self.scheme}: {len(self.quantized)} weights, {_change(self.quantized)};"
            f" as they are: {', '.join(others) or 'none'}; all weights: {_change(self.weights)}"
        )


READERS = {ops.take: "embeddings", ops.moe_mlp: "experts (whose product takes no quantised weights)"}
"""What reads weights in a way for which they cannot be quantised, and what these weights are."""


def _report(
    ir: IRModule, scheme: str, group_size: int | None = None, skip: Sequence[str] = SKIPPED
) -> QuantizeReport:
    """Say which weights the pass would quantise, which not and why, and the bytes that stay in memory. Printable."""
    chosen = _chosen(scheme, group_size)
    ir = inline(quantize_weights(ir, scheme, group_size, skip))
    kept = read_as_they_are(ir, lambda binding: _right(binding.value))
    types: dict[str, TensorType] = {}
    reasons: dict[str, dict[str, None]] = {}
    stored: dict[str, int] = {}
    for function in ir.methods:
        pass_ = _Quantizing(function, chosen, skip, kept)
        for binding in walk_bindings(function.bindings):
            for var in used_vars(binding.value) if binding.var not in pass_.weights else ():
                if var not in pass_.weights or not isinstance(var.type, TensorType):
                    continue
                source, codes = _stored(var, pass_.made)
                name = pass_.weight_names.get(source, source.name)
                types[name] = var.type
                if codes:
                    stored[name] = sum(map(_bytes, codes))
                else:
                    reason = pass_.reason_for(var, binding) or "weights that are left out"
                    reasons.setdefault(name, {})[reason] = None
    return QuantizeReport(
        scheme,
        tuple(
            QuantizedWeight(
                name,
                _bytes(type),
                stored.get(name, 0) + (_bytes(type) if name in reasons else 0),
                " and ".join(reasons.get(name, ())),
            )
            for name, type in types.items()
        ),
    )


def _stored(var: Var, made: Mapping[Var, Binding]) -> tuple[Var, list[Type]]:
    """The weight that a value was quantised from, and the types of what is stored of it; itself and none if it is as it was."""
    value = made[var].value if var in made else None
    if not isinstance(value, Call) or value.op is not ops.dequantize:
        return var, []
    codes = [atom for atom in value.args if isinstance(atom, Var)]
    source: Atom | None = codes[0]
    while isinstance(source, Var) and source in made:
        value = made[source].value
        if isinstance(value, Call) and value.op is ops.unpack_int4 and isinstance(value.args[0], Var):
            codes[0] = value.args[0]
        if isinstance(value, Call) and value.op is ops.quantize and isinstance(value.args[0], Var):
            return value.args[0], [code.type for code in codes]
        source = (
            value.tuple
            if isinstance(value, Projection)
            else value.args[0]
            if isinstance(value, Call)
            else None
        )
    return var, []


def _bytes(type: Type) -> int:
    """Bytes of a tensor; 0 where the checkpoint says its sizes."""
    assert isinstance(type, TensorType)
    sizes = [size if isinstance(size, int) else 0 for size in type.shape]
    return prod(sizes) * dtypes.size_bytes(type.dtype)


def _change(weights: Sequence[QuantizedWeight]) -> str:
    return f"{_size(w.bytes_before for w in weights)} to {_size(w.bytes_after for w in weights)}"


def _size(sizes: Iterable[int]) -> str:
    total = sum(sizes)
    power = next((power for power in (9, 6, 3) if total >= 10**power), 0)
    return f"{total / 10**power:.3g} {UNITS[power]}"


UNITS = {0: "bytes", 3: "kB", 6: "MB", 9: "GB"}


quantize_weights.report = _report


def _right(value: Expr) -> Sequence[Atom | None]:
    """The matrix that a product has on its right."""
    return value.args[1:2] if isinstance(value, Call) and value.op in (ops.linear, ops.matmul) else ()


class _Quantizing(Mutator):
    """Rewrites one function."""

    def __init__(self, function: Function, format: QuantFormat, skip: Sequence[str], kept: set[str]) -> None:
        super().__init__()
        self.format = format
        self.skip = skip
        bound = [b.var.name for b in walk_bindings(function.bindings)]
        self.names = Names([*(p.name for p in function.params), *bound])
        values = weight_values(function)
        self.weights, self.weight_names = values.all, values.names
        self.turnable = {v for v in values.all if values.names.get(v) not in kept}
        self.made = {b.var: b for b in walk_bindings(function.bindings)}
        self.known: dict[Var, Var] = {}
        self.turned: dict[Var, Var] = {}
        self.derived: list[str] = []

    def function(self, function: Function) -> Function:
        new = super().function(function)
        if new is function:
            return function
        derived = (*function.attrs.get("derived", ()), *sorted(self.derived))
        return new.with_(attrs={**function.attrs, "derived": derived})

    def block(self, block: Block) -> Block:
        outside = dict(self.known), dict(self.turned)
        new = super().block(block)
        self.known, self.turned = outside
        return new

    def binding(self, binding: Binding) -> Sequence[Binding]:
        call = binding.value
        if not isinstance(call, Call) or not _right(call) or self.reason_against(call, binding):
            return super().binding(binding)
        x, weight, *rest = call.args
        assert isinstance(weight, Var)
        builder = FunctionBuilder("")
        builder.names = self.names
        builder.place = binding.provenance
        matrix = weight
        if call.op is ops.matmul:
            if weight not in self.turned:
                self.turned[weight] = turned(builder, weight, self.made)
            matrix, rest = self.turned[weight], [None]
        if matrix not in self.known:
            self.known[matrix] = self._stored(builder, matrix, weight.name)
        stored = self.known[matrix]
        new = Call(ops.linear, (x, stored, *rest), call.attrs)
        return [*builder.finish(stored).bindings, Binding(binding.var, new, binding.provenance)]

    def reason_for(self, var: Var, binding: Binding) -> str:
        """Why a weight that a binding reads stays as it is there; empty if it is to be quantised."""
        call = binding.value
        if isinstance(call, Call) and var in _right(call):
            return self.reason_against(call, binding)
        if isinstance(var.type, TensorType) and var.type.ndim < 2:
            return "vectors"
        if not isinstance(call, Call):
            return "weights that a function takes"
        return READERS.get(call.op, f"weights that {call.op.name} reads")

    def reason_against(self, call: Call, binding: Binding) -> str:
        """Why the weight of a product stays as it is; empty if it is to be quantised."""
        weight, is_linear = call.args[1], call.op is ops.linear
        if not isinstance(weight, Var) or weight not in self.weights:
            return "values that are no weights"
        if not isinstance(weight.type, TensorType) or weight.type.ndim != 2:
            return "weights that are no matrices"
        if not is_linear and weight not in self.turnable:
            return "weights that are also read in another order"
        made = self.made.get(weight)
        if made is not None and isinstance(made.value, Call) and made.value.op is ops.dequantize:
            return "weights that are quantised already"
        module = "" if binding.provenance is None else binding.provenance.module
        if any(fnmatchcase(module, pattern) for pattern in self.skip):
            return f"{module.rpartition('.')[2]} (by its name)"
        rows, depth = weight.type.shape if is_linear else weight.type.shape[::-1]
        if not isinstance(rows, int) or not isinstance(depth, int):
            return "weights whose sizes the checkpoint says"
        group = self.format.group_size or 1
        fits = depth % group == 0 and (self.format.packing is None or depth % 2 == 0)
        return "" if fits else f"weights whose {depth} inputs do not divide by {max(group, 2)}"

    def _stored(self, builder: FunctionBuilder, weight: Var, name: str) -> Var:
        """The weight after it has been stored, under names that begin with `name`, and read back."""
        assert isinstance(weight.type, TensorType)
        format, own = self.format, f"{name}.{self.format.name}"
        attrs = {"group_size": format.group_size, "axis": 1, "format": format.name}
        found = builder.call(ops.quantize, weight, **attrs)
        stored = q = builder.emit(Projection(found, 0), own if format.packing is None else "quantize")
        others = [builder.emit(Projection(found, 1), f"{name}.scales")]
        if not format.symmetric:
            others.append(builder.emit(Projection(found, 2), f"{name}.zero_points"))
        if format.packing is not None:
            along = ops.pack_int4.canonical_attrs([q.type], {"axis": 1})
            stored = builder.emit(Call(ops.pack_int4, (q,), along), own)
            q = builder.call(ops.unpack_int4, stored, axis=1, signed=format.dtype == "int8")
        self.derived += [stored.name, *(other.name for other in others)]
        zeros = others[1] if len(others) > 1 else None
        return builder.call(ops.dequantize, q, others[0], zeros, **attrs, dtype=weight.type.dtype)
