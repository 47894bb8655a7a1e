# SPDX-License-Identifier: Apache-2.0
"""Who reads weights: which of them can stay quantised, and why others cannot."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nnfront import ops
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Expr,
    Function,
    FunctionCall,
    IRModule,
    TensorType,
    Var,
    callees_first,
    tensor_type,
    used_vars,
)
from nnfront.quant_format import QuantFormat
from nnfront.quantized.formula import Formula


class Takes(Protocol):
    """What is asked of a target."""

    @property
    def reads_experts(self) -> bool:
        """Whether products of experts read weights in the formats that others do."""

    def reads(self, format: QuantFormat) -> bool:
        """Whether products read weights in a format as they are stored."""

    def reads_wide_scales(self, format: QuantFormat) -> bool:
        """Whether they do so as fast where scales are float32 and the weight that they stand for is not."""


class Kind(NamedTuple):
    """What values must have in common to be joined: a format and the dtype of its scales, and whether matrices are stored transposed.

    is_mixed    whether it is several kinds one after another, each of which a product multiplies with by itself
    """

    format: Hashable
    is_transposed: bool
    is_mixed: bool = False

    @property
    def way(self) -> tuple[bool, bool]:
        """What its readers must allow for, whatever the format."""
        return self.is_transposed, self.is_mixed


def reasons_against(
    ir: IRModule, formulas: Mapping[str, Formula], types: Mapping[str, TensorType], takes: Takes
) -> dict[str, str]:
    """For each weight that is read, why it is dequantised when it is loaded; empty if it stays as it is stored."""
    reasons = {
        name: formulas[name].reason_against(type.dtype, takes.reads, takes.reads_wide_scales)
        for name, type in types.items()
    }
    uses = _Uses(takes.reads_experts)
    for function in callees_first(ir):
        if function.kind == "private":
            for way in ((False, False), (True, False), (False, True)):
                # Of weights that a function is given nothing is known to be alike.
                kinds: dict[Var, Kind] = {
                    p: Kind(i, *way) for i, p in enumerate(function.params) if p.role == "weight"
                }
                others = uses.others(function, kinds)
                places = frozenset(i for i, p in enumerate(function.params) if p in kinds and p not in others)
                uses.inside[function.name, way] = places
    is_settled = False
    while not is_settled:  # what is joined to a weight that is dequantised is dequantised as well
        is_settled = True
        for function in ir.methods:
            kept: dict[Var, Kind] = {}
            for param in function.weights:
                formula = formulas[param.name] if param.name in types and not reasons[param.name] else None
                if formula is not None and formula.format is not None:
                    scales = formula.wanted_scales(types[param.name].dtype)
                    kept[param] = Kind((formula.format, scales), formula.is_transposed)
            for var in uses.others(function, kept).intersection(kept):
                reasons[var.name] = (
                    "joined to weights in other formats, cut within groups, or read by more than products"
                )
                is_settled = False
    return reasons


@dataclass
class _Uses:
    """Finds what is read by anything but products; `inside` are the parameters of private functions, by place, that only products read, for each way."""

    reads_experts: bool
    inside: dict[tuple[str, tuple[bool, bool]], frozenset[int]] = field(default_factory=dict)

    def others(self, function: Function, kinds: Mapping[Var, Kind]) -> set[Var]:
        """What is read by anything but a product, here or in a private function; values of one kind may be joined, and of several where products take them apart again."""
        known = dict(kinds)
        for binding in function.bindings:
            parts = joined(binding.value)
            own = {known.get(part) for part in parts}
            kind = next(iter(own), None)
            is_transposed = any(each is not None and each.is_transposed for each in own)
            if len(own) == 1 and kind is not None and not (is_transposed or kind.is_mixed):
                known[binding.var] = kind
            elif any(own) and not is_transposed and _may_be_mixed(binding, parts):
                known[binding.var] = Kind(binding.var, False, is_mixed=True)
            if (
                is_cut(binding.value)
                and (whole := known.get(_first(binding.value)))
                and _is_cut_apart(binding.value, whole)
            ):
                known[binding.var] = whole
            if (
                is_transpose(binding.value)
                and (source := known.get(_first(binding.value)))
                and source.is_transposed
            ):
                known[binding.var] = Kind(source.format, False)
        others: set[Var] = {function.result} if isinstance(function.result, Var) else set()
        for binding in reversed(function.bindings):
            good: set[Var] = set()
            if binding.var in known and binding.var not in others:
                good = set(joined(binding.value)) or {_first(binding.value)}
            elif binding.var not in known:
                good = self.products(binding.value, known)
            others.update(var for var in used_vars(binding.value) if var not in good)
        return others

    def products(self, value: Expr, known: Mapping[Var, Kind]) -> set[Var]:
        """What a value reads as products do, and in no other way."""
        good: set[Atom | None] = set()
        bad: set[Atom | None] = set()
        if isinstance(value, FunctionCall):
            for i, arg in enumerate(value.args):
                kind = known.get(arg) if isinstance(arg, Var) else None
                is_read = kind is not None and i in self.inside.get((value.function, kind.way), ())
                (good if is_read else bad).add(arg)
        elif isinstance(value, Call):
            is_read = takes_rows(value) or value.op is ops.linear or self.reads_experts
            good = {value.args[0]} if takes_rows(value) else set(matrices(value)) if is_read else set()
            bad = {arg for i, arg in enumerate(value.args) if i not in _places(value)}
        return {
            v for v in good - bad if isinstance(v, Var) and v in known and not _is_refused(known[v], value)
        }


def _is_refused(kind: Kind, value: Expr) -> bool:
    """Whether a product would have to read a matrix that is stored transposed, or one of several kinds that it does not come apart by."""
    if not isinstance(value, Call):
        return False
    return kind.is_transposed or (kind.is_mixed and value.op is not ops.linear)


def _may_be_mixed(binding: Binding, parts: Sequence[Var]) -> bool:
    """Whether a value is outputs of one matrix after those of another: what is multiplied with it is multiplied with each."""
    value, type = binding.value, binding.var.type
    if not (isinstance(value, Call) and value.op is ops.concat and isinstance(type, TensorType)):
        return False
    return type.ndim == 2 and all(tensor_type(part).dtype == type.dtype for part in parts)


def _places(call: Call) -> tuple[int, ...]:
    """Where a call has what it reads as a product, or takes rows of."""
    if takes_rows(call):
        return (0,)
    if call.op is ops.linear:
        return (1,) if call.attrs.get("out_dtype") is None else ()
    return (1, 2) if call.op is ops.moe_mlp else ()


def matrices(value: Expr) -> tuple[Var, ...]:
    """The matrices that a product multiplies with."""
    if not isinstance(value, Call) or takes_rows(value):
        return ()
    return tuple(a for i in _places(value) if isinstance(a := value.args[i], Var))


def takes_rows(call: Call) -> bool:
    """Whether it takes rows of a matrix, as an embedding does."""
    table = call.args[0] if call.args else None
    return (
        call.op is ops.take
        and call.attrs.get("axis") == 0
        and table is not None
        and isinstance(table.type, TensorType)
        and table.type.ndim == 2
    )


def is_transpose(value: Expr) -> bool:
    """Whether it transposes each matrix of a stack."""
    return (
        isinstance(value, Call)
        and value.op is ops.permute_dims
        and value.attrs.get("axes") == (0, 2, 1)
        and isinstance(value.args[0], Var)
    )


def is_cut(value: Expr) -> bool:
    """Whether it takes a rank's part of a weight."""
    return isinstance(value, Call) and value.op is ops.shard and isinstance(value.args[0], Var)


