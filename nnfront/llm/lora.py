# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA) in PEFT's layout, merged: a weight W becomes the formula W + scale * (B @ A).

before:
    def main(x: input float32[n, 4], q.weight: weight float32[6, 4]) {
        y: float32[n, 6] = linear(x, q.weight)
after, with an adapter of rank 2:
    def main(x: ..., q.weight: weight float32[6, 4], lora0....lora_A.weight: weight float32[2, 4], lora0....lora_B.weight: weight float32[6, 2]) {
        matmul: float32[6, 4] = matmul(lora0....lora_B.weight, lora0....lora_A.weight)
        multiply: float32[6, 4] = multiply(matmul, 2.0)
        add: float32[6, 4] = add(q.weight, multiply)
        y: float32[n, 6] = linear(x, add)

So adapters are checked by types, lifted, quantised and streamed like all that a model's author derives. It is added up in float32 and rounded once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from nnfront import dtypes, ops
from nnfront.errors import LoadError
from nnfront.files import Folder, shown, shown_text
from nnfront.ir import FunctionBuilder, IRModule, Scalar, TensorType, Var
from nnfront.llm.lora_config import MOST, LoraConfig, read_lora_config
from nnfront.ops.encoded import cast
from nnfront.quantized import Formula, Takes, derive_weights
from nnfront.weights import Checkpoint
from nnfront.weights.name_hints import shortened

WEIGHTS = "adapter_model.safetensors"
_ROOT = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<side>[AB])\.(?P<kind>weight|bias)|lora_embedding_(?P<row>[AB])|(?P<size>lora_magnitude_vector)(?:\.weight)?)"
)

NO_SPLIT: Mapping[str, str] = {}

Loras: TypeAlias = Sequence[str | Path | tuple[str | Path, float]]
"""Folders of adapters, each with its weight, if that is not 1: `DIR`, `"DIR=0.5"` or `(DIR, 0.5)`."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder with an adapter, opened. `prefix` is what its tensors' names begin with beside those of the base."""

    path: Path
    prefix: str
    factor: float
    config: LoraConfig
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Product:
    """One adapter's low-rank change of a weight; names are the adapter's. A bias changes by `b` alone."""

    scale: float
    b: str
    a: str | None = None
    is_transposed: bool = False
    magnitude: str | None = None


@dataclass(slots=True)
class Change:
    """What becomes of one weight: another tensor in its place, and what is added."""

    replaced: str | None = None
    products: list[Product] = field(default_factory=list)


def open_adapters(loras: Loras, first: int = 0) -> tuple[Adapter, ...]:
    """Open adapters, number them from `first` on, and read their headers. Raises LoadError for what is no folder of one, or says what is not read."""
    if isinstance(loras, str | Path):
        raise LoadError(f"lora is {str(loras)!r}, expected a list of folders", help="write lora=[DIR]")
    return tuple(_open(i, *_weighted(each)) for i, each in enumerate(loras, first))


def _weighted(given: str | Path | tuple[str | Path, float]) -> tuple[Path, float]:
    """The folder and the weight of an adapter."""
    path, factor = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if isinstance(given, str) and (found := re.fullmatch(r"(.+)=([^=/]*)", given)):
        try:
            path, factor = found[1], float(found[2])
        except ValueError:
            pass  # the folder's name has a = in it
    if not isinstance(path, str | Path) or not isinstance(factor, int | float):
        raise LoadError(f"an adapter is {shown(given)}, expected a folder, or a folder and its weight")
    if not abs(factor) < MOST:
        raise LoadError(
            f"the weight of the adapter {shown_text(str(path))} is {factor}, expected a finite number"
        )
    return Path(path), float(factor)


def _open(number: int, path: Path, factor: float) -> Adapter:
    folder = Folder(path)
    config = read_lora_config(folder)
    if not folder.has(WEIGHTS):
        raise LoadError(
            f"{path}: there is no {WEIGHTS}",
            help="save the adapter with safetensors: others may hold code and are not read",
        )
    return Adapter(path, f"lora{number}.", factor, config, Checkpoint(path / WEIGHTS, folder=folder))


def with_adapters(checkpoint: Checkpoint, adapters: Iterable[Adapter]) -> Checkpoint:
    """A checkpoint that holds the tensors of adapters, too."""
    for adapter in adapters:
        checkpoint = checkpoint.with_others(adapter.checkpoint, adapter.prefix)
    return checkpoint


def split_ties(ir: IRModule, adapters: Iterable[Adapter]) -> dict[str, str]:
    """The names that tied weights go by besides, each with the weight, where an adapter changes either of them."""
    changed = {
        (
            part["module"]
            if (part := _PART.fullmatch(inner))
            else inner.replace(".base_layer.", ".").rpartition(".")[0]
        )
        for adapter in adapters
        for name in adapter.checkpoint.infos
        for inner in (name.removeprefix(_ROOT),)
    }
    return {
        alias: weight
        for alias, weight in _ties(ir)
        if not changed.isdisjoint(each.rpartition(".")[0] for each in (alias, weight))
    }


