# SPDX-License-Identifier: Apache-2.0
"""IR to Program: calls of functions become flat, tuples become slots, dims become slots, every op a `Run`.

What a method computes from weights alone without copying (a transpose, a slice), and small values that depend on nothing,
moves to its `setup`, which runs once at load. Who calls says how kernels are chosen: lowering knows none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

from nnfront.dims import Dim, Size, Symbol, as_symbol, of_symbol, substitute
from nnfront.errors import LowerError
from nnfront.ir import (
    Atom,
    Binding,
    Call,
    Constant,
    Expr,
    Facts,
    Function,
    FunctionCall,
    FunctionName,
    If,
    IRModule,
    MatchShape,
    ObjectType,
    Projection,
    Provenance,
    Scalar,
    Tuple,
    Type,
    Var,
    branch_facts,
    call_sizes,
    map_attr,
    sizes_of,
    substitute_type,
    type_symbols,
)
from nnfront.lower.cache_layers import check_layers
from nnfront.lower.function_value import FunctionValue
from nnfront.lower.instructions import PACK, Block, Branch, Instruction, Match, Run, SlotKind, Structure
from nnfront.lower.program import Argument, MethodProgram, Place, Program
from nnfront.lower.schedule import finish
from nnfront.lower.signature import bind_dims, bound_at_load, bound_by_weights
from nnfront.lower.slots import Frame, dims_in

Choose: TypeAlias = Callable[[Block, Frame, str], Block]
"""Gives the instructions of a body their kernels, those of a target."""

NOTHING: Mapping[Any, Any] = MappingProxyType({})


def as_references(block: Block, frame: Frame, target: str) -> Block:
    """Choose no kernel: every op runs its torch reference."""
    return block


def lower(ir: IRModule, target: str, choose: Choose) -> Program:
    """Return the program of every public function and every transform of `ir`.

    Raises LowerError for what cannot run: a dim that nothing binds.
    """
    said = bound_by_weights(ir)
    methods = {
        f.name: lower_function(f, ir, choose, target, said) for f in ir.functions if f.kind == "public"
    }
    # Weights are transformed on the CPU, where they are read.
    transforms = {f.name: lower_function(f, ir, choose) for f in ir.functions if f.kind == "transform"}
    return Program(target, methods, transforms, dict(ir.aliases))


def lower_weights(ir: IRModule) -> Program:
    """Return the program with its weights and transforms, but not what methods compute: enough to say who reads which weight, and quick."""
    methods = {
        f.name: MethodProgram(
            f.name,
            (),
            tuple(Argument(p.name, p.type, p.role, Structure()) for p in f.weights),
            (),
            (),
            Block(()),
            Block(()),
            Structure(),
            f.attrs.get("transform"),
        )
        for f in ir.functions
        if f.kind == "public"
    }
    transforms = {f.name: lower_function(f, ir) for f in ir.functions if f.kind == "transform"}
    return Program("cpu", methods, transforms, dict(ir.aliases))


def lower_function(
    function: Function,
    ir: Mapping[str, Function],
    choose: Choose = as_references,
    target: str = "cpu",
    said: Mapping[Symbol, Place] = NOTHING,
) -> MethodProgram:
    """Return the program of one function; `ir` holds those that it calls, `said` the dims that weights of others say."""
    lowering = _Lowering(ir)
    arguments = [lowering.argument(p) for p in function.params if p.role in ("input", "state")]
    weights = [lowering.argument(p) for p in function.params if p.role in ("weight", "transformed")]
    dims = bind_dims(function.name, arguments, weights, lowering.frame, said)
    lowering.define(b.symbol for b in dims)
    result = lowering.block(function.bindings, function.result, _Scope())
    if function.states:
        # A function with states returns its result, then the written handles; those the caller has already.
        result = result.fields[0]
    body = Block(tuple(lowering.instructions), tuple(result.leaves()))
    shared = check_layers(function.name, body, lowering.frame.slots)
    body = choose(body, lowering.frame, target)
    # A transform reads one weight after the other: nothing of it is known beforehand.
    setup, body = finish(body, lowering.frame, bound_at_load(dims), hoists=function.kind != "transform")
    return MethodProgram(
        function.name,
        tuple(arguments),
        tuple(weights),
        tuple(dims),
        tuple(lowering.frame.slots),
        setup,
        body,
        result,
        function.attrs.get("transform"),
        target,
        cases=function.attrs.get("cases", {}),
        shared=shared,
    )


@dataclass
class _Scope:
    """What is known inside one function while its body is written out: values of variables, sizes of its dims, who called it."""

    values: dict[Var, Structure] = field(default_factory=dict)
    sizes: Mapping[Symbol, Size] = field(default_factory=dict)
    caller: str = ""

    def place(self, provenance: Provenance | None) -> tuple[str, str]:
        """Module path from the method down, and line of the author's code."""
        if provenance is None:
            return self.caller, ""
        line = f"{provenance.file}:{provenance.line}" if provenance.file else ""
        return ".".join(part for part in (self.caller, provenance.module) if part), line

    def size(self, value: Any) -> Any:
        """An attribute with its dims replaced by the caller's."""
        return map_attr(value, lambda size: substitute(size, self.sizes)) if self.sizes else value

    def type(self, type: Type) -> Type:
        """A type with its dims replaced by the caller's."""
        return substitute_type(type, self.sizes) if self.sizes else type

    def where(self, facts: Mapping[Symbol, Size]) -> _Scope:
        """The scope of a branch in which dims are known to be these."""
        numbers = {symbol: size for symbol, size in facts.items() if isinstance(size, int)}
        return _Scope(self.values, {**self.sizes, **numbers}, self.caller) if numbers else self