def _is_cut_apart(value: Expr, kind: Kind) -> bool:
    """Whether a rank's part is that of all that a weight is stored in: of outputs always, of inputs where each rank has whole groups of them."""
    if not isinstance(value, Call) or kind.is_transposed or not isinstance(kind.format, tuple):
        return False
    format, type, attrs = kind.format[0], _first(value).type, ops.shard.full_attrs(value.attrs)
    assert isinstance(format, QuantFormat) and isinstance(type, TensorType)
    if attrs["axis"] < type.ndim - 1:
        return True
    depth = type.shape[-1]
    together = format.block.numbers if format.block is not None else format.group_size or 2
    return attrs["blocks"] is None and isinstance(depth, int) and depth % (attrs["world"] * together) == 0


def _first(value: Expr) -> Var:
    assert isinstance(value, Call) and isinstance(value.args[0], Var)
    return value.args[0]


def joined(value: Expr) -> tuple[Var, ...]:
    """What a value is made of, stacked or one after another along any axis but that of inputs; nothing if it is something else."""
    if not isinstance(value, Call) or value.op not in (ops.concat, ops.stack):
        return ()
    parts = tuple(a for a in value.args if isinstance(a, Var))
    type = parts[0].type if parts else None
    if not isinstance(type, TensorType) or type.ndim < 2:
        return ()
    dim: int = value.op.full_attrs(value.attrs)["dim"]
    return parts if dim < type.ndim - 1 and len(parts) == len(value.args) else ()
