# SPDX-License-Identifier: Apache-2.0
"""`Op`: one entry of the vocabulary, and the registry of all of them.

An op is declared by its type rule, a function from operand types and attributes to the result's type:

    @op()
    def matmul(a: TensorType, b: TensorType, out_dtype: str | None = None) -> TensorType:
        ...

    @matmul.reference
    def _(a, b, out_dtype):          # torch; this is what the op means, and what a CPU runs
        ...

Parameters whose annotation names a type (`TensorType`, `OperandType`, `TensorType | None`, `Sequence[TensorType]`) are
operands; all others are attributes. At most one operand is a sequence (or `*operands`), and then it is the only one.
Attributes reach the rule and the reference in their canonical form. Their annotations say what they may be, and how what the author wrote
becomes that (`nnfront.ir.attributes`): nothing else is stored or read. `normalize` is for those that depend on other attributes or operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

from nnfront.dims import Size
from nnfront.errors import DimError, InferError, TraceError
from nnfront.ir.attributes import Canonical, Kind, annotation_of, kinds_of, shown
from nnfront.ir.operands import Operand, kind_name, operand_of
from nnfront.ir.same_code import place_of, same_code
from nnfront.ir.types import (
    FunctionType,
    ScalarType,
    TensorType,
    Type,
)

# A size with the least and greatest number that it is and a divisor, None for no bound.
ImpliedSize: TypeAlias = tuple[Size, int | None, int | None, int | None]

# How a result shares the memory of an operand: for any operand; for one in row-major order, while others are copied; or for some
# operands and attributes, which the op's name does not tell (a cast to the dtype that a tensor has).
View: TypeAlias = Literal["always", "by strides", "sometimes", "never"]

# In which dtype an op computes, where one is asked for:
#   compute   every float operand in that dtype: where the time goes
#   wide      every float operand in float32: sums over many terms, and functions that turn small errors into large ones
#   first     the first operand in that dtype, scales and tables as they are stored; the op itself accumulates in float32
#   follow    in that dtype if one of the operands is, else as they are: what moves elements or treats each for itself
#   result    operands as they are; who reads the result gets it in that dtype
#   given     operands as they are: the author says which dtype comes out
#   kept      operands in the dtypes that they had when the op was written
DtypePolicy: TypeAlias = Literal["compute", "wide", "first", "follow", "result", "given", "kept"]

# From the types of operands and results and the attributes, defaults included, to floating-point operations.
Flops: TypeAlias = Callable[[Sequence[TensorType], Sequence[TensorType], Mapping[str, Any]], Size]

OPS: dict[str, Op] = {}


@dataclass(eq=False)
class Op:
    """A vocabulary entry: name, type rule, torch reference, signature, and what is known of every call. Compared by identity.

    Its declaration completes it (`reference`, `normalize`); after that it does not change. The facts, from `view` to `dtype_policy`,
    are promises about the reference: a default promises nothing.

    view          how the result shares the memory of the operand; `View` says when
    in_order      elements of the result, row by row, are those of the operands, one operand after the other; a name: where the
                  attribute of that name is 0. `keeps_order` answers for a call
    moves         it copies elements, perhaps converted, or writes numbers that shapes and attributes tell: it computes nothing
    rowwise       rows (slices along axis 0) of the result depend on the same rows of the operands only, all of which have as many,
                  unless the attribute `axis` names axis 0
    pointwise     an element of the result depends on one element of each operand, which all broadcast
    scratch       False: while it runs it holds nothing but operands and results, where operands and results have one dtype, positions
                  int64, and operands are in row-major order (or it `moves`, then in any)
    holds         where a reference holds more than a few copies of its largest operand: the most bytes besides operands and results, from the elements of its operands
    flops         what it computes; None: one operation for each element of the result, of a reduction for each of the operand
    dtype_policy  in which dtype it computes where one is asked for; `DtypePolicy`
    collective    every rank of several takes part in it, all in the same order
    """

    name: str
    infer: Callable[..., Type]
    is_pure: bool
    operands: tuple[Operand, ...]
    attributes: Mapping[str, Any]  # name -> default, or inspect.Parameter.empty
    doc: str
    signature: inspect.Signature
    stricter: str = ""  # why the rule refuses operands that the reference would take
    writes: str = ""  # the operand, a handle, that a call uses up and gives back written
    view: View = "never"
    in_order: bool | str = False
    moves: bool = False
    rowwise: bool = False
    pointwise: bool = False
    scratch: bool = True
    holds: Callable[..., int] | None = None
    flops: Flops | None = None
    dtype_policy: DtypePolicy = "kept"
    collective: bool = False
    _reference: Callable[..., Any] | None = field(default=None, repr=False)
    _normalize: Callable[..., dict[str, Any]] | None = field(default=None, repr=False)
    _calls: Callable[..., FunctionType] | None = field(default=None, repr=False)
    _implies: Callable[..., list[ImpliedSize]] | None = field(default=None, repr=False)

    @property
    def is_variadic(self) -> bool:
        """Whether the op takes one sequence of operands of any length."""
        return bool(self.operands) and self.operands[0].is_sequence

    @property
    def is_view(self) -> bool:
        """Whether the result shares the memory of an operand that is in row-major order."""
        return self.view in ("always", "by strides")

    def keeps_order(self, attrs: Mapping[str, Any]) -> bool:
        """Whether the elements of the result, row by row, are those of the operands, one operand after the other."""
        if isinstance(self.in_order, str):
            return bool(self.full_attrs(attrs)[self.in_order] == 0)
        return self.in_order

    def reference(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Declare what the op means: a function of torch tensors, named attributes as in the rule."""
        self._reference = self._again("reference", self._reference, function)
        return function

    def normalize(self, function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        """Declare how attributes become canonical that their annotations do not make so: takes parameters of the rule by name, returns attributes."""
        self._normalize = self._again("normaliser", self._normalize, function)
        return function

    def implies(self, function: Callable[..., list[ImpliedSize]]) -> Callable[..., list[ImpliedSize]]:
        """Declare what a true result implies for sizes, for branches: same parameters as the rule; see `implied_facts`."""
        self._implies = self._again("statement about sizes", self._implies, function)
        return function

    def calls(self, function: Callable[..., FunctionType]) -> Callable[..., FunctionType]:
        """Declare as what an op calls the function that it is given: same parameters as the rule, returns the arguments' and result's types."""
        self._calls = self._again("way to call a function", self._calls, function)
        return function

    def called_as(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> FunctionType | None:
        """Return the types with which the op calls the function that it is given, and what it takes back; None for an op that is given none."""
        if self._calls is None:
            return None
        return self._ask(self._apply, types, self.full_attrs(attrs), self._calls)  # type: ignore[no-any-return]

    def _again(
        self, what: str, known: Callable[..., Any] | None, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function, which may be declared once, or again in the same words."""
        if known is not None and not same_code(known, function):
            raise _taken(f"the op {self.name!r} has another {what} already", known, function)
        return function

    def implied_facts(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> list[ImpliedSize]:
        """Return (size, least, greatest, divisor) for each operand that is a size, None for no bound; what holds where the result is true."""
        return [] if self._implies is None else self._apply(self._implies, types, {**self._defaults, **attrs})

    def result_type(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> Type:
        """Return the type of the result for these operand types (None: an optional operand that is absent).

        Raises InferError, its text beginning with the op's name.
        """
        return self._ask(self._apply, types, attrs, self.infer)  # type: ignore[no-any-return]

    def canonical_attrs(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes in the one form in which a call stores them: canonical, in the order of declaration, defaults left out.

        Raises InferError like `result_type`.
        """
        if not self.attributes:
            return {}
        if self._canonical_by_kind or self._normalize is not None:
            attrs = self._ask(self._canonical, types, attrs)
        canonical = {
            name: attrs[name]
            for name, default in self.attributes.items()
            if name in attrs and not _is_default(attrs[name], default)
        }
        for name, value in canonical.items():
            if problem := self.misfit(name, value):
                raise InferError(f"{self.name}: {problem}")
        return canonical

    def misfit(self, name: str, value: object) -> str:
        """Return why this cannot be the value of the attribute of this name, as a call stores it; "" if it can."""
        kind = self._kinds[name]
        return "" if kind.fits(value) else f"attribute {name!r} must be {kind.words}, got {shown(value)}"

    def attribute_words(self, name: str) -> str:
        """Return what the attribute of this name may be."""
        return self._kinds[name].words

    def full_attrs(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attributes of a call with the defaults of those that it leaves out."""
        return {**self._defaults, **attrs}

    def run(self, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Run the reference on torch values; dims in attributes have been replaced by ints."""
        assert self._reference is not None, f"{self.name} has no reference"
        return self._apply(self._reference, args, {**self._defaults, **attrs})

    def bound(self, attrs: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the reference as a function of the operands alone; attributes that are not in `attrs` are given by keyword."""
        reference, known = self._reference, {**self._defaults, **attrs}
        assert reference is not None, f"{self.name} has no reference"
        if self._operands_lead:
            return partial(reference, **known) if known else reference
        return lambda *values, **more: self._apply(reference, values, {**known, **more})

    def is_pure_for(self, args: Sequence[Any]) -> bool:
        """Whether a call with these operands has no effect; an op that only writes a handle has none where it gets no handle."""
        if self.is_pure:
            return True
        return any(o.name == self.writes and a is None for o, a in zip(self.operands, args, strict=False))

    def _canonical(self, types: Sequence[Type | None], attrs: Mapping[str, Any]) -> dict[str, Any]:
        found, first = dict(attrs), types[0] if types else None
        for name, canonical in self._canonical_by_kind:
            if name in attrs:
                found[name] = canonical(attrs[name], name, first)
        if self._normalize is not None:
            known = {**self._defaults, **found}
            for name, place in self._normalized.items():
                if place is not None:
                    known[name] = list(types) if self.is_variadic else types[place]
            found |= self._normalize(**{name: known[name] for name in self._normalized if name in known})
        return found

    @cached_property
    def _canonical_by_kind(self) -> list[tuple[str, Canonical]]:
        return [(name, kind.canonical) for name, kind in self._kinds.items() if kind.canonical is not None]

    @cached_property
    def _normalized(self) -> dict[str, int | None]:
        """The parameters that the normaliser takes, and which operand each is."""
        places = {operand.name: place for place, operand in enumerate(self.operands)}
        taken = inspect.signature(self._normalize).parameters if self._normalize is not None else ()
        return {name: places.get(name) for name in taken}

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        return kinds_of(self.infer, self.attributes)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        return {
            name: value for name, value in self.attributes.items() if value is not inspect.Parameter.empty
        }

    @cached_property
    def _operands_lead(self) -> bool:
        """Whether all operands come before all attributes, and none is a sequence: then calls are cheap."""
        names = [operand.name for operand in self.operands]
        return list(self.signature.parameters)[: len(names)] == names and not self.is_variadic

    def _apply(self, function: Callable[..., Any], values: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        """Call a rule or a reference, which have the parameters of the rule in its order."""
        if self._operands_lead:
            return function(*values, **attrs)
        keywords, rest, positional = dict(attrs), iter(values), list[Any]()
        operands = {operand.name: operand for operand in self.operands}
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional.extend(rest)
            elif parameter.name in operands:
                positional.append(list(rest) if operands[parameter.name].is_sequence else next(rest, None))
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append(keywords.pop(parameter.name, parameter.default))
        return function(*positional, **keywords)

    def _ask(
        self, call: Callable[..., Any], types: Sequence[Type | None], attrs: Mapping[str, Any], *of: Any
    ) -> Any:
        """Return what a call `of` something says to types and attributes; what it refuses, or trips over, is an InferError with the op's name."""
        try:
            self._check_kinds(types)
            return call(*of, types, attrs)
        except (InferError, DimError) as error:
            raise InferError(
                f"{self.name}: {error.what}", details=error.details, where=error.where, help=error.help
            ) from None
        except TraceError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise InferError(
                f"{self.name}: {error}",
                details=[f"{name}={value!r}" for name, value in attrs.items()],
                help="an argument is of a wrong kind",
            ) from error

    def _check_kinds(self, types: Sequence[Type | None]) -> None:
        operands = self.operands * len(types) if self.is_variadic else self.operands
        for operand, type in zip(operands, types, strict=False):
            if not isinstance(type, operand.kinds) and not (type is None and operand.is_optional):
                is_number = isinstance(type, ScalarType) and TensorType in operand.kinds
                raise InferError(
                    f"operand {operand.name!r} must be {operand.expects}, got {kind_name(type)}",
                    help="op.full([], number, dtype) makes a tensor of a number" if is_number else "",
                )

    def __repr__(self) -> str:
        return f"<op {self.name}>"


class Facts(TypedDict, total=False):
    """What a declaration may say of an op; `Op` tells what each means."""

    stricter: str
    writes: str
    view: View
    in_order: bool | str
    moves: bool
    rowwise: bool
    pointwise: bool
    scratch: bool
    holds: Callable[..., int]
    flops: Flops
    dtype_policy: DtypePolicy
    collective: bool


def _facts(op: Op) -> list[object]:
    """What a declaration says besides functions."""
    return [op.is_pure, *(getattr(op, f) for f in Facts.__annotations__ if f not in ("holds", "flops"))]


def op(
    *,
    name: str | None = None,
    doc: str | None = None,
    is_pure: bool = True,
    normalize: Callable[..., dict[str, Any]] | None = None,
    reference: Callable[..., Any] | None = None,
    **facts: Unpack[Facts],
) -> Callable[[Callable[..., Type]], Op]:
    """Declare an op from its type rule and register it under the rule's name (a trailing underscore is part of it), with its docstring.

    The facts are those of `Op`. Functions that are there already are given, others declared below the rule (`Op.reference`, `Op.normalize`). To declare it again in the same words is to declare it once. Raises InferError for another op of that name.
    """

    def declare(rule: Callable[..., Type]) -> Op:
        signature, operands, attributes = inspect.signature(rule), [], {}
        for parameter in signature.parameters.values():
            annotation = annotation_of(parameter)
            if "Type" in annotation:
                operands.append(operand_of(parameter, annotation))
            else:
                attributes[parameter.name] = parameter.default
        op_name = name or rule.__name__
        assert len(operands) == 1 or not any(o.is_sequence for o in operands), (
            f"{op_name}: a sequence stands alone"
        )
        text = inspect.getdoc(rule) or "" if doc is None else doc
        declared = Op(op_name, rule, is_pure, tuple(operands), attributes, text, signature, **facts)
        assert declared.writes in ("", *(o.name for o in operands)), f"no operand is {declared.writes}"
        known = OPS.setdefault(op_name, declared)
        if known is not declared:
            functions = ((each.infer, each.flops, each.holds) for each in (known, declared))
            if _facts(known) != _facts(declared) or not same_code(*functions):
                raise _taken(f"there is another op {op_name!r} already", known.infer, rule)
            # A file that is run again declares it anew, over names of its own.
            known.infer, known.flops, known.holds = rule, declared.flops, declared.holds
        if normalize is not None:
            known.normalize(normalize)
        if reference is not None:
            known.reference(reference)
        return known

    return declare


def alike(rule: Callable[..., Type], **shared: Unpack[Facts]) -> Callable[..., Op]:
    """Return what declares an op of this type rule by its name, its documentation, its reference, and facts besides those that all of them share."""

    def declare(name: str, doc: str, reference: Callable[..., Any], **facts: Unpack[Facts]) -> Op:
        every: Facts = {**shared, **facts}
        return op(name=name, doc=doc, reference=reference, **every)(rule)

    return declare


def _taken(what: str, known: Callable[..., Any], function: Callable[..., Any]) -> InferError:
    where = [f"declared at {place_of(known)}", f"and, otherwise, at {place_of(function)}"]
    return InferError(what, details=where, help="choose another name, or start the process again")


def _is_default(value: object, default: object) -> bool:
    return value is default or (
        type(value) is type(default) and isinstance(value, bool | int | float | str) and value == default
    )
