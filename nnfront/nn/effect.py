# SPDX-License-Identifier: Apache-2.0
"""`Effect`: state that a module keeps from call to call, as values: extra arguments and extra results of every method.

Caches have a form of their own (`spec.Cache`), and `op.print_` needs no effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.errors import TraceError
from nnfront.nn.mode import active_mode
from nnfront.nn.source_location import user_place
from nnfront.nn.tensor import Tensor


class Effect:
    """Derive from it, define `init`, and assign it to an attribute of a module, whose methods read and set `state`.

    An exported method has one more argument for each tensor of the state, named by the effect's attribute path and an index, and
    returns (its result, *the state afterwards). `_initialize_effect` is exported as well and returns the first state.
    With `effect_mode` "none" a method starts from the first state each time and its last is dropped.
    """

    def init(self) -> Sequence[Tensor]:
        """Return the first state, made with ops; defined by subclasses."""
        raise TraceError(f"{type(self).__name__} defines no init")

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The state now. Raises TraceError outside a method."""
        states = self._states()
        if id(self) not in states:
            states[id(self)] = tuple(self.init())
        return states[id(self)]

    @state.setter
    def state(self, values: Sequence[Tensor]) -> None:
        new, old = tuple(values), self.state
        if [(v.type) for v in new] != [(v.type) for v in old]:
            raise TraceError(
                f"{type(self).__name__}: the new state has other types", details=[f"got {new}, had {old}"]
            )
        self._states()[id(self)] = new

    def _states(self) -> dict[int, tuple[Tensor, ...]]:
        mode = active_mode.get()
        if mode is None:
            raise TraceError(
                f"the state of {type(self).__name__} is used outside a method",
                where=user_place(),
                help="methods read and set it; a session gives and takes it as arguments and results",
            )
        return mode.effects
