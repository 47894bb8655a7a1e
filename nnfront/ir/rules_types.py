# SPDX-License-Identifier: Apache-2.0
"""Rules about dims and types. They hold for functions that keep the rules about form."""

from __future__ import annotations

from collections.abc import Iterator

from nnfront.dims import Dim, Symbol, as_symbol, describe_facts, equal
from nnfront.errors import NnfrontError, VerifyError
from nnfront.ir.attributes import RULE_ERRORS
from nnfront.ir.expr import Binding, Call, Expr, FunctionCall, If, MatchShape
from nnfront.ir.facts import NO_FACTS, Facts, infer_within
from nnfront.ir.infer import substitute_type, without_sizes
from nnfront.ir.print_types import TypePrinter, type_text
from nnfront.ir.types import ScalarType, TensorType, TupleType, Type, sizes_of
from nnfront.ir.value_numbering import attr_key
from nnfront.ir.verifier_view import Body, Rule, Scope, Step


def v13_dims_are_defined(body: Body) -> Iterator[VerifyError]:
    """A dim that a body uses is named by a parameter's type, or defined by a `match_shape` ahead of its use, in scope."""
    return _undefined(body, body.root, set(body.function.symbols), set())


def _undefined(body: Body, scope: Scope, known: set[Symbol], fine: set[int]) -> Iterator[VerifyError]:
    """`fine` are the types, by id, whose dims are known to be defined here."""
    defined: set[Symbol] = set()
    for binding, _, branches in scope.steps:
        for branch in branches:
            yield from _undefined(body, branch, known, set(fine) if body.defines_dims else fine)
        value, dims = binding.value, body.operand_dims.get(binding, [])
        if isinstance(value, MatchShape):
            # By themselves: those that matching a value tells.
            new = {s for size in sizes_of(value.type) if (s := as_symbol(size)) is not None} - known
            defined |= new
            known |= new
            dims = [size for size in sizes_of(value.type) if isinstance(size, Dim)]
        type = body.interned(binding.var.type)
        if id(type) not in fine:
            fine.add(id(type))
            dims = [*dims, *(size for size in sizes_of(type) if isinstance(size, Dim))]
        if not dims:
            continue
        for symbol in dict.fromkeys(symbol for dim in dims for symbol in dim.symbols):
            if symbol not in known:
                what = f"V13: nothing says what the dim '{symbol.name}' is"
                help = "a parameter's type or a match_shape ahead of it must name it"
                yield body.error(what, binding, help=help)
    known -= defined


def v14_dims_mean_one_thing(body: Body) -> Iterator[VerifyError]:
    """A dim has the same facts everywhere in a function."""
    first: dict[Symbol, Symbol] = {}
    seen: set[int] = set()
    for dim, binding in _all_dims(body):
        if id(dim) in seen:
            continue
        seen.add(id(dim))
        for symbol in dim.symbols:
            known = first.setdefault(symbol, symbol)
            if known.facts != symbol.facts:
                yield body.error(
                    f"V14: the dim '{symbol.name}' has different facts in different places",
                    binding,
                    details=[
                        f"here {describe_facts(*symbol.facts)}",
                        f"before {describe_facts(*known.facts)}",
                    ],
                )


def _all_dims(body: Body) -> Iterator[tuple[Dim, Binding | None]]:
    for type, binding in body.types:
        for size in type.shape if isinstance(type, TensorType) else sizes_of(type):
            if isinstance(size, Dim):
                yield size, binding
    for binding, dims in body.operand_dims.items():
        for dim in dims:
            yield dim, binding


def v15_conditions_are_boolean(body: Body) -> Iterator[VerifyError]:
    """The condition of an `if` is a boolean host scalar or a boolean tensor without axes."""
    for step in body.steps:
        value = step.binding.value
        if isinstance(value, If):
            type = value.condition.type
            is_one = isinstance(type, ScalarType) or (isinstance(type, TensorType) and not type.shape)
            if not (is_one and type.dtype == "bool"):  # type: ignore[union-attr]
                yield body.error(
                    f"V15: the condition of an if is a {type_text(type)}, not a bool", step.binding
                )


def v16_match_shape_changes_sizes_only(body: Body) -> Iterator[VerifyError]:
    """`match_shape` gives a value a type that differs from its own in sizes at most."""
    for step in body.steps:
        value = step.binding.value
        if isinstance(value, MatchShape) and without_sizes(value.value.type) != without_sizes(value.type):
            what = f"V16: match_shape makes a {type_text(value.type)} of a {type_text(value.value.type)}"
            yield body.error(what, step.binding)