def _ties(ir: IRModule) -> Iterable[tuple[str, str]]:
    """Weights of two modules that are one tensor, by both names; a name that differs in its beginning is of the same module."""
    pairs = ir.aliases.items()
    return [(alias, name) for alias, name in pairs if alias.split(".")[-2:-1] != name.split(".")[-2:-1]]


def merge_adapters(
    ir: IRModule, adapters: Sequence[Adapter], takes: Takes, split: Mapping[str, str] = NO_SPLIT
) -> IRModule:
    """Put formulas in the place of the weights that adapters change; the module is not lifted yet.

    `split` are weights that are tied in the checkpoint and not in the module, each with the name of the tensor that both are.
    Raises LoadError with all tensors of an adapter that fit no weight.
    """
    merging = Merging(ir, split)
    for adapter in adapters:
        merging.add(adapter)
    module = derive_weights(ir, merging.formulas(), takes)[0]
    ignored = (*module.attrs.get("ignored", ()), *merging.replaced)
    return IRModule(module.functions, {**module.attrs, "ignored": ignored})


class Merging:
    """Collects what adapters do to the weights of a module: `changes`, by their names."""

    def __init__(self, ir: IRModule, split: Mapping[str, str]) -> None:
        self.ir, self.split = ir, split
        found = {p.name: p.type for f in ir.methods for p in f.weights}
        self.types = {name: type for name, type in found.items() if isinstance(type, TensorType)}
        self.changes = {name: Change() for pair in split.items() for name in pair}
        self.stored: dict[str, TensorType] = {}
        self.problems: list[tuple[str, str]] = []

    def add(self, adapter: Adapter) -> None:
        """Take an adapter's tensors one by one. Raises LoadError for those that fit nothing."""
        self.problems = []
        infos = adapter.checkpoint.infos
        modules: dict[str, dict[str, str]] = {}
        for name in infos:
            inner = name.removeprefix(_ROOT)
            part = _PART.fullmatch(inner) if inner != name else None
            if inner == name:
                self.problem(name, f"its name does not begin with {_ROOT}")
            elif part is None:
                self.replace(adapter, name, inner.replace(".base_layer.", "."))
            else:
                kind = part["kind"] if part["side"] else "row" if part["row"] else "weight"
                role = "size" if part["size"] else f"{part['side'] or part['row']} {kind}"
                modules.setdefault(part["module"], {})[role] = name
        for module, parts in modules.items():
            self.product(adapter, module, parts)
        kept = {name.removeprefix(_ROOT) for name in infos}
        for module in adapter.config.replaced:
            if not any(f".{module}." in f".{name}" for name in kept):
                self.problem(module, "modules_to_save names it, and no tensor of it is there")
        if not infos:
            self.problem(WEIGHTS, "it holds no tensor")
        if self.problems:
            base = adapter.config.base
            raise LoadError(
                f"{adapter.path}: the adapter does not fit the model",
                details=shortened(self.problems),
                help=f"it was trained on {shown(base)}: load it with that"
                if base
                else "load it with the model that it was trained on",
            )

    def problem(self, name: str, text: str) -> None:
        self.problems.append((name, f"{shown_text(repr(name))}: {text}"))

    def weight(self, name: str, path: str) -> str | None:
        """The model's name of a weight that a tensor changes; None, and a problem, if there is none."""
        weight = self.ir.aliases.get(path, path)
        if weight not in self.types:
            near = difflib.get_close_matches(path, [*self.types, *self.ir.aliases], 1)
            self.problem(name, f"the model has no {path!r}{f'; nearest: {near[0]!r}' if near else ''}")
            return None
        tied = [alias for alias, name in _ties(self.ir) if name == weight]
        if tied:
            self.problem(
                name, f"{weight!r} and {tied[0]!r} are one tensor here, and the adapter changes one of them"
            )
            return None
        return weight

    def type(self, adapter: Adapter, name: str, shape: Sequence[object], expected: str = "") -> str | None:
        """A tensor's name beside those of the base; None, and a problem, if it is not of a shape."""
        info = adapter.checkpoint.info(name)
        if info.shape != tuple(shape) or info.dtype not in dtypes.COMPUTED:
            self.problem(name, f"it is {info}, expected floats [{', '.join(map(str, shape))}]{expected}")
            return None
        self.stored[adapter.prefix + name] = TensorType(info.shape, info.dtype)
        return adapter.prefix + name

    def replace(self, adapter: Adapter, name: str, path: str) -> None:
        """A tensor that stands in the place of a weight."""
        weight = self.weight(name, path)
        found = None if weight is None else self.type(adapter, name, self.types[weight].shape)
        if weight is None or found is None:
            return
        change = self.changes.setdefault(weight, Change())
        if adapter.factor != 1:
            self.problem(name, f"it takes the place of {weight!r}, so the adapter's weight can be 1 only")
        if change.replaced is not None or change.products:
            self.problem(name, f"it takes the place of {weight!r}, which another adapter changes, too")
        change.replaced = found

    def product(self, adapter: Adapter, module: str, parts: Mapping[str, str]) -> None:
        """The low-rank product of one module."""
        any_name = next(iter(parts.values()))
        scale = adapter.config.scale_of(module) * adapter.factor
        is_rows = "A row" in parts or "B row" in parts
        a, b = (parts.get(f"{side} {'row' if is_rows else 'weight'}") for side in "AB")
        rest = (
            set(parts)
            - {"A row", "B row", "A weight", "B weight", "B bias"}
            - ({"size"} if not is_rows else set())
        )
        if a is None or b is None or rest:
            self.problem(any_name, "a module's product has two matrices, A and B")
            return
        weight = self.weight(b, f"{module}.weight")
        if weight is None:
            return
        shape = self.types[weight].shape
        rank, info = adapter.config.rank_of(module), adapter.checkpoint.info
        if len(shape) != 2:
            self.problem(b, f"{weight!r} has {len(shape)} axes, expected 2")
            return
        has_transposed_sizes = (info(b).shape[:1], info(a).shape[1:]) == (shape[1:], shape[:1])
        is_transposed = is_rows or (
            has_transposed_sizes and (shape[0] != shape[1] or adapter.config.is_transposed)
        )
        outputs, inputs = reversed(shape) if is_transposed else shape
        why = f", for {weight!r} and a rank of {rank}"
        found_b = self.type(adapter, b, (outputs, rank), why)
        found_a = self.type(adapter, a, (rank, inputs), why)
        size = None
        if adapter.config.has_magnitudes != ("size" in parts):
            self.problem(b, "use_dora and its vector of magnitudes belong together")
        elif "size" in parts:
            size = self.type(adapter, parts["size"], (outputs,))
            if self.changes.get(weight, Change()).products or adapter.factor != 1:
                self.problem(b, "with use_dora an adapter is alone with its weight, and counts in full")
        if found_a is None or found_b is None:
            return
        change = self.changes.setdefault(weight, Change())
        if any(each.magnitude for each in change.products):
            self.problem(b, "with use_dora an adapter is alone with its weight, and counts in full")
        change.products.append(Product(scale, found_b, found_a, is_transposed, size))
        if "B bias" in parts:
            name = parts["B bias"]
            bias = self.weight(name, f"{module}.bias")
            found = None if bias is None else self.type(adapter, name, self.types[bias].shape)
            if bias is not None and found is not None:
                self.changes.setdefault(bias, Change()).products.append(Product(scale, found))

    @property
    def replaced(self) -> tuple[str, ...]:
        """The weights of the base that nobody reads any more."""
        return (*self.split, *(name for name, change in self.changes.items() if change.replaced is not None))

    def formulas(self) -> dict[str, Formula]:
        return {name: self.formula(name, change) for name, change in self.changes.items()}

    def formula(self, weight: str, change: Change) -> Formula:
        if change.replaced is None:
            base = {self.split.get(weight, weight): self.types[weight]}
        else:
            base = {change.replaced: self.stored[change.replaced]}
        read = [
            name for each in change.products for name in (each.b, each.a, each.magnitude) if name is not None
        ]
        sources = {**base, **{name: self.stored[name] for name in read}}

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Var:
            values = dict(zip(sources, found, strict=True))
            if not change.products:
                return found[0]
            total = cast(b, found[0], "float32")
            for product in change.products:
                total = _changed(b, total, product, values)
            return total

        return Formula("LoRA", sources, make, is_plain=True)


def _changed(b: FunctionBuilder, weight: Var, product: Product, values: Mapping[str, Var]) -> Var:
    """Emit a weight with one adapter's change, in float32."""
    change = cast(b, values[product.b], "float32")
    if product.a is not None:
        change = b.call(ops.matmul, change, cast(b, values[product.a], "float32"))
    if product.is_transposed:
        change = b.call(ops.permute_dims, change, axes=(1, 0))
    new = b.call(ops.add, weight, b.call(ops.multiply, change, Scalar(product.scale)))
    if product.magnitude is None:
        return new
    inputs = 0 if product.is_transposed else 1
    size = b.call(ops.sqrt, b.call(ops.sum, b.call(ops.square, new), axis=inputs, keepdims=True))
    assert isinstance(size.type, TensorType)
    wanted = b.call(ops.reshape, cast(b, values[product.magnitude], "float32"), shape=size.type.shape)
    return b.call(ops.multiply, new, b.call(ops.divide, wanted, size))
