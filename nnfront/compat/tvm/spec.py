# SPDX-License-Identifier: Apache-2.0
"""TVM's specs: nnfront's, with TVM's constructors of `MethodSpec` and `ModuleSpec`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nnfront.errors import SpecError
from nnfront.nn import spec as ours
from nnfront.nn.spec import Int, Object, Tensor, Tuple

__all__ = ["Int", "MethodSpec", "ModuleSpec", "Object", "Tensor", "Tuple"]


def _paired(names: Sequence[str], specs: Sequence[Any], what: str) -> dict[str, Any]:
    if len(names) != len(specs):
        raise SpecError(
            f"{what}: {len(names)} names and {len(specs)} specs",
            details=[f"names: {', '.join(names)}"],
            help="give one spec for each name, in the same order",
        )
    return dict(zip(names, specs, strict=True))


class MethodSpec(ours.MethodSpec):
    """One method: its function, and name and spec of each argument. Raises SpecError for what does not fit its signature."""

    def __init__(
        self,
        method: Callable[..., Any],
        arg_names: Sequence[str],
        arg_specs: Sequence[Any],
        param_mode: ours.Mode,
        effect_mode: ours.Mode,
    ) -> None:
        raw = _paired(arg_names, arg_specs, "MethodSpec")
        modes = {"param_mode": param_mode, "effect_mode": effect_mode}
        read = ours.MethodSpec.from_raw({**raw, "$": modes}, method)
        super().__init__(method, read.arguments, read.param_mode, read.effect_mode)

    @staticmethod
    def from_raw(spec: Any, method: Callable[..., Any]) -> ours.MethodSpec:  # type: ignore[override]
        """Read the raw spec of one method against its signature."""
        return ours.MethodSpec.from_raw(spec, method)

    @staticmethod
    def from_torch(args: Sequence[Any], method: Callable[..., Any]) -> ours.MethodSpec:
        """Read the specs of arguments off torch tensors and ints, of which every size is a number."""
        names = list(inspect.signature(method).parameters)
        raw = [int if isinstance(a, int) else Tensor(list(a.shape), a.dtype) for a in args]
        return ours.MethodSpec.from_raw(_paired(names[: len(raw)], raw, "MethodSpec.from_torch"), method)


class ModuleSpec(ours.ModuleSpec):
    """The methods of `module` to export: their names, and a spec for each."""

    def __init__(self, module: Any, method_names: Sequence[str], method_specs: Sequence[Any]) -> None:
        raw = _paired(method_names, method_specs, "ModuleSpec")
        super().__init__(ours.ModuleSpec.from_raw(raw, module).methods)

    @staticmethod
    def from_raw(spec: Any, module: Any) -> ours.ModuleSpec:
        """Read a raw spec against the module's methods."""
        return ours.ModuleSpec.from_raw(spec, module)
