# SPDX-License-Identifier: Apache-2.0
"""Weights in a branch that knows more of their dims than holds in every call: `[3, 4]` where the weight is `[d, 4]`.

The transform runs whatever branch a call takes. So a value of such a branch moves as what it is in every call: the value that
another branch computes and that is the same where the facts hold, or the same op over the weights as they are. What is
defined only where the facts hold, such as `reshape(w, shape=(12,))`, stays unless another branch says it for every d.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from nnfront.dims import Size, substitute
from nnfront.errors import InferError
from nnfront.ir import Expr, Facts, MatchShape, Type, Var, infer
from nnfront.ir.value_numbering import atom_key, expr_key
from nnfront.passes.lifting.value_graph import Operand, Value, Values, resized, with_operands
from nnfront.passes.sizes import map_scalar


class Branch:
    """The values of a function as a branch sees them in which these facts about dims of weights hold."""

    def __init__(self, values: Values, facts: Facts) -> None:
        self.values = values
        self.facts = facts
        self._known: dict[Hashable, Value] = {}
        self._seen = 0

    def find(self, expr: Expr, operands: Sequence[Operand]) -> Value | None:
        """Return the value of every call that is this expression's here."""
        for value in self.values.items[self._seen :]:
            if value.expr is not None:
                self._known.setdefault(self._key(value.expr, value.operands), value)
        self._seen = len(self.values.items)
        return self._known.get(self._key(expr, operands))

    def _key(self, expr: Expr, operands: Sequence[Operand]) -> Hashable:
        atoms = [o if isinstance(o, Value) else o and map_scalar(o, self._size) for o in operands]
        return expr_key(
            resized(expr, self._size), [a if isinstance(a, Value) else atom_key(a) for a in atoms]
        )

    def _size(self, size: Size) -> Size:
        return substitute(size, self.facts)


def general_type(expr: Expr, operands: Sequence[Operand]) -> Type | None:
    """Return the type of an expression in every call, None if it has none."""
    atoms = [Var(o.name, o.type) if isinstance(o, Value) else o for o in operands]
    try:
        return None if isinstance(expr, MatchShape) else infer(with_operands(expr, atoms), {})
    except InferError:
        return None
