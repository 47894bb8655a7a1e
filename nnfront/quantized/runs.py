# SPDX-License-Identifier: Apache-2.0
"""Weights of one kind that follow one another in what a product reads: as they are encoded, or dense."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from nnfront.ir import Var, tensor_type
from nnfront.ops.encoded import Encoded
from nnfront.quantized.uses import Kind

Run: TypeAlias = Encoded | Var


def kind_of(run: Run) -> Kind | None:
    """What it has in common with those that it can be joined to; None if it is dense."""
    if isinstance(run, Var):
        return None
    scales = "" if run.scales is None else tensor_type(run.scales).dtype
    return Kind((run.format, scales), run.is_transposed)


def described(run: Run) -> Hashable:
    """What a private function that is given it is made for."""
    return kind_of(run), tuple(part.type for _, part in named_parts(run))


def named_parts(run: Run) -> list[tuple[str, Var]]:
    """What is stored of it, each with what its name ends with."""
    return [("dense", run)] if isinstance(run, Var) else [*zip(run.format.parts, run.parts, strict=True)]


def with_parts(run: Run, parts: Sequence[Var]) -> Run:
    """The same of other values."""
    return parts[0] if isinstance(run, Var) else run.with_parts(parts)
