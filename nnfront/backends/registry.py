# SPDX-License-Identifier: Apache-2.0
"""Back ends by name: those that nnfront brings and those that others have installed are found in the same way, as entry points.

A package adds one without a change here, in its pyproject.toml:

    [project.entry-points."nnfront.backends"]
    toy = "toy_backend:TOY"
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

import torch

from nnfront.backends.backend import Backend
from nnfront.errors import LowerError

GROUP = "nnfront.backends"
OWN = {"cpu": "nnfront.backends.cpu.backend:CPU", "cuda": "nnfront.backends.cuda.backend:CUDA"}


def names() -> tuple[str, ...]:
    """The names of all back ends that are installed, nnfront's own first."""
    return (*OWN, *sorted({point.name for point in _installed()} - set(OWN)))


def targets() -> tuple[str, ...]:
    """What `compile` takes as a target, with the architectures of nnfront's own back ends; others say theirs when they are asked for."""
    return tuple(
        target
        for name in names()
        for target in (name, *(f"{name}:{arch}" for arch in (backend_of(name).archs if name in OWN else ())))
    )


def is_target(text: str) -> bool:
    """Whether `targets` lists it. Imports no back end but its own."""
    name, _, arch = text.partition(":")
    return name in names() and (text == name or (name in OWN and arch in _load(name).archs))


class Parts(NamedTuple):
    """What a target says: `cuda:sm_90:1` is the back end `cuda` for the architecture `sm_90` on the GPU of number 1."""

    name: str
    arch: str | None
    number: int | None

    @property
    def without_number(self) -> str:
        """The target of a program, which may run on any of several devices."""
        return self.name if self.arch is None else f"{self.name}:{self.arch}"


def parts_of(target: str) -> Parts:
    """Take a target apart."""
    name, *parts = target.split(":")
    number = int(parts.pop()) if parts and re.fullmatch(r"[0-9]{1,4}", parts[-1]) else None
    return Parts(name, ":".join(parts) if parts else None, number)


def backend_of(target: str) -> Backend:
    """Return the back end of a target, such as `cpu`, `cuda:sm_90` or `cuda:1`.

    Raises LowerError for a name that nobody has installed, for one that cannot be imported or is no back end, and for an architecture
    that it does not have.
    """
    name, arch, number = parts_of(target)
    backend = _load(name)
    if (arch is not None and arch not in backend.archs) or (number is not None and not backend.numbered):
        raise LowerError(
            f"unknown target {target!r}",
            help=f"targets are {', '.join(map(repr, [name, *(f'{name}:{a}' for a in backend.archs)]))}",
        )
    return backend


def device_of(target: str) -> torch.device:
    """Return the device that the tensors of a target's programs live on. Raises LoadError if it is not there."""
    return backend_of(target).device(target)


@cache
def _load(name: str) -> Backend:
    if name in OWN:
        module, _, attribute = OWN[name].partition(":")
        own: Backend = getattr(importlib.import_module(module), attribute)
        return own
    points = [point for point in _installed() if point.name == name]
    if not points:
        raise LowerError(
            f"unknown target {name!r}",
            help=f"targets are {', '.join(map(repr, targets()))}; a package adds one by the entry point {GROUP!r}",
        )
    point = points[0]
    origin = f"{point.value}{f' of {point.dist.name} {point.dist.version}' if point.dist else ''}"
    try:
        backend = point.load()
    except Exception as error:
        raise LowerError(
            f"the back end {name!r} cannot be imported",
            details=[f"its entry point is {origin}", f"{type(error).__name__}: {error}"],
            help="mend or uninstall the package that brings it",
        ) from error
    if not isinstance(backend, Backend) or backend.name != name:
        got = f"a back end called {backend.name!r}" if isinstance(backend, Backend) else f"{backend!r}"
        raise LowerError(
            f"the entry point of the back end {name!r} is not one",
            details=[
                f"got {got} from {origin}",
                "expected an instance of nnfront.backends.backend.Backend of that name",
            ],
        )
    return backend


def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))
