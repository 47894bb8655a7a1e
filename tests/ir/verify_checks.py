# SPDX-License-Identifier: Apache-2.0
"""What the tests of the verifier's rules share."""

from __future__ import annotations

import pytest

import nnfront.ops  # noqa: F401  declares the ops
from nnfront.errors import VerifyError
from nnfront.ir import Binding, Function, IRModule, Param, TensorType, parse, verify, violations

F2 = TensorType((2,), "float32")
LAYER = "layer(kv_heads=2, head_size=4, dtype=float32, batch=batch, max_seq=max_seq)"
HEADS = "float32[batch, seq, 2, 4]"


def rules(module: IRModule) -> set[str]:
    """The numbers of the rules that a module breaks."""
    return {error.what.partition(":")[0] for error in violations(module)}


def only(module: IRModule) -> VerifyError:
    """The one violation of a module."""
    (error,) = violations(module)
    with pytest.raises(VerifyError) as raised:
        verify(module)
    assert str(raised.value) == str(error)
    return error


def function(body: str, params: str = "x: input float32[2]", result: str = "float32[2]") -> IRModule:
    return parse(f"def f({params}) -> {result} {{ {body} }}")


def make(params: list[Param], bindings: list[Binding], result: object) -> IRModule:
    return IRModule([Function("f", tuple(params), tuple(bindings), result)])  # type: ignore[arg-type]
