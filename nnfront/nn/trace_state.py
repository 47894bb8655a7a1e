# SPDX-License-Identifier: Apache-2.0
"""What a trace works on: the tree it may read, and the function it is building."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nnfront.errors import TraceError
from nnfront.ir import FunctionBuilder, StateLayerType, StateType, Var
from nnfront.nn.cache import CacheLayer
from nnfront.nn.effect import Effect
from nnfront.nn.layer_equivalence import CannotShare
from nnfront.nn.parameter import Parameter
from nnfront.nn.tensor import Tensor


@dataclass(frozen=True)
class Tree:
    """What a trace may meet besides its inputs.

    `parameters` by checkpoint name; `aliases` are further names of tied ones; `names` gives the attribute path of each
    parameter, derived tensor and module by `id`; `effects` by attribute path; `shareable` are the ids of modules whose trace may be shared.
    """

    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, str]
    names: Mapping[int, str]
    effects: Mapping[str, Effect] = field(default_factory=dict)
    shareable: frozenset[int] = frozenset()


@dataclass
class Frame:
    """One function while it is built: a method, or (with a `parent`) the private function of a shared module or of a loop's body."""

    builder: FunctionBuilder
    parent: Frame | None = None
    prefix: str = ""  # the module path to which paths inside are relative
    weights: dict[int, Var] = field(default_factory=dict)
    reads: list[Tensor] = field(default_factory=list)  # the weights of a private function, in parameter order
    layers: list[CacheLayer] = field(default_factory=list)
    # Variables of derived tensors that are attributes of a module.
    derived: list[str] = field(default_factory=list)
    captured: dict[Var, Var] | None = None  # of the body of a loop: the parameters for what is around it
    kept: list[Any] = field(default_factory=list)  # alive while their ids are keys

    def stand_in(self, var: Var) -> Var | None:
        """Return what stands here for a variable of this function or of one around it; None for a variable of no such function."""
        if self.builder.sees(var):
            return var
        outside = None if self.parent is None else self.parent.stand_in(var)
        if outside is None:
            return None
        if self.captured is None:
            raise CannotShare
        if isinstance(outside.type, (StateLayerType, StateType)):
            raise TraceError(
                "op.scan: the body uses a cache", help="compute in the loop, and write the cache after it"
            )
        if outside not in self.captured:
            self.captured[outside] = self.builder.param(outside.name, outside.type, "input")
        return self.captured[outside]
