# SPDX-License-Identifier: Apache-2.0
"""Rewrites of the IR: each pass is a pure function IRModule -> IRModule in a file of its name.

`base` says what a pass is and runs it. The order of passes is in `PIPELINES` and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nnfront.cases.conditions import causal, multiple_of, zeros
from nnfront.errors import PassError
from nnfront.ir import IRModule
from nnfront.passes.add_adapters import add_adapters
from nnfront.passes.apply_dtype_policy import apply_dtype_policy
from nnfront.passes.base import PASSES, Pass, Step, module_pass, run_steps
from nnfront.passes.bind_dims import bind_dims
from nnfront.passes.bind_params import bind_params
from nnfront.passes.bubble_up_slices import bubble_up_slices
from nnfront.passes.canonicalize import canonicalize
from nnfront.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from nnfront.passes.eliminate_dead_code import eliminate_dead_code
from nnfront.passes.external_attention import external_attention
from nnfront.passes.fold_constants import fold_constants
from nnfront.passes.inline import inline
from nnfront.passes.input_moments import input_moments
from nnfront.passes.lift_transform_params import lift_transform_params
from nnfront.passes.outline import outline
from nnfront.passes.pack_weights import pack_weights
from nnfront.passes.patterns import Pattern
from nnfront.passes.quantize_activations import quantize_activations
from nnfront.passes.quantize_weights import quantize_weights
from nnfront.passes.quantizing.report import QuantizeReport
from nnfront.passes.quantizing.scheme import QuantScheme
from nnfront.passes.regions import CUDA_PATTERNS, PATTERNS
from nnfront.passes.shard_weights import shard_weights
from nnfront.passes.special_cases import special_cases
from nnfront.passes.split_embedding import split_embedding
from nnfront.passes.transpose_weights import transpose_weights

# Constants first: they decide branches. What the three before it leave unread goes last.
_SIMPLIFY: tuple[Step, ...] = (
    fold_constants,
    canonicalize,
    eliminate_common_subexpressions,
    eliminate_dead_code,
)

PIPELINES: dict[str, tuple[Step, ...]] = {
    "simplify": _SIMPLIFY,
    # What back ends run before kernels are chosen. Variants for special cases come first: what is known in them simplifies.
    # The order that kernels want weights in is one more formula, which the second lifting moves into the transform.
    "cpu": (
        special_cases,
        *_SIMPLIFY,
        bubble_up_slices,
        eliminate_dead_code,
        outline,
        partial(pack_weights, only_lifted=True),
        partial(lift_transform_params, only_lifted=True),
    ),
    "cuda": (
        special_cases,
        *_SIMPLIFY,
        bubble_up_slices,
        eliminate_dead_code,
        transpose_weights,
        partial(outline, patterns=CUDA_PATTERNS),
        pack_weights,
        partial(lift_transform_params, shared_transform=True),
    ),
}

__all__ = [
    "CUDA_PATTERNS",
    "PASSES",
    "PATTERNS",
    "PIPELINES",
    "Pass",
    "Pattern",
    "QuantScheme",
    "QuantizeReport",
    "add_adapters",
    "apply_dtype_policy",
    "bind_dims",
    "bind_params",
    "bubble_up_slices",
    "canonicalize",
    "causal",
    "eliminate_common_subexpressions",
    "eliminate_dead_code",
    "external_attention",
    "fold_constants",
    "inline",
    "input_moments",
    "lift_transform_params",
    "module_pass",
    "multiple_of",
    "outline",
    "pack_weights",
    "quantize_activations",
    "quantize_weights",
    "run",
    "shard_weights",
    "special_cases",
    "split_embedding",
    "transpose_weights",
    "zeros",
]


def run(ir: IRModule, pipeline: str | Sequence[Step]) -> IRModule:
    """Run the passes of a pipeline, by its name or listed, in order."""
    if isinstance(pipeline, str):
        if pipeline not in PIPELINES:
            raise PassError(
                f"there is no pipeline {pipeline!r}", help=f"use one of {', '.join(map(repr, PIPELINES))}"
            )
        pipeline = PIPELINES[pipeline]
    return run_steps(ir, pipeline)
