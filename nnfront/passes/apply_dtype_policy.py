# SPDX-License-Identifier: Apache-2.0
"""Compute in another dtype: casts around each op, by a table that says which ops may and which stay in float32.

example: apply_dtype_policy(ir, "bfloat16")
before:
    def main[n](x: input float32[n, 4], w: weight float32[8, 4]) -> float32[n, 8] {
        h: float32[n, 8] = linear(x, w, None)
        g: float32[n, 8] = silu(h)
        y: float32[n, 8] = softmax(g, axis=1)
        return y
    }
after:
    def main[n](x: input float32[n, 4], w: weight float32[8, 4]) -> float32[n, 8] {
        x_bfloat16: bfloat16[n, 4] = astype(x, dtype="bfloat16")
        w_bfloat16: bfloat16[8, 4] = astype(w, dtype="bfloat16")
        h: bfloat16[n, 8] = linear(x_bfloat16, w_bfloat16, None)
        g: bfloat16[n, 8] = silu(h)
        g_float32: float32[n, 8] = astype(g, dtype="float32")
        y: float32[n, 8] = softmax(g_float32, axis=1)
        return y
    }

Weights stay as they are stored; casts of them take less memory than they do, so lifting moves those to load time. Where a value is
float64, or no float, nothing changes. A cast that the author wrote stays. Private functions get a version for each combination of dtypes
that they are called with. Each op declares its treatment, `dtype_policy` of `nnfront.ir.Op`.

keeps:   types of inputs, states and results, unless `keep_interface=False`; weights, transforms, primitive functions.
raises:  PassError for a dtype that is not to compute in, and for functions that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from nnfront import ops
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Call,
    DtypePolicy,
    Expr,
    Function,
    FunctionCall,
    If,
    IRModule,
    MatchShape,
    Names,
    Op,
    Param,
    Projection,
    Provenance,
    StateLayerType,
    StateType,
    TensorType,
    Tuple,
    TupleType,
    Type,
    Var,
    are_same,
    given_to_ops,
    infer,
    map_expr,
    reached,
)
from nnfront.passes.base import module_pass
from nnfront.passes.bind_dims import chosen_functions

FLOATS = ("float32", "bfloat16", "float16")
WIDE = "float32"


@module_pass()
def apply_dtype_policy(
    ir: IRModule,
    dtype: str,
    policy: Mapping[Op, DtypePolicy] = MappingProxyType({}),
    functions: Iterable[str] | None = None,
    keep_interface: bool = True,
) -> IRModule:
    """Compute in `dtype` what ops allow, in the named public functions, by default in all.

    `policy` says it otherwise for some ops than they say themselves.
    """
    if dtype not in FLOATS:
        raise PassError(f"{dtype!r} is no dtype to compute in", help=f"use one of {', '.join(FLOATS)}")
    chosen = frozenset(chosen_functions(ir, functions))
    versions = _Versions(ir, chosen, dtype, policy)
    for function in ir.functions:
        if function.name in chosen:
            versions.add(function, keep_interface)
    return versions.module()


class _Versions:
    """The functions of the new module: private ones in a version for each combination of dtypes that they are called with."""

    def __init__(
        self, ir: IRModule, chosen: frozenset[str], dtype: str, policy: Mapping[Op, DtypePolicy]
    ) -> None:
        self.ir = ir
        self.dtype = dtype
        self._policy = policy
        self._names = Names(ir)
        self._methods: dict[str, Function] = {}
        self._made: dict[str, list[Function]] = {}  # of private ones, by the name of the original
        self._known: dict[tuple[str, tuple[str, ...]], Function] = {}
        self._new: dict[str, Function] = {}  # by its own name
        # What functions call that stay as they are stays as well.
        self._kept = reached(ir, (f for f in ir.functions if f.kind != "private" and f.name not in chosen))
        self._kept |= given_to_ops(ir)

    def add(self, function: Function, keep_interface: bool) -> None:
        """Make the new version of a public function."""
        types = [
            p.type if keep_interface or p.role not in ("input", "state") else _with_dtype(p.type, self.dtype)
            for p in function.params
        ]
        new = _Rewriting(self, function, types).function(function.result_type if keep_interface else None)
        self._methods[function.name] = new

    def treatment(self, op: Op) -> DtypePolicy:
        """Return in which dtype an op computes."""
        return self._policy.get(op, op.dtype_policy)

    def call(self, name: str, types: Sequence[Type]) -> Function:
        """Return the version of a private function for arguments whose dtypes are those of these types."""
        function = self.ir[name]
        key = (name, tuple(dtype for type in types for dtype in _dtypes(type)))
        if key not in self._known:
            own = [_like(p.type, type) for p, type in zip(function.params, types, strict=True)]
            new = _Rewriting(self, function, own).function(None)
            if new is not function:
                if name in self._kept or self._made.get(name):
                    new = new.with_(name=self._names.unique(name))
                self._made.setdefault(name, []).append(new)
            elif name not in self._kept:
                self._made.setdefault(name, []).append(new)
            self._known[key] = self._new[new.name] = new
        return self._known[key]

    def named(self, name: str) -> Function:
        """Return the function that a rewritten call names."""
        return self._new.get(name) or self.ir[name]

    def module(self) -> IRModule:
        """Return the module; the same if nothing changed."""
        made = ((name, function) for name, versions in self._made.items() for function in versions)
        return self.ir.with_versions(self._methods, made)


class _Rewriting:
    """Rewrites one function for parameters of given types."""

    def __init__(self, versions: _Versions, function: Function, types: Sequence[Type]) -> None:
        self.versions = versions
        self.old = function
        self.dtype = versions.dtype
        self.names = Names.of(function)
        self.params = tuple(
            p if type == p.type else Param(p.name, type, p.role)
            for p, type in zip(function.params, types, strict=True)
        )
        self.replaced: dict[Var, Atom] = dict(zip(function.params, self.params, strict=True))
        self.wanted: set[Var] = set()  # values whose readers get them in the dtype of the policy
        self.casts: dict[tuple[Var | int, str], Var] = {}
        self.out: list[Binding] = []
        self.place: Provenance | None = None

    def function(self, result_type: Type | None) -> Function:
        """Return the rewritten function, its result cast to a type if one is given; the same object if nothing changes."""
        old = self.old.body
        body = self.block(old, result_type)
        if are_same(self.params, self.old.params) and body is old:
            return self.old
        return replace(self.old, params=self.params, bindings=body.bindings, result=body.result)

    def block(self, block: Block, result_type: Type | None) -> Block:
        """Rewrite a block, its result cast to a type if one is given."""
        outside, self.out, casts = self.out, [], dict(self.casts)
        for binding in block.bindings:
            self.place = binding.provenance
            self.binding(binding)
        result = (
            self.read(block.result)
            if result_type is None
            else self.cast_to(self.atom(block.result), result_type)
        )
        bindings, self.out, self.casts = self.out, outside, casts
        if result is block.result and are_same(bindings, block.bindings):
            return block
        return Block(tuple(bindings), result)

    def binding(self, binding: Binding) -> None:
        """Rewrite a binding."""
        old, var = binding.value, binding.var
        value = self.expr(old, var.type)
        type = (
            var.type if value is old and not isinstance(value, FunctionCall) else self.type(value, var.type)
        )
        if value is not old or type != var.type:
            var = var if type == var.type else Var(var.name, type)
            self.replaced[binding.var] = var
            binding = Binding(var, value, binding.provenance)
        self.out.append(binding)
        if isinstance(old, Call) and self.versions.treatment(old.op) == "result":
            self.wanted.add(var)

    def expr(self, expr: Expr, type: Type) -> Expr:
        """Rewrite an expression: its operands in the dtypes that they are to have."""
        match expr:
            case Call():
                args = self.operands(expr)
                return expr if are_same(args, expr.args) else Call(expr.op, args, expr.attrs)
            case FunctionCall():
                return self.call(expr)
            case If():
                return self.branches(expr, type)
            case MatchShape():
                value = self.read(expr.value)
                own = _like(expr.type, value.type)
                return expr if value is expr.value and own == expr.type else MatchShape(value, own)
            case _:
                return map_expr(expr, self.read, lambda block: block)

    def type(self, new: Expr, type: Type) -> Type:
        """The type of a rewritten expression: the old one with other dtypes."""
        match new:
            case FunctionCall():
                return _like(type, self.versions.named(new.function).result_type)
            case If():
                return _like(type, new.then.result.type)
            case _:
                return _like(type, infer(new, self.versions.ir))

    def operands(self, call: Call) -> tuple[Atom | None, ...]:
        """The operands of a call, cast as the policy says."""
        treatment = self.versions.treatment(call.op)
        args = [None if a is None else self.atom(a) for a in call.args]
        if treatment == "kept":
            return tuple(
                None if new is None or old is None else self.cast_to(new, old.type)
                for new, old in zip(args, call.args, strict=True)
            )
        is_followed = treatment == "follow" and not any(a is not None and self.is_computed(a) for a in args)
        if is_followed or treatment in ("given", "result"):
            return tuple(args)
        # A cache is the caller's: what is appended to it has its dtype.
        caches = [a.type.dtype for a in args if a is not None and isinstance(a.type, StateLayerType)]
        dtype = next(iter(caches), WIDE if treatment == "wide" else self.dtype)
        count = 1 if treatment == "first" else len(args)
        return tuple(
            None if a is None else self.cast(a, dtype) if i < count else a for i, a in enumerate(args)
        )

    def is_computed(self, atom: Atom) -> bool:
        """Whether a value is in the dtype of the policy, or is to be read so."""
        return atom in self.wanted or (isinstance(atom.type, TensorType) and atom.type.dtype == self.dtype)

    def call(self, call: FunctionCall) -> FunctionCall:
        """Rewrite a call: of the callee's version for these dtypes, or with the operands that it declares."""
        callee = self.versions.ir[call.function]
        if callee.kind == "private":
            args = tuple(map(self.read, call.args))
            name = self.versions.call(call.function, [a.type for a in args]).name
        else:
            args = tuple(
                self.cast_to(self.atom(a), p.type) for a, p in zip(call.args, callee.params, strict=True)
            )
            name = call.function
        is_same = name == call.function and are_same(args, call.args)
        return call if is_same else FunctionCall(name, args)

    def branches(self, branches: If, type: Type) -> If:
        """Rewrite both blocks; where their results would differ in dtype, they are what they were."""
        condition = self.atom(branches.condition)
        then, otherwise = self.block(branches.then, None), self.block(branches.otherwise, None)
        if _dtypes(then.result.type) != _dtypes(otherwise.result.type):
            then, otherwise = self.block(branches.then, type), self.block(branches.otherwise, type)
        return branches.with_(condition, then, otherwise)

    def atom(self, atom: Atom) -> Atom:
        """What stands for an operand."""
        return self.replaced.get(atom, atom) if isinstance(atom, Var) else atom

    def read(self, atom: Atom) -> Atom:
        """What stands for an operand that nothing is said of."""
        new = self.atom(atom)
        return self.cast(new, self.dtype) if new in self.wanted else new

    def cast(self, atom: Atom, dtype: str) -> Atom:
        """Return a float tensor in a dtype, anything else as it is."""
        type = atom.type
        if not isinstance(type, TensorType) or type.dtype not in FLOATS or type.dtype == dtype:
            return atom
        key = atom if isinstance(atom, Var) else id(atom), dtype
        if key not in self.casts:
            name = atom.name if isinstance(atom, Var) else "constant"
            var = Var(self.names.unique(f"{name}_{dtype}"), TensorType(type.shape, dtype))
            self.out.append(Binding(var, Call(ops.astype, (atom,), {"dtype": dtype}), self.place))
            self.casts[key] = var
        return self.casts[key]

    def cast_to(self, atom: Atom, type: Type) -> Atom:
        """Return a value with the dtypes of a type."""
        if isinstance(type, TensorType):
            return self.cast(atom, type.dtype)
        if not isinstance(type, TupleType) or _dtypes(atom.type) == _dtypes(type):
            return atom
        casts = tuple(
            self.cast_to(own, field) for own, field in zip(self.fields(atom), type.fields, strict=True)
        )
        made = Tuple(casts, type.names)
        var = Var(self.names.unique("results"), _like(type, infer(made, self.versions.ir)))
        self.out.append(Binding(var, made, self.place))
        return var

    def fields(self, atom: Atom) -> Sequence[Atom]:
        """The fields of a tuple; one that was made last goes, as a written cache is used once."""
        if self.out and self.out[-1].var is atom and isinstance(made := self.out[-1].value, Tuple):
            self.out.pop()
            return made.fields
        assert isinstance(atom.type, TupleType)
        fields = [Var(self.names.unique("field"), type) for type in atom.type.fields]
        self.out += [Binding(var, Projection(atom, i), self.place) for i, var in enumerate(fields)]
        return fields


