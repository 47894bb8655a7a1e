# SPDX-License-Identifier: Apache-2.0
"""Plans that are remembered: what a launch checks and reckons is done for the first of many alike, and later ones only exchange tensors.

Two calls of `plan` are alike if their tensors have the same shapes, strides, dtypes and alignment and all else is equal: a plan depends on
nothing else, as it reads no values. Each tensor of a plan is one that was given, perhaps seen in another way, memory that holds nothing yet,
or a workspace that is lent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from nnfront_kernels.common import Alike, Config, Plan, planned_for
from nnfront_kernels.split_k import Sizes, lender, lending

MAX_PLANS = 1024  # of a kernel; then all are forgotten
SCALARS = (int, float, bool, str, type(None), torch.dtype, Config)
WORKSPACE = ("partial_ptr", "arrived_ptr")


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor that begins where a source does: a given one by its place, or -1, what the launch writes."""

    source: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        seen = tensor if tensor.dtype == self.dtype else tensor.view(self.dtype)
        return seen.as_strided(self.shape, self.strides)


class _Template(Alike):
    """A plan without its tensors, and where each of them comes from. ValueError for a plan that cannot be had again in this way."""

    def __init__(self, plan: Plan, given: tuple[Any, ...], sizes: Sizes | None) -> None:
        self._kernel, self._grid = plan.kernel, plan.grid
        self._constants, self._config = plan.constants, plan.config
        self._sizes, self._device, self._also = sizes, plan.output.device, plan.also
        self._scalars: dict[str, Any] = {}
        self._same: dict[str, int] = {}
        self._views: dict[str, _View] = {}
        self._new: dict[str, tuple[Any, ...]] = {}
        written = [i for i, tensor in enumerate(given) if tensor is plan.output]
        if len(written) > 1:
            raise ValueError("two are the output")
        self._output: int | tuple[Any, ...] = written[0] if written else _fresh(plan.output)
        sources = [*enumerate(given), *([] if written else [(-1, plan.output)])]
        for name, value in plan.arguments.items():
            if not isinstance(value, torch.Tensor):
                if not isinstance(value, SCALARS):
                    raise ValueError("a descriptor of a tensor is made anew")
                self._scalars[name] = value
                continue
            if sizes is not None and name in WORKSPACE:
                self._scalars[name] = None  # its place; it is lent for each launch
                continue
            begins = [
                i for i, t in sources if isinstance(t, torch.Tensor) and t.data_ptr() == value.data_ptr()
            ]
            if len(begins) > 1 or not value.numel() or (not begins and _is_inside(value, given)):
                raise ValueError("it is not known whose memory this is")
            self._scalars[name] = None
            if not begins:
                self._new[name] = _fresh(value)
            elif any(value is t for _, t in sources):
                self._same[name] = begins[0]
            else:
                self._views[name] = _View(begins[0], value.dtype, value.shape, value.stride())

    def plan(self, given: tuple[Any, ...]) -> Plan:
        """The plan for tensors like those of the first."""
        output = given[self._output] if isinstance(self._output, int) else _empty(*self._output, self._device)
        arguments = self._scalars.copy()
        for name, source in self._same.items():
            arguments[name] = output if source < 0 else given[source]
        for name, view in self._views.items():
            arguments[name] = view.of(output if view.source < 0 else given[view.source])
        for name, fresh in self._new.items():
            arguments[name] = _empty(*fresh, self._device)
        if self._sizes is not None:
            arguments |= zip(WORKSPACE, lender()(self._sizes, self._device), strict=True)
        return Plan(
            self._kernel, self._grid, arguments, self._constants, self._config, output, self._also, alike=self
        )


def _is_inside(value: torch.Tensor, given: tuple[Any, ...]) -> bool:
    """Whether a tensor is a part of one that was given."""
    memory = value.untyped_storage().data_ptr()
    return any(isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() == memory for t in given)


def _fresh(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _empty(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _key(given: tuple[Any, ...], names: tuple[str, ...]) -> Hashable | None:
    """What calls that are alike have in common; None for one that is planned anew each time."""
    key: list[Hashable] = [len(given), names, planned_for()]
    for value in given:
        if type(value) is torch.Tensor:
            if value.is_meta:
                return None
            key += [value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16]
        elif isinstance(value, SCALARS):
            key += [type(value), value]
        else:
            return None
    return tuple(key)


def remembered(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """The same function, which plans alike launches once. It may read no tensor, and make none but with torch.empty or as a view."""
    templates: dict[Hashable, _Template | None] = {}

    @functools.wraps(plan)
    def planned(*args: Any, **options: Any) -> Plan:
        given = (*args, *options.values())
        key = _key(given, tuple(options))
        if key is None:
            return plan(*args, **options)
        if key in templates:
            template = templates[key]
            return plan(*args, **options) if template is None else template.plan(given)
        lent: list[Sizes] = []
        outer = lender()

        def noted(sizes: Sizes, device: torch.device) -> Any:
            lent.append(sizes)
            return outer(sizes, device)

        with lending(noted):
            made = plan(*args, **options)
        if len(templates) == MAX_PLANS:
            templates.clear()
        try:
            templates[key] = _Template(made, given, lent[0] if lent else None)
        except ValueError:
            templates[key] = None
        return made

    return planned
