# SPDX-License-Identifier: Apache-2.0
"""Attributes as ops store them, for text that somebody has written by hand: `axis=-1`, or an attribute that has a default left out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from nnfront.errors import NnfrontError
from nnfront.ir.attributes import RULE_ERRORS
from nnfront.ir.expr import Binding, Call, canonical_call
from nnfront.ir.module import IRModule
from nnfront.ir.visit import Mutator


def with_canonical_attrs(module: IRModule) -> IRModule:
    """Return the module with the attributes of each call in the form that its op gives them; those that it cannot take stay as they are."""
    return module.with_functions(_Canonical().function(function) for function in module.functions)


class _Canonical(Mutator):
    def binding(self, binding: Binding) -> Sequence[Binding]:
        call = binding.value
        if not isinstance(call, Call):
            return super().binding(binding)
        with suppress(NnfrontError, *RULE_ERRORS):
            binding = binding.with_value(canonical_call(call.op, call.args, call.attrs))
        return super().binding(binding)