class _Lowering:
    """Writes one method's instructions."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        self.functions = functions
        self.frame = Frame()
        self.instructions: list[Instruction] = []
        self._arguments: dict[Var, Structure] = {}
        self._defined: set[Symbol] = set()
        self._bound: dict[tuple[str, tuple[Type, ...]], dict[Symbol, Size]] = {}

    def argument(self, param: Any) -> Argument:
        """Add a parameter's slots."""
        kind: SlotKind = "argument" if param.role in ("input", "state") else "weight"
        structure = self.frame.structure(param.name, kind, param.type)
        self._arguments[param] = structure
        return Argument(param.name, param.type, param.role, structure)

    def define(self, symbols: Iterable[Symbol]) -> None:
        """Note that these dims have a value from here on."""
        self._defined.update(symbols)

    def block(self, bindings: Iterable[Binding], result: Atom, scope: _Scope) -> Structure:
        """Write the bindings, return where their result is."""
        for binding in bindings:
            scope.values[binding.var] = self._expr(binding.value, binding.var, scope, binding.provenance)
        return self._atom(result, scope)

    def _expr(self, expr: Expr, var: Var, scope: _Scope, provenance: Provenance | None) -> Structure:
        match expr:
            case Var() | Constant() | Scalar():
                return self._atom(expr, scope)
            case Tuple():
                return Structure(fields=tuple(self._atom(f, scope) for f in expr.fields), names=expr.names)
            case Projection():
                return self._atom(expr.tuple, scope).fields[expr.index]
            case Call():
                return self._call(expr, var, scope, provenance)
            case FunctionCall():
                return self._function_call(expr, scope, provenance)
            case If():
                return self._if(expr, var, scope, provenance)
            case MatchShape():
                return self._match(expr, scope, provenance)

    def _atom(self, atom: Atom, scope: _Scope) -> Structure:
        match atom:
            case Var():
                found = scope.values.get(atom)
                return self._arguments[atom] if found is None else found
            case Constant():
                return Structure(self.frame.constant(atom))
            case Scalar():
                return Structure(self._number(scope.size(atom.value)))

    def _number(self, value: Any) -> int:
        return self.frame.size(value) if isinstance(value, Dim) else self.frame.constant(value)

    def _call(self, call: Call, var: Var, scope: _Scope, provenance: Provenance | None) -> Structure:
        inputs = []
        for arg in call.args:
            if arg is None:
                inputs.append(self.frame.constant(None))
            else:
                inputs.append(self._packed(self._atom(arg, scope)))
        attrs = {name: self._attr(value, scope) for name, value in call.attrs.items()}
        sized = {
            name: self.frame.size(value)
            for name, value in attrs.items()
            if next(dims_in(value), None) is not None
        }
        result = self.frame.structure(var.name, "value", scope.type(var.type))
        module, line = scope.place(provenance)
        self.instructions.append(
            Run(
                kernel=call.op.name,
                op=call.op.name,
                inputs=tuple(inputs),
                result=result,
                attrs={name: value for name, value in attrs.items() if name not in sized},
                sized=sized,
                is_pure=call.op.is_pure_for(call.args)
                and all(value.is_pure for value in attrs.values() if isinstance(value, FunctionValue)),
                module=module,
                line=line,
            )
        )
        return result

    def _attr(self, value: Any, scope: _Scope) -> Any:
        """An attribute as the op's reference takes it: a function as one that can be called, dims as the caller's."""
        if isinstance(value, FunctionName):
            return FunctionValue(self.functions[value.name], self.functions)
        return scope.size(value)

    def _packed(self, value: Structure) -> int:
        """The slot of a value; a tuple that an op takes as one operand is put together first."""
        if value.is_leaf:
            return value.slot
        inputs = tuple(self._packed(part) for part in value.fields)
        output = self.frame.structure("tuple", "value", ObjectType("tuple"))
        self.instructions.append(Run(PACK, PACK, inputs, output))
        return output.slot

    def _function_call(self, call: FunctionCall, scope: _Scope, provenance: Provenance | None) -> Structure:
        callee = self.functions[call.function]
        sizes = self._sizes(callee, call, scope)
        inner = _Scope(sizes=sizes, caller=scope.place(provenance)[0])
        for param, arg in zip(callee.params, call.args, strict=True):
            inner.values[param] = self._atom(arg, scope)
        if not callee.is_outlined and callee.kind != "external":
            return self.block(callee.bindings, callee.result, inner)
        outside, self.instructions = self.instructions, []
        result = self.block(callee.bindings, callee.result, inner)
        inside, self.instructions = tuple(self.instructions), outside
        made = {slot for i in inside if not isinstance(i, Match) for slot in i.outputs}
        if not made.issuperset(result.leaves()):  # it gives back what it was given: no kernel does that
            self.instructions += inside
            return result
        self.instructions.append(
            self._region(
                callee, inner, Block(inside, tuple(result.leaves())), result, scope.place(provenance)
            )
        )
        return result

    def _region(
        self, function: Function, inner: _Scope, body: Block, result: Structure, place: tuple[str, str]
    ) -> Run:
        """The call of a primitive function as one instruction, with what it stands for: the table decides which of the two runs."""
        given = {param.name: self._packed(inner.values[param]) for param in function.params}
        attrs = dict(function.attrs)
        # Only what a pass of ours outlined is by its attributes what a kernel computes.
        name = attrs.pop("region") if function.is_outlined else function.name
        names = attrs.pop("operands") if function.is_outlined else tuple(given)
        absent = self.frame.constant(None)
        runs = [i for i in body.walk() if isinstance(i, Run)]
        return Run(
            kernel="",
            op=name,
            inputs=tuple(given.get(name, absent) for name in names),
            result=result,
            attrs=attrs,
            is_pure=all(run.is_pure for run in runs),
            module=place[0],
            line=place[1],
            body=body,
        )

    def _sizes(self, callee: Function, call: FunctionCall, scope: _Scope) -> dict[Symbol, Size]:
        """What the callee's dims are in terms of the method's; empty if all have the same name."""
        given = tuple([scope.type(arg.type) for arg in call.args])
        known = self._bound.get((callee.name, given))  # of another layer that is alike
        if known is None:
            known = self._bound[callee.name, given] = call_sizes(callee, given)[0]
        bound = dict(known)
        # A dim that the callee defines itself must not meet that of another call.
        for binding in callee.bindings:
            if isinstance(binding.value, MatchShape):
                for symbol in type_symbols(binding.value.type):
                    if symbol not in bound:
                        bound[symbol] = of_symbol(Symbol.fresh(symbol.name, *symbol.facts))
        same = all(as_symbol(size) == symbol for symbol, size in bound.items())
        return {} if same else bound

    def _if(self, branch: If, var: Var, scope: _Scope, provenance: Provenance | None) -> Structure:
        condition = self._packed(self._atom(branch.condition, scope))
        then = self._branch(branch.then, scope.where(self._branch_facts.get(id(branch), {})))
        otherwise = self._branch(branch.otherwise, scope)
        result = self.frame.structure(var.name, "value", scope.type(var.type))
        module, line = scope.place(provenance)
        outputs = tuple(result.leaves())
        self.instructions.append(Branch(condition, then, otherwise, outputs, module=module, line=line))
        return result

    @cached_property
    def _branch_facts(self) -> dict[int, Facts]:
        """By the id of each `if`, what its condition says about dims."""
        return {key: facts for f in self.functions.values() for key, facts in branch_facts(f).items()}

    def _branch(self, block: Any, scope: _Scope) -> Block:
        outside, self.instructions = self.instructions, []
        defined = set(self._defined)
        result = self.block(block.bindings, block.result, scope)
        inside, self.instructions = self.instructions, outside
        self._defined = defined
        return Block(tuple(inside), tuple(result.leaves()))

    def _match(self, match: MatchShape, scope: _Scope, provenance: Provenance | None) -> Structure:
        value = self._atom(match.value, scope)
        type = scope.type(match.type)
        new: dict[Symbol, int] = {}
        for size in sizes_of(type):
            if (symbol := as_symbol(size)) is not None and symbol not in self._defined:
                new[symbol] = self.frame.dim(symbol)
        self.define(new)
        for symbol in type_symbols(type):
            if symbol not in self._defined:
                raise LowerError(f"dim '{symbol}' is bound by nothing", help="give it as an axis of its own")
        knows = tuple(
            (symbol, self.frame.dim(symbol))
            for symbol in dict.fromkeys(type_symbols(type))
            if symbol not in new
        )
        module, line = scope.place(provenance)
        self.instructions.append(Match(value.slot, type, tuple(new.items()), knows, module=module, line=line))
        return value
