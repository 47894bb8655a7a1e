# SPDX-License-Identifier: Apache-2.0
"""The ops as functions of tensors: this is `nnfront.op`.

Each op's function is made from its declaration, under its name and with its signature: operands are tensors (where the
declaration says so, numbers too), all else are attributes. What is not an op of its own is written out below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from nnfront import ops
from nnfront.errors import InferError, TraceError, UnknownName, WrongCall
from nnfront.ir import OPS, Op
from nnfront.nn import elsewhere
from nnfront.nn.eager import eager
from nnfront.nn.elsewhere import signature_text
from nnfront.nn.loop import scan
from nnfront.nn.mode import active_mode, outside_place
from nnfront.nn.opaque import Object
from nnfront.nn.source_location import user_place
from nnfront.nn.tensor import Tensor, apply
from nnfront.ops.rules import dtype_name


class _HelpText:
    """The `__doc__` of an op's function, made of the op's declaration when it is asked for."""

    def __get__(self, function: OpFunction | None, owner: type) -> str:
        if function is None:
            return "One op as a function. Torch tensors alone give torch tensors; with a Tensor among the operands, Tensors."
        from nnfront.nn.op_reference import help_text

        return help_text(function.op)


class OpFunction:
    __doc__ = _HelpText()
    compared_by_identity = True

    def __init__(self, op: Op) -> None:
        self.op = op
        self.__name__ = self.__qualname__ = op.name
        self.__signature__ = op.signature
        self._names = tuple(op.signature.parameters)
        self._operands = tuple(o.name for o in op.operands)
        self._defaults = {
            p.name: None if p.name in self._operands else p.default
            for p in op.signature.parameters.values()
            if p.default is not inspect.Parameter.empty
        }
        self._takes_many = any(p.kind is p.VAR_POSITIONAL for p in op.signature.parameters.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._bind(args, kwargs)
        operands: tuple[Any, ...]
        if self.op.is_variadic:
            operands = self._listed(given.pop(self._operands[0]))
        else:
            operands = tuple([given.pop(name) for name in self._operands])
        for name, attr in given.items():
            if isinstance(attr, torch.dtype):
                given[name] = dtype_name(attr)
        if active_mode.get() is None and _are_torch(operands):
            return eager(lambda *tensors: apply(self.op, tensors, given), *operands)
        return apply(self.op, operands, given)

    def _listed(self, operands: Any) -> tuple[Any, ...]:
        if isinstance(operands, (Tensor, torch.Tensor)) or not isinstance(operands, Iterable):
            raise InferError(
                f"{self.op.name}: {self._operands[0]!r} must be a list, got {operands!r}",
                where=outside_place(),
                help="put them into a list, as in [a, b]",
            )
        return tuple(operands)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return every parameter by name, defaults filled in. Raises InferError for a call that does not fit the signature."""
        if self._takes_many or len(args) > len(self._names):
            return self._bound(args, kwargs)
        given = {**self._defaults, **dict(zip(self._names, args, strict=False)), **kwargs}
        if len(given) != len(self._names) or (kwargs and not kwargs.keys() <= {*self._names[len(args) :]}):
            return self._bound(args, kwargs)  # which says what is missing, unknown or given twice
        return given

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Bind as Python does, which is slow, and say what does not fit."""
        try:
            bound = self.op.signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((name for name in kwargs if name not in self._names), None)
            help = "several sizes or axes are one tuple" if len(args) > len(self._names) else ""
            raise WrongCall(
                f"{self.op.name}: {error if unknown is None else f'there is no argument {unknown!r}'}",
                details=[f"signature: op.{self.op.name}{signature_text(self.op.name)}"],
                where=outside_place(),
                help=help if unknown is None else elsewhere.argument(unknown, self._names),
            ) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def __repr__(self) -> str:
        return f"<function op.{self.op.name}>"


def _are_torch(operands: tuple[Any, ...]) -> bool:
    """Whether these are torch tensors, with numbers among them at most."""
    return any(isinstance(x, torch.Tensor) for x in operands) and all(
        x is None or isinstance(x, (torch.Tensor, bool, int, float)) for x in operands
    )


def astype(x: Any, dtype: Any) -> Any:
    """Cast `x` to `dtype`; `x` itself if that is its dtype."""
    return x.astype(dtype) if isinstance(x, Tensor) else OpFunction(ops.astype)(x, dtype)


def cond(pred: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return `then()` where `pred` is true, else `otherwise()`; both branches stay in the IR and one of them runs.

    pred: a bool tensor without axes, or a bool, which decides at once. The branches take no arguments: they use what is around
    them. They return values of one structure, whose types agree up to dims. Caches written in one branch come out of both.
    Raises TraceError if the structures or types differ.
    """
    for name, branch in (("then", then), ("otherwise", otherwise)):
        _check_branch(name, branch)
    if isinstance(pred, bool):
        return then() if pred else otherwise()
    mode = active_mode.get()
    if mode is None:
        raise TraceError(
            "op.cond is used outside a method", where=user_place(), help="a derived tensor has no branches"
        )
    return mode.cond(pred, then, otherwise)


