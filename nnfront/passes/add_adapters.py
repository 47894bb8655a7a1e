# SPDX-License-Identifier: Apache-2.0
"""Let each sequence of a call have low-rank changes of weights (LoRA) of its own: they are added to the products with these weights.

example: add_adapters(ir, {"a.weight": 2}, 3)
before:
    def main[batch](x: input float32[batch, 4], a.weight: weight float32[6, 4], b.weight: weight float32[2, 4]) -> float32[batch, 8] attrs(derived=("ab",)) {
        ab: float32[8, 4] = concat(a.weight, b.weight)
        y: float32[batch, 8] = linear(x, ab)
        return y
    }
after:
    def main[batch](x: input float32[batch, 4], adapter: input int32[batch], a.weight: weight float32[6, 4], a.weight.lora_a: weight float32[3, 2, 4], a.weight.lora_b: weight float32[3, 6, 2], b.weight: weight float32[2, 4]) -> float32[batch, 8] attrs(derived=("ab.lora_b", "ab")) {
        ab: float32[8, 4] = concat(a.weight, b.weight)
        zeros: float32[3, 2, 2] = zeros(shape=(3, 2, 2))
        ab.lora_b: float32[3, 8, 2] = concat(a.weight.lora_b, zeros, dim=1)
        linear: float32[batch, 8] = linear(x, ab)
        y: float32[batch, 8] = add_low_rank(linear, x, a.weight.lora_a, ab.lora_b, adapter)
        return y
    }

The argument `adapter` has the number of each sequence's adapter; -1 is none. Of a weight that ranks divide each has the same part of the matrices.
Run it before anything else that puts other weights in the place of these: products stay what they
were, so they are quantised, divided and lifted as without adapters, and the matrices of the adapters stay as they are.

A function that several layers share becomes several where their adapters differ in rank.

raises:  PassError for a weight that is read by more than products.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar, cast

from nnfront import ops
from nnfront.dims import Size, Symbol, floordiv, of_symbol, product, same, total
from nnfront.errors import PassError
from nnfront.ir import (
    Atom,
    Binding,
    Block,
    Call,
    Function,
    FunctionBuilder,
    FunctionCall,
    If,
    IRModule,
    Mutator,
    Names,
    Param,
    TensorType,
    Var,
    call_sizes,
    canonical_call,
    tensor_type,
    used_vars,
    walk_bindings,
)
from nnfront.passes.base import module_pass

ADAPTER = "adapter"
"""The argument of methods that says which adapter each sequence has."""
T = TypeVar("T")


@module_pass()
def add_adapters(
    ir: IRModule, ranks: Mapping[str, int], count: int, turned: Collection[str] = ()
) -> IRModule:
    """Add `count` adapters to weights, each weight's of one rank; their matrices are new weights: NAME.lora_a [count, rank, in], NAME.lora_b [count, out, rank].

    `turned` are those of the weights that lie as [in, out].
    """
    adding = _Adding(ir)
    new = {method.name: adding.method(method, ranks, count, turned) for method in ir.methods}
    return ir.with_versions(new, ((str(name), function) for (name, *_), function in adding.made.items()))


@dataclass(frozen=True)
class _LowRank:
    """What is added to products with a weight: a [count, rank, in], b [count, out, rank]. `name` is the weight's, for errors."""

    a: Var
    b: Var
    name: str
    is_transposed: bool = False

    @property
    def types(self) -> tuple[TensorType, TensorType]:
        return tensor_type(self.a), tensor_type(self.b)


class _Adding:
    """Rewrites a module; `made` are private functions for adapters of some of their weights, by place, and the dim that counts sequences."""

    def __init__(self, ir: IRModule) -> None:
        self.ir, self.names = ir, Names(ir)
        self.made: dict[tuple[object, ...], Function] = {}

    def method(
        self, method: Function, ranks: Mapping[str, int], count: int, turned: Collection[str]
    ) -> Function:
        """A method whose weights have adapters of these ranks."""
        changed = {i: p for i, p in enumerate(method.params) if p.role == "weight" and p.name in ranks}
        rows = [p.type.shape[0] for p in method.inputs if isinstance(p.type, TensorType) and p.type.shape]
        if not changed or not rows:
            return method
        given = {}
        for i, weight in changed.items():
            name, rank, is_transposed = weight.name, ranks[weight.name], weight.name in turned
            shape, dtype = tensor_type(weight).shape, tensor_type(weight).dtype
            outputs, inputs = reversed(shape) if is_transposed else shape
            types = (TensorType((count, *sizes), dtype) for sizes in ((rank, inputs), (outputs, rank)))
            given[i] = _LowRank(*_matrices(name, types), name, is_transposed)
        return _Body(method, self, rows[0], given).rewritten()

    def private(self, name: str, given: Mapping[int, _LowRank], batch: Symbol) -> str:
        """The name of a private function some of whose weights have adapters."""
        key = name, batch, *((i, each.is_transposed, *each.types) for i, each in given.items())
        if key not in self.made:
            function, own = self.ir[name], {}
            for i, each in given.items():
                a, b = _matrices(function.params[i].name, each.types)
                own[i] = replace(each, a=a, b=b)
            new = _Body(function, self, of_symbol(batch), own).rewritten()
            self.made[key] = new.with_(name=self.names.unique(name))
        return self.made[key].name