def _dtypes(type: Type) -> tuple[str, ...]:
    """The dtypes of the tensors and caches in a type, in order."""
    match type:
        case TensorType():
            return (type.dtype,)
        case StateLayerType():
            return tuple(buffer.dtype for buffer in type.buffers)
        case TupleType(fields=parts) | StateType(layers=parts):
            return tuple(dtype for part in parts for dtype in _dtypes(part))
        case _:
            return ()


def _like(type: Type, other: Type) -> Type:
    """A type with the dtypes of another; the same object if it has them."""
    if _dtypes(type) == _dtypes(other):
        return type
    dtypes = iter(_dtypes(other))
    return _map_dtypes(type, lambda _: next(dtypes))


def _with_dtype(type: Type, dtype: str) -> Type:
    """A type with its floats in a dtype."""
    return _map_dtypes(type, lambda own: dtype if own in FLOATS else own)


def _map_dtypes(type: Type, dtype: Callable[[str], str]) -> Type:
    match type:
        case TensorType():
            return replace(type, dtype=dtype(type.dtype))
        case StateLayerType():
            return _map_layer(type, dtype)
        case TupleType():
            return TupleType(tuple(_map_dtypes(field, dtype) for field in type.fields), type.names)
        case StateType():
            return StateType(tuple(_map_layer(layer, dtype) for layer in type.layers))
        case _:
            return type


def _map_layer(layer: StateLayerType, dtype: Callable[[str], str]) -> StateLayerType:
    per_token, per_sequence = (
        tuple(replace(buffer, dtype=dtype(buffer.dtype)) for buffer in group)
        for group in (layer.per_token, layer.per_sequence)
    )
    return replace(layer, per_token=per_token, per_sequence=per_sequence)