def _check_branch(name: str, branch: Any) -> None:
    wrong = "" if callable(branch) else "is not a function"
    if not wrong:
        try:
            inspect.signature(branch).bind()
        except TypeError:
            wrong = "wants arguments"
        except ValueError:  # of a builtin nothing is known
            pass
    if wrong:
        raise TraceError(
            f"op.cond: the branch {name!r} {wrong}",
            details=[f"got {branch!r}"],
            where=outside_place(),
            help="write lambda: ...; a branch takes no arguments and uses what is around it",
        )


def cache_read(cache: Any, name: str) -> Any:
    """What a layer of a cache keeps of each sequence under a name: [batch, *shape]; None where there is no cache."""
    return None if cache is None else OpFunction(ops.cache_read)(cache, name)


def cache_write(cache: Any, name: str, value: Any, seq: Any) -> None:
    """Keep `value` [batch, *shape] under a name, as it is after `seq` more tokens of each sequence; nothing where there is no cache."""
    if cache is not None:
        OpFunction(ops.cache_write)(cache, value, name, seq)


def cache_append(cache: Any, keys: Any, values: Any = None) -> None:
    """Store keys, and values, of more tokens [batch, seq, heads, size] in a layer of a cache, and attend to nothing; nothing where there is no cache."""
    if cache is not None:
        OpFunction(ops.cache_append)(cache, keys, values)


def extern(name: str, args: Sequence[Any], out: Any) -> Any:
    """Call the external function `name` and return what `out` describes.

    args: tensors, objects, dims and numbers. out: a `Tensor.placeholder`, a class derived from `nn.Object`, or a list or tuple of
    these. The function is registered with `nnfront.register_extern(name, function)` in the process that runs the method.
    """
    kinds = list(out) if isinstance(out, (list, tuple)) else [out]
    types = [kind.object_type() if _is_object(kind) else kind for kind in kinds]
    made = OpFunction(ops.extern)(name, args, tuple(types) if isinstance(out, (list, tuple)) else types[0])
    results = list(made) if isinstance(out, (list, tuple)) else [made]
    for i, kind in enumerate(kinds):
        if isinstance(kind, type) and issubclass(kind, Object) and isinstance(results[i], Object):
            results[i] = kind.traced(results[i].content)
    return type(out)(results) if isinstance(out, (list, tuple)) else results[0]


def _is_object(kind: Any) -> bool:
    return isinstance(kind, Object) or (isinstance(kind, type) and issubclass(kind, Object))


def split_heads(x: Any, head_size: int) -> Any:
    """[..., heads * head_size] to [..., heads, head_size]."""
    return op.reshape(x, (*x.shape[:-1], x.shape[-1] // head_size, head_size))


def merge_heads(x: Any) -> Any:
    """[..., heads, head_size] to [..., heads * head_size]."""
    return op.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def positions(tokens: Any, cache: Any) -> Any:
    """The positions of tokens [batch, seq], counted from 0: int64 [batch, seq] after those in a cache, [1, seq] without one."""
    layer, seq = cache[0], tokens.shape[1]
    return (
        op.reshape(op.arange(seq, dtype="int64"), (1, seq))
        if layer is None
        else op.cache_positions(layer, seq)
    )


class Vocabulary:
    """`nnfront.op`. A namespace of its own, so that no op's name can stand for anything that this file uses."""

    # Names under which TVM or torch have an op that is called otherwise here.
    _aliases: ClassVar = {"permute": "permute_dims", "pow": "power"}
    _written_out: ClassVar = {
        function.__name__: function
        for function in (
            astype,
            cache_append,
            cache_read,
            cache_write,
            cond,
            extern,
            merge_heads,
            positions,
            scan,
            split_heads,
        )
    }

    def __init__(self) -> None:
        vars(self).update(self._written_out)

    def __getattr__(self, name: str) -> Any:
        declared = OPS.get(self._aliases.get(name, name))
        if declared is None:
            raise UnknownName(
                f"nnfront.op has no function {name!r}", where=outside_place(), help=elsewhere.how(name)
            )
        function = vars(self)[name] = OpFunction(declared)
        return function

    def __dir__(self) -> list[str]:
        return sorted({*OPS, *self._aliases, *self._written_out})

    def __repr__(self) -> str:
        return "<nnfront.op>"


op = Vocabulary()