def _matrices(weight: str, types: Iterable[TensorType]) -> tuple[Param, Param]:
    """The matrices of the adapters of a weight, new weights."""
    a, b = types
    return Param(f"{weight}.lora_a", a, "weight"), Param(f"{weight}.lora_b", b, "weight")


def _extended(
    given: Sequence[T], function: Function, adapter: T, matrices: Mapping[int, tuple[T, T]]
) -> Iterator[T]:
    """Parameters or arguments with what is new: the adapter behind what is no weight, matrices behind their weights."""
    last = max((i for i, p in enumerate(function.params) if p.role in ("input", "state")), default=-1)
    if last < 0:
        yield adapter
    for i, each in enumerate(given):
        yield each
        if i == last:
            yield adapter
        yield from matrices.get(i, ())


class _Body(Mutator):
    """Rewrites one function. `known` are weights, and what is made of them, with what is added to products with them."""

    def __init__(
        self, function: Function, adding: _Adding, batch: Size, given: Mapping[int, _LowRank]
    ) -> None:
        super().__init__()
        self.adding, self.old, self.batch, self.given = adding, function, batch, given
        self.known: dict[Var, _LowRank] = {function.params[i]: each for i, each in given.items()}
        taken = [*function.params, *(b.var for b in walk_bindings(function.bindings))]
        self.names = Names([*(v.name for v in taken), *(v.name for each in given.values() for v in (each.a, each.b))])  # fmt: skip
        self.adapter = Param(self.names.unique(ADAPTER), TensorType((batch,), "int32"), "input")
        self.derived: list[str] = []
        self.chosen: dict[Size, Var] = {batch: self.adapter}

    def rewritten(self) -> Function:
        """The function with its new parameters."""
        new = self.function(self.old)
        matrices = {i: (each.a, each.b) for i, each in self.given.items()}
        params = _extended(self.old.params, self.old, self.adapter, matrices)
        derived = (*self.derived, *self.old.attrs.get("derived", ()))
        attrs = {**self.old.attrs, "derived": derived} if derived else self.old.attrs
        return new.with_(params=tuple(params), attrs=attrs)

    def block(self, block: Block) -> Block:
        outside = dict(self.known), dict(self.chosen)
        new = super().block(block)
        if block.result in self.known:
            self.refuse(self.known[block.result], "it is a result")
        self.known, self.chosen = outside
        return new

    def binding(self, binding: Binding) -> Sequence[Binding]:
        value = binding.value
        read = [] if isinstance(value, If) else [v for v in used_vars(value) if v in self.known]
        if not read:
            return super().binding(binding)
        builder = FunctionBuilder.of_bindings(self.names, binding.provenance)
        if isinstance(value, FunctionCall) and self.adding.ir[value.function].kind == "private":
            new: Call | FunctionCall = self.call(builder, value)
        elif isinstance(value, Call) and _product_with(value) is read[0] and len(read) == 1:
            new = self.product(builder, value, self.known[read[0]])
        elif isinstance(value, Call) and _turns(value):
            self.known[binding.var] = replace(
                self.known[read[0]], is_transposed=not self.known[read[0]].is_transposed
            )
            return (binding,)
        elif isinstance(value, Call) and value.op is ops.shard:
            part = self.part(builder, value, binding.var.name)
            self.known[binding.var] = part
            return (binding, *builder.finish(part.a).bindings)
        elif isinstance(value, Call) and (joined := self.joined(builder, value, binding.var.name)):
            self.known[binding.var] = joined
            return (binding, *builder.finish(joined.a).bindings)
        else:
            reader = value.op.name if isinstance(value, Call) else type(value).__name__
            self.refuse(self.known[read[0]], f"{reader} reads it")
        return [*builder.finish(binding.var).bindings, binding.with_value(new)]

    def refuse(self, weight: _LowRank, why: str) -> NoReturn:
        raise PassError(
            f"{self.old.name}: {weight.name!r} cannot have an adapter for each sequence: {why}, and no product with [out, in]",
            help="merge the adapter into the weight",
        )

    def product(self, builder: FunctionBuilder, call: Call, weight: _LowRank) -> Call:
        """A product, and what is added to it."""
        x, op = call.args[0], call.op
        vectors, is_turned = tensor_type(x).shape, op is ops.matmul
        if is_turned != weight.is_transposed or call.attrs.get("out_dtype") or len(vectors) < 2:
            self.refuse(weight, f"{op.name} reads it otherwise")
        y = builder.emit(call)
        adapters = self.of(builder, vectors[0], weight)
        return canonical_call(ops.add_low_rank, (y, x, weight.a, weight.b, adapters))

    def of(self, builder: FunctionBuilder, count: Size, weight: _LowRank) -> Var:
        """The adapters of so many vectors: those of one sequence follow one another."""
        if count not in self.chosen:
            each = floordiv(count, self.batch)
            if not same(product((self.batch, each)), count):
                self.refuse(weight, f"a product has {count} vectors, of {self.batch} sequences")
            column = builder.call(ops.reshape, self.adapter, shape=(self.batch, 1))
            several = builder.call(ops.broadcast_to, column, shape=(self.batch, each))
            self.chosen[count] = builder.call(ops.reshape, several, shape=(count,))
        return self.chosen[count]

    def call(self, builder: FunctionBuilder, call: FunctionCall) -> FunctionCall:
        """A call of a private function, which is given the adapters of its sequences, and the matrices of these."""
        function = self.adding.ir[call.function]
        given = {i: self.known[a] for i, a in enumerate(call.args) if isinstance(a, Var) and a in self.known}
        bound, _ = call_sizes(function, [arg.type for arg in call.args])
        whole = [symbol for symbol, size in bound.items() if same(size, self.batch)]
        parts = [
            s for s, size in bound.items() if same(product((self.batch, floordiv(size, self.batch))), size)
        ]
        first = next(iter(given.values()))
        if not whole and not parts:
            self.refuse(first, f"{function.name} does not say what belongs to which sequence")
        batch = (whole or parts)[0]
        adapter = self.of(builder, bound[batch], first)
        name = self.adding.private(call.function, given, batch)
        matrices: dict[int, tuple[Atom, Atom]] = {i: (each.a, each.b) for i, each in given.items()}
        return FunctionCall(name, tuple(_extended(call.args, function, adapter, matrices)))

    def part(self, builder: FunctionBuilder, call: Call, name: str) -> _LowRank:
        """What is added to products with a rank's part of a weight: its outputs, or what its inputs give to the sum of all ranks."""
        whole, rank = cast(tuple[Var, Var], call.args)
        weight = self.known[whole]
        is_outputs = (call.attrs["axis"] == 0) != weight.is_transposed
        matrix, end, axis = (weight.b, "lora_b", 1) if is_outputs else (weight.a, "lora_a", 2)
        cut = canonical_call(ops.shard, (matrix, rank), {**call.attrs, "axis": axis})
        made = builder.emit(cut, f"{name}.{end}")
        self.derived.append(made.name)
        return replace(weight, b=made) if is_outputs else replace(weight, a=made)

    def joined(self, builder: FunctionBuilder, call: Call, name: str) -> _LowRank | None:
        """What is added to products with several weights, one after another along the axis of outputs."""
        weights = [self.known.get(a) if isinstance(a, Var) else None for a in call.args]
        known = [each for each in weights if each is not None]
        outputs = 1 if known[0].is_transposed else 0
        dim = call.op.full_attrs(call.attrs).get("dim")
        if call.op is not ops.concat or dim != outputs or len({each.is_transposed for each in known}) > 1:
            return None
        count, dtype = known[0].types[0].shape[0], known[0].types[0].dtype
        ranks = [each.types[0].shape[1] for each in known]
        blocks: list[Var] = []
        for arg, each in zip(call.args, weights, strict=True):
            at = len(ranks) if each is None else known.index(each)
            sizes = [total(ranks)] if each is None else [total(ranks[:at]), total(ranks[at + 1 :])]
            zeros = [
                builder.call(ops.zeros, shape=(count, tensor_type(arg).shape[outputs], size), dtype=dtype)
                if size != 0
                else None
                for size in sizes
            ]
            columns = zeros if each is None else [zeros[0], each.b, zeros[1]]
            blocks.append(self.concat(builder, [c for c in columns if c is not None], 2))
        b = self.concat(builder, blocks, 1, f"{name}.lora_b")
        a = self.concat(builder, [each.a for each in known], 1, f"{name}.lora_a")
        return _LowRank(a, b, known[0].name, known[0].is_transposed)

    def concat(self, builder: FunctionBuilder, parts: Sequence[Var], dim: int, name: str = "") -> Var:
        """Some matrices as one, which is made when weights are loaded if it has a name."""
        if len(parts) == 1:
            return parts[0]
        made = builder.emit(canonical_call(ops.concat, parts, {"dim": dim}), name)
        self.derived += [made.name] if name else []
        return made


def _product_with(call: Call) -> Atom | None:
    """The matrix of a product with one."""
    return call.args[1] if call.op in (ops.linear, ops.matmul) else None


def _turns(call: Call) -> bool:
    """Whether it is the transpose of a matrix."""
    return call.op is ops.permute_dims and call.op.full_attrs(call.attrs)["axes"] == (1, 0)