def v17_attributes_are_canonical(body: Body) -> Iterator[VerifyError]:
    """A call stores its attributes in the one form that its op gives them, defaults left out."""
    seen: set[object] = set()
    for (binding, call), key in zip(body.calls, body.call_keys, strict=True):
        if key in seen or not call.op.attributes:
            continue
        seen.add(key)
        types = [None if arg is None else arg.type for arg in call.args]
        full = {name: call.attrs.get(name, default) for name, default in call.op.attributes.items()}
        try:
            canonical = call.op.canonical_attrs(types, full)
        except NnfrontError as error:
            yield body.error(f"V17: {error.what}", binding, details=error.details, help=error.help)
            continue
        except RULE_ERRORS as error:
            yield body.error(f"V17: {call.op.name} cannot take these attributes: {error}", binding)
            continue
        if attr_key(canonical) != attr_key(call.attrs):
            stored, expected = TypePrinter(()).attrs(call.attrs), TypePrinter(()).attrs(canonical)
            yield body.error(
                f"V17: the attributes of {call.op.name} are not canonical",
                binding,
                details=[f"got {stored}", f"expected {expected}"],
            )


def v18_types_follow_from_operands(body: Body) -> Iterator[VerifyError]:
    """The declared type of a variable is the one that inference gives, or one that says less; what a branch's condition says of dims holds in it."""
    inferred: dict[object, Type | VerifyError] = {}
    keys = iter(body.call_keys)
    verdicts: dict[tuple[int, int], bool] = {}
    for step in body.steps:
        binding, value = step.binding, step.binding.value
        facts = body.facts.get(binding, NO_FACTS)
        match value:
            case If():
                yield from _uncovered(body, step, facts)
                continue
            case Call():
                key: object = next(keys)
            case FunctionCall():
                key = (value.function, *(id(body.interned(arg.type)) for arg in value.args))
            case _:
                key = id(value)
        type = inferred.get(key)
        if type is None:
            type = inferred[key] = _infer(body, value, step)
        declared = binding.var.type
        if type is declared:
            continue
        if facts and (isinstance(type, VerifyError) or not _follows(type, declared)):
            type = _infer(body, value, step, facts)
            if not isinstance(type, VerifyError) and _follows_within(type, declared, facts):
                continue
        if isinstance(type, VerifyError):
            yield type
            continue
        pair = (id(body.interned(type)), id(body.interned(declared)))
        follows = verdicts.get(pair)
        if follows is None:
            follows = verdicts[pair] = pair[0] == pair[1] or _follows(type, declared)
        if not follows:
            yield body.error(
                f"V18: {binding.var.name!r} has another type than its value",
                binding,
                details=[f"declared {type_text(declared)}", f"inferred {type_text(type)}"],
            )


def _uncovered(body: Body, step: Step, facts: Facts) -> Iterator[VerifyError]:
    """What is wrong with the type of an `if`: each branch gives a value of it, under what the branch knows."""
    branches, declared = step.binding.value, step.binding.var.type
    assert isinstance(branches, If)
    joined = _infer(body, branches, step)
    known = body.branch_facts.get(id(branches), facts)
    results = {"then": (branches.then.result.type, known), "else": (branches.otherwise.result.type, facts)}
    wrong = {name: type for name, (type, its) in results.items() if not _follows_within(type, declared, its)}
    if not wrong:
        return
    if isinstance(joined, VerifyError):
        yield joined
        return
    yield body.error(
        f"V18: {step.binding.var.name!r} has another type than its value",
        step.binding,
        details=[
            f"declared {type_text(declared)}",
            *(f"{name} {type_text(type)}" for name, type in wrong.items()),
        ],
        help="a branch may give a known size for a dim where its condition says that the dim is that",
    )


def _follows_within(type: Type, declared: Type, facts: Facts) -> bool:
    """Whether a value of this type is one of the declared type where the facts hold."""
    if type is declared or type == declared or _follows(type, declared):
        return True
    return bool(facts) and _follows(substitute_type(type, facts), substitute_type(declared, facts))


def _infer(body: Body, value: Expr, step: Step, facts: Facts = NO_FACTS) -> Type | VerifyError:
    try:
        return infer_within(value, body.functions, facts)
    except NnfrontError as error:
        return body.error(f"V18: {error.what}", step.binding, details=error.details, help=error.help)
    except RULE_ERRORS as error:
        return body.error(f"V18: no type for these operands and attributes: {error}", step.binding)


def _follows(inferred: Type, declared: Type) -> bool:
    """Whether a value of the inferred type always is one of the declared type."""
    match inferred, declared:
        case TensorType(), TensorType() if (
            inferred.dtype == declared.dtype and inferred.ndim == declared.ndim
        ):
            return all(equal(x, y) is True for x, y in zip(inferred.shape, declared.shape, strict=True))
        case ScalarType(), ScalarType() if inferred.dtype == declared.dtype:
            x, y = inferred.value, declared.value
            return y is None or (x is not None and equal(x, y) is True)
        case TupleType(), TupleType() if inferred.names == declared.names:
            if len(inferred.fields) != len(declared.fields):
                return False
            return all(
                x == y or _follows(x, y) for x, y in zip(inferred.fields, declared.fields, strict=True)
            )
        case _:
            return False


TYPES: tuple[Rule, ...] = (
    v13_dims_are_defined,
    v14_dims_mean_one_thing,
    v15_conditions_are_boolean,
    v16_match_shape_changes_sizes_only,
    v17_attributes_are_canonical,
    v18_types_follow_from_operands,
)
