# SPDX-License-Identifier: Apache-2.0
"""`Module` with TVM's `export_tvm`, where `n == 1` of a dim that may be 1 is answered as TVM does and held as a fact; and what else modules are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn, Self, TypeAlias, TypeVar

from nnfront.compat.tvm.absent import refuse
from nnfront.compat.tvm.sizes import listed_shapes
from nnfront.dims import Dim, Symbol, assuming_unequal, with_facts
from nnfront.ir import IRModule
from nnfront.nn import spec as specs
from nnfront.nn.containers import ModuleDict, ModuleList, ParameterDict, ParameterList
from nnfront.nn.effect import Effect
from nnfront.nn.module import Module as OurModule
from nnfront.nn.mutator import Mutator
from nnfront.nn.opaque import Object
from nnfront.nn.parameter import Parameter, get_default_dtype, set_default_dtype
from nnfront.nn.tensor import Tensor

__all__ = [
    "Effect",
    "IntExpr",
    "Module",
    "ModuleDict",
    "ModuleList",
    "Mutator",
    "Object",
    "Parameter",
    "ParameterDict",
    "ParameterList",
    "SubroutineMixin",
    "Tensor",
    "get_default_dtype",
    "set_default_dtype",
    "wrap_nested",
]

IntExpr: TypeAlias = int | Dim
Nested = TypeVar("Nested")


class SubroutineMixin:
    """TVM's switch for subroutines: here layers that are alike always share one."""

    define_subroutine: bool = False


class _Modules(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        """Every module of nnfront is a `Module`, so that its layers are, too."""
        return isinstance(instance, OurModule) if cls is Module else super().__instancecheck__(instance)


class Module(OurModule, SubroutineMixin, metaclass=_Modules):
    """nnfront's Module with TVM's `export_tvm`, and its answer where a method asks whether a dim is 0 or 1."""

    def export_tvm(self, spec: Any, debug: bool = False, allow_extern: bool = False) -> tuple[Any, ...]:
        """Return (IR, [(name, parameter)]), and with `allow_extern` an empty list of external modules."""
        exported = self.export(spec), list(self.named_parameters())
        return (*exported, []) if allow_extern else exported

    def export(self, spec: Mapping[str, Any] | specs.ModuleSpec, *, share_layers: bool = True) -> IRModule:
        """Trace the methods named in `spec`.

        Where a method compares a dim `n` with 0 or 1 (or with the greatest value it may have) by `==`, the answer is no as in TVM, and
        the IR says what that needs: `n` is greater (less), in all methods, and a call that breaks it is an error. Other
        comparisons that the facts do not decide raise DimError.
        """
        read = specs.ModuleSpec.from_raw(spec, self)
        with assuming_unequal() as assumed, listed_shapes():
            traced = super().export(read, share_layers=share_layers)
        if not assumed:
            return traced
        methods = {
            name: replace(method, arguments={n: _narrowed(s, assumed) for n, s in method.arguments.items()})
            for name, method in read.methods.items()
        }
        with listed_shapes():
            return super().export(specs.ModuleSpec(methods), share_layers=share_layers)

    def to(self, dtype: str | None = None) -> Self:
        """Change the dtype of every float parameter, then let inner modules that have a `to` of their own do as they do."""
        super().to(dtype)
        for module in _with_own_conversion(self):
            module.to(dtype)
        return self

    def jit(self, *args: Any, **kwargs: Any) -> NoReturn:
        """TVM's compilation in place. Raises WrongUse: compile what `export` returns."""
        refuse(
            "Module.jit",
            "a module is not compiled in place",
            "nnfront.compile(module.export(spec)).load(weights) is a session; module(x) runs at once with torch tensors",
        )


def _with_own_conversion(module: OurModule) -> Iterator[OurModule]:
    """The nearest modules inside that convert themselves."""
    for child in module.children():
        if type(child).to is not OurModule.to:
            yield child
        else:
            yield from _with_own_conversion(child)


def _narrowed(spec: Any, facts: Mapping[Symbol, Symbol]) -> Any:
    """The spec of an argument whose dims have these facts; caches keep theirs, which the tensors beside them share."""
    match spec:
        case specs.Tensor():
            return specs.Tensor([with_facts(size, facts) for size in spec.shape], spec.dtype)
        case specs.Tuple():
            return specs.Tuple(spec.name, [_narrowed(e, facts) for e in spec.elements])
        case _:
            return spec


def wrap_nested(expr: Nested, name: str) -> Nested:
    """Return what an op made, which needs no wrapping here. Raises WrongUse for an expression of TVM's."""
    parts = expr if isinstance(expr, (list, tuple)) else [expr]
    if not all(isinstance(part, (Tensor, Object)) for part in parts):
        refuse(
            "wrap_nested",
            f"{name!r} is a {type(expr).__name__}, not a result of an op",
            "write it with ops, or as op.extern(name, args, out)",
        )
    return expr
