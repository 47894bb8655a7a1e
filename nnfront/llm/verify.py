# SPDX-License-Identifier: Apache-2.0
"""A model file against transformers: both run the same folder on the same tokens, and are compared after every module that both have.

Module paths are checkpoint names, so they are the same on both sides. The fault is sought from the inside out: a module is at
fault if what it was given agrees and what it gives does not; one that was given something else says that the fault is in the module around it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError
from nnfront.llm.comparison import Call, Comparison, Tensors, tensors_in
from nnfront.llm.dequantised import run_dequantised, stored_weights
from nnfront.llm.hf_folder import compile_folder, computing_in, open_folder
from nnfront.llm.model_files import read_folder
from nnfront.nn.eager import Eager, run_in
from nnfront.nn.module import Module
from nnfront.nn.parameter import Parameter
from nnfront.nn.projections import Fused
from nnfront.nn.tensor import Formula, Tensor

TOLERANCE = 1e-4
"""The largest difference in float32, as a share of the largest number of a tensor: sums in another order stay far below it."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The innermost module that is given what transformers' is given, and gives something else.

    kind: "weights" if it is what the weight transform makes of them, "computation" otherwise. `formulas` are those of the
    derived weights that the module reads, with the line of each.
    """

    path: str
    kind: str
    difference: float
    where: str
    formulas: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"first divergence: {self.path or 'the model'} ({self.kind}), {self.difference:.1e} of the largest",
            *self.details,
        ]
        lines += [f"where: {self.where}"] * bool(self.where)
        return "\n  ".join([*lines, *(f"formula: {formula}" for formula in self.formulas)])


@dataclass(frozen=True, slots=True)
class Verification:
    """`compared`: the modules that both sides have; `eager`, `compiled`: how far the `result` differs, run in either way; `fault`: None if all agrees.

    `stored`: of quantised weights which are kept as they are, and who has dequantised them for transformers.
    """

    compared: tuple[str, ...]
    result: str
    eager: float
    compiled: float
    fault: Fault | None
    stored: str = ""

    def __str__(self) -> str:
        head = f"{self.stored}\n" * bool(self.stored) + (
            f"{len(self.compared)} modules compared; {self.result.replace('last_hidden_state', 'hidden states')} differ by {self.eager:.1e} (op by op) and"
            f" {self.compiled:.1e} (compiled) of the largest"
        )
        return head + f"\n{self.fault or 'equal to transformers'}\n"


def verify(
    path: str | Path,
    model_file: str | Path | None = None,
    tokens: Sequence[int] | None = None,
    *,
    ignored: Sequence[str] = (),
    device: str = "cpu",
) -> Verification:
    """Compare a folder's model with transformers' in float32, on `tokens` or some that differ.

    Of quantised weights transformers is given what they stand for; op by op the model file computes with that too, and compiled with those that products read as they are stored.
    Compared are the logits of a text; of an encoder what each token has become, of an encoder-decoder the logits of a text about a source.
    Raises LoadError without transformers, for a folder that either of them cannot load, for a model that gives none of these, and for weights that the model file does not take.
    """
    folder = open_folder(path)
    architecture, config, hf_config = read_folder(folder, model_file)
    config = computing_in("float32", config)
    compiled = compile_folder(path, device, "float32", model_file)
    module = compiled.executable.source
    compared = Comparison.of(module, config, tokens)
    if compared is None:
        raise LoadError(
            f"{path} holds a model of which nothing is compared",
            details=[f"methods are {', '.join(repr(method.name) for method in module.methods)}"],
            help="`logits`, or `hidden` of an encoder, is what transformers' model gives as well",
        )
    model: Any = architecture.file.build(config)
    weights = stored_weights(compiled, architecture, config, hf_config, ignored)
    state = {name: weights.tensor(name) for name, _ in model.named_parameters() if name in weights}
    if compiled.stored is None:
        theirs, stored = compared.run_theirs(Path(path)), ""
    else:
        theirs, reference = run_dequantised(compared, compiled.checkpoint.files, state, hf_config)
        stored = f"{compiled.stored}; {reference}"
    model.load_state_dict(state, strict=False)
    watch, method = _Watch(model), getattr(model, compared.method)
    result: torch.Tensor = run_in(watch, method, compared.arguments, {})
    session = compiled.executable.load(compiled.checkpoint, ignored=ignored, cast=True)
    made: torch.Tensor = session[compared.method](*(x.to(session.device) for x in compared.arguments)).cpu()
    both = [call for call in watch.calls if call[0] in theirs.calls]
    eager, fast = _difference(result, theirs.result), _difference(made, theirs.result)
    fault = None
    if eager > TOLERANCE:
        fault = _find(model, both, theirs.calls, watch, theirs.classes) or Fault(
            "", "computation", eager, _line_of(method)
        )
    elif fast > TOLERANCE:
        fault = _of_the_transform(model, session.weights, fast)
    return Verification(
        tuple(dict.fromkeys(path for path, _ in both)), compared.result, eager, fast, fault, stored
    )


class _Watch(Eager):
    """Notes what each module is given and gives, inner ones before outer ones, and the results of the ops in each."""

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.calls: list[tuple[str, Call]] = []
        self.products: dict[str, list[torch.Tensor]] = {}
        self.parts, self.reordered = _parts(model)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._inside: list[str] = [""]

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, and note it. A fused product is a call of each of its parts."""
        path = self._paths.get(id(module), self._inside[-1])
        self._inside.append(path)
        result = super().call(module, args, kwargs)
        self._inside.pop()
        given = self._values((*args, *kwargs.values()))
        if isinstance(module, Fused):
            for part, gave in zip(self.parts[path], self._values(result), strict=True):
                if part not in self.reordered:
                    self.calls.append((part, Call(given, (gave,))))
        else:
            self.calls.append((path, Call(given, self._values(result))))
        return result

    def apply(self, op: Any, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
        """Run an op, and note what it gives if it is a product."""
        result = super().apply(op, args, attrs)
        if op.name in ("linear", "matmul"):
            self.products.setdefault(self._inside[-1], []).extend(self._values(result))
        return result

    def _values(self, tree: Any) -> Tensors:
        return tuple(map(self._evaluate, tensors_in(tree, Tensor)))


def _parts(model: Module) -> tuple[dict[str, list[str]], set[str]]:
    """The linear layers of each fused product, by its path: those whose weights its formula reads. And which of them have their outputs in another order there."""
    names = {id(p): name for name, p in model.named_parameters()}
    found, reordered = {}, set()
    for path, module in model.named_modules():
        if isinstance(module, Fused):
            assert isinstance(module.weight.content, Formula)
            read = [arg for arg in module.weight.content.call.args if isinstance(arg, Tensor)]
            found[path] = [names[id(_parameter(arg))].rpartition(".")[0] for arg in read]
            reordered |= {
                name for name, arg in zip(found[path], read, strict=True) if isinstance(arg.content, Formula)
            }
    return found, reordered


def _parameter(value: Tensor) -> Tensor:
    """What a formula is first of all made of."""
    while isinstance(value.content, Formula):
        value = next(arg for arg in _flat(value.content.call.args) if isinstance(arg, Tensor))
    return value


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for arg in args:
        yield from _flat(arg) if isinstance(arg, tuple | list) else (arg,)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, as a share of the largest number."""
    difference = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp_min(1e-30)
    return float("inf") if torch.isnan(difference) else float(difference)


def _apart(ours: Tensors, theirs: Tensors) -> float:
    """How far the first tensor is from the one of theirs that is nearest; 0 where none has its size, so that nothing can be said."""
    found = []
    for other in theirs if ours else ():
        mine = ours[0]
        if mine.shape[-1] * 2 == other.shape[-1] and mine.numel() * 2 == other.numel():
            other = other[..., : mine.shape[-1]]  # tables of angles, of which transformers has each twice
        if mine.is_floating_point() and mine.numel() == other.numel() and mine.shape[-1:] == other.shape[-1:]:
            found.append(_difference(mine, other.reshape(mine.shape)))
    return min(found, default=0.0)


def _find(
    model: Module,
    calls: Sequence[tuple[str, Call]],
    theirs: Mapping[str, Call],
    watch: _Watch,
    classes: Mapping[str, str],
) -> Fault | None:
    """The first module whose result diverges, and that of all modules around it; else the module around it."""
    apart = {path: _apart(call.gave, theirs[path].gave) for path, call in reversed(calls)}
    modules = dict(model.named_modules())
    for path, _ in calls:
        around = [p for p in _around(path) if p in apart]
        if any(apart[p] <= TOLERANCE for p in (path, *around)):
            continue
        given = {p: c.given for p, c in reversed(calls) if p in (path, *around)}
        same = (
            p for p in (path, *around) if all(_apart((x,), theirs[p].given) <= TOLERANCE for x in given[p])
        )
        path = next(same, "")
        module = modules[path]
        lost = list(_lost_products(path, theirs, watch, classes))
        is_part = any(path in parts for parts in watch.parts.values())
        kind = "weights" if lost or is_part else "computation"
        owner = modules[path.rpartition(".")[0]] if is_part else module
        details = [f"no product gives what {name} gives" for name in lost]
        return Fault(
            path,
            kind,
            apart.get(path, 0.0),
            _line_of(type(owner).forward),
            tuple(_formulas(owner, model)),
            tuple(details),
        )
    return None


def _around(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def _lost_products(
    path: str, theirs: Mapping[str, Call], watch: _Watch, classes: Mapping[str, str]
) -> Iterator[str]:
    """Linear layers of transformers' module whose result is no part of any product of ours, though both were given the same."""
    products = watch.products.get(path, [])
    for name, call in theirs.items():
        is_own = name.startswith(f"{path}.") and "." not in name.removeprefix(f"{path}.")
        if not (is_own and classes[name] == "Linear" and call.gave and products):
            continue
        if name in watch.reordered or any(name == ours for ours, _ in watch.calls):
            continue
        wanted = call.gave[0].reshape(-1, call.gave[0].shape[-1])
        if not any(_holds(product.reshape(-1, product.shape[-1]), wanted) for product in products):
            yield name


def _holds(product: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether some columns of a product that follow one another are the wanted ones."""
    if len(product) != len(wanted) or product.shape[1] < wanted.shape[1]:
        return False
    near = (
        product[0, : product.shape[1] - wanted.shape[1] + 1] - wanted[0, 0]
    ).abs() <= TOLERANCE * wanted.abs().max()
    return any(
        _difference(product[:, i : i + wanted.shape[1]], wanted) <= TOLERANCE
        for i in near.nonzero().flatten().tolist()
    )


def _line_of(function: Any) -> str:
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}"


def _formulas(module: Module, model: Module) -> Iterator[str]:
    """The derived weights of a module, and of the fused products in it, as an author writes them, each with its line."""
    names = {id(p): name for name, p in model.named_parameters()}
    for owner in (module, *(child for child in module.children() if isinstance(child, Fused))):
        for name, item in vars(owner).items():
            if isinstance(item, Tensor) and isinstance(item.content, Formula):
                yield f"{name} = {_text(item, names)} ({item.content.call.where})"


def _text(value: Any, names: Mapping[int, str]) -> str:
    if isinstance(value, Parameter):
        return names.get(id(value), "a parameter")
    if isinstance(value, Tensor):
        if not isinstance(value.content, Formula):
            return "a value"
        call, index = value.content.call, value.content.index
        args = [_text(arg, names) for arg in call.args if arg is not None]
        shown = [f"{key}={attr!r}" for key, attr in call.attrs.items() if attr is not None]
        return f"{call.op.name}({', '.join([*args, *shown])})" + ("" if index is None else f"[{index}]")
    return str(value)


def _of_the_transform(model: Module, weights: Mapping[str, Any], difference: float) -> Fault:
    """What the author's code computes is right op by op, so what was compiled of it is not: which transformed weights differ."""
    reference, different = Eager(), []
    for path, module in model.named_modules():
        for name, item in vars(module).items():
            key = f"{path}.{name}" if path else name
            if isinstance(item, Tensor) and isinstance(item.content, Formula) and key in weights:
                value, made = reference._evaluate(item), weights[key]
                if (
                    isinstance(made, torch.Tensor)
                    and made.shape == value.shape
                    and _difference(made.cpu(), value) > TOLERANCE
                ):
                    different.append(key)
    kind = "weights" if different else "computation"
    details = tuple(f"{key} is not what its formula gives op by op" for key in different)
    return Fault(
        different[0].rpartition(".")[0] if different else "",
        kind,
        difference,
        "",
        (),
        details or ("only what is compiled differs",),
    )
