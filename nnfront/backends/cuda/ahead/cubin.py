# SPDX-License-Identifier: Apache-2.0
"""A kernel as machine code, and all that it takes to launch it: what `nnfront_kernels.ahead` makes and an artefact holds.

In `kernels.json` a kernel is an object with these fields; its code is the file `kernels/KEY.cubin`.

    {"key": "1f0c...", "kernel": "matmul_kernel", "arch": "sm_90", "triton": "3.9.0", "cuda": "13.4",
     "threads": 256, "cluster": 1, "shared_bytes": 98304, "scratch_bytes": 0, "cooperative": false, "pdl": false,
     "parameters": [{"name": "x_ptr", "kind": "pointer"}, {"name": "M", "kind": "i32"},
                    {"name": "y_desc", "kind": "descriptor", "element": 9, "element_bytes": 2, "swizzle": 3, "box": [64, 64]}],
     "about": "matmul_kernel ... for sm_90\\nwarps 8 stages 3\\nx_ptr *bf16 % 16\\n..."}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from nnfront.errors import LoadError

KINDS = ("pointer", "i32", "i64", "f32", "descriptor")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How a kernel reads a tensor by descriptor: a CUtensorMapDataType, its bytes, how a box of elements is stored, and the box."""

    element: int
    element_bytes: int
    swizzle: int
    box: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A run-time argument of a kernel: one of KINDS, with a map if it is a descriptor."""

    name: str
    kind: str
    map: TensorMap | None = None

    def fields(self) -> dict[str, Any]:
        """Return it as in JSON."""
        described = {} if self.map is None else {**asdict(self.map), "box": list(self.map.box)}
        return {"name": self.name, "kind": self.kind, **described}


@dataclass(frozen=True, slots=True)
class Cubin:
    """A kernel for one GPU and one specialisation, which `key` is the hash of and `about` the text.

    `kernel` is its name in the machine code `image`; `triton` and `cuda` are the versions that made it. A block has `threads`
    threads, `cluster` blocks are launched together, and each gets `shared_bytes` of shared and `scratch_bytes` of global memory.
    `parameters` are in the order of the launch; behind them come two pointers, to scratch memory and one that is null.
    """

    key: str
    kernel: str
    arch: str
    triton: str
    cuda: str
    threads: int
    cluster: int
    shared_bytes: int
    scratch_bytes: int
    cooperative: bool
    pdl: bool
    parameters: tuple[Parameter, ...]
    about: str
    image: bytes

    @property
    def min_driver(self) -> int:
        """The oldest driver that takes it, as cuDriverGetVersion says it: the first of the same major version of CUDA.

        Source: CUDA Compatibility, "Minor Version Compatibility": what a toolkit 13.x compiles runs on every driver for 13.0 or
        newer (from 580), of 12.x from 12.0 (525), as long as it is machine code and no PTX.
        """
        return int(self.cuda.partition(".")[0]) * 1000

    def fields(self) -> dict[str, Any]:
        """Return all but the image, as in JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "image"}
        return {**plain, "parameters": [parameter.fields() for parameter in self.parameters]}


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """Kernels that were compiled ahead for a GPU, and `notes`: for a method that could not be gone through in full, why."""

    arch: str
    cubins: tuple[Cubin, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of machine code."""
        return sum(len(cubin.image) for cubin in self.cubins)

    def __str__(self) -> str:
        made = sorted({f"Triton {cubin.triton} and CUDA {cubin.cuda}" for cubin in self.cubins})
        lines = [
            f"{len(self.cubins)} kernels for {self.arch}, {self.size_bytes / 1e6:.2f} MB"
            + (f", compiled by {', '.join(made)}" if made else "")
        ]
        counts: dict[str, int] = {}
        for cubin in self.cubins:
            counts[cubin.kernel] = counts.get(cubin.kernel, 0) + 1
        lines += [f"  {name}: {number}" for name, number in sorted(counts.items())]
        lines += [f"  {method} compiles on the GPU's machine: {why}" for method, why in self.notes.items()]
        return "\n".join(lines)

    def why_not(self, about: str) -> str:
        """Say how a specialisation differs from what there is of its kernel."""
        name = about.partition(" ")[0]
        like = [cubin.about for cubin in self.cubins if cubin.about.partition(" ")[0] == name]
        if not like:
            notes = [f"{method}: {why}" for method, why in self.notes.items()]
            return "; ".join([f"the artefact has no {name}", *notes[:1]])
        same_source = [text for text in like if text.partition("\n")[0] == about.partition("\n")[0]]
        if not same_source:
            return f"the artefact has {name} from another version of nnfront's source"
        wanted = about.split("\n")
        nearest = max(same_source, key=lambda text: sum(map(str.__eq__, text.split("\n"), wanted)))
        differences = [
            f"{new} (there: {old})"
            for new, old in zip(wanted, nearest.split("\n"), strict=False)
            if new != old
        ]
        return f"the artefact has it otherwise: {', '.join(differences[:4])}"


_NAMES = tuple(f.name for f in fields(Cubin) if f.name != "image")
_MAP_NAMES = tuple(f.name for f in fields(TensorMap))


def read_cubin(given: Any, image: bytes) -> Cubin:
    """Return a kernel from its fields and its machine code.

    Raises LoadError for fields that are not as they must be.
    """
    found = _object(given, _NAMES, "a kernel")
    key = _text(found, "key")
    if not re.fullmatch("[0-9a-f]{16}", key):
        raise LoadError(f"{key!r} is not the key of a kernel")
    parameters = found["parameters"]
    if not isinstance(parameters, list):
        raise LoadError(f"parameters are {parameters!r:.80}, expected a list")
    if not re.fullmatch(r"\d+\.\d+", _text(found, "cuda")):
        raise LoadError(f"cuda is {found['cuda']!r:.80}, expected a version such as '13.0'")
    return Cubin(
        key,
        _text(found, "kernel"),
        _text(found, "arch"),
        _text(found, "triton"),
        _text(found, "cuda"),
        _count(found, "threads", 1, 1024),
        _count(found, "cluster", 1, 16),
        _count(found, "shared_bytes", 0, 1 << 20),
        _count(found, "scratch_bytes", 0, 1 << 30),
        _flag(found, "cooperative"),
        _flag(found, "pdl"),
        tuple(map(_parameter, parameters)),
        _text(found, "about"),
        image,
    )


def _parameter(given: Any) -> Parameter:
    kind = given.get("kind") if isinstance(given, dict) else None
    if kind not in KINDS:
        raise LoadError(f"a parameter is of kind {kind!r:.80}, expected one of {', '.join(KINDS)}")
    if kind != "descriptor":
        found = _object(given, ("name", "kind"), "a parameter")
        return Parameter(_text(found, "name"), kind)
    found = _object(given, ("name", "kind", *_MAP_NAMES), "a descriptor")
    box = found["box"]
    if not isinstance(box, list) or not 1 <= len(box) <= 5:
        raise LoadError(f"box is {box!r:.80}, expected a list of 1 to 5 numbers")
    sizes = tuple(_count({"box": size}, "box", 1, 256) for size in box)
    described = TensorMap(
        _count(found, "element", 0, 15),
        _count(found, "element_bytes", 1, 16),
        _count(found, "swizzle", 0, 15),
        sizes,
    )
    return Parameter(_text(found, "name"), kind, described)


def _object(given: Any, names: tuple[str, ...], what: str) -> Mapping[str, Any]:
    if not isinstance(given, dict) or sorted(given) != sorted(names):
        has = ", ".join(map(repr, sorted(given))) if isinstance(given, dict) else repr(given)
        raise LoadError(
            f"{what} has {has[:200]}", details=[f"expected {', '.join(map(repr, sorted(names)))}"]
        )
    return given


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found[name]
    if not isinstance(value, str):
        raise LoadError(f"{name} is {value!r:.80}, expected a text")
    return value


def _count(found: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = found[name]
    if type(value) is not int or not low <= value <= high:
        raise LoadError(f"{name} is {value!r:.80}, expected a number from {low} to {high}")
    return value


def _flag(found: Mapping[str, Any], name: str) -> bool:
    value = found[name]
    if type(value) is not bool:
        raise LoadError(f"{name} is {value!r:.80}, expected true or false")
    return value
