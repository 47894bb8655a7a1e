# SPDX-License-Identifier: Apache-2.0
"""Put forms in the place of symbols, and bring the result to canonical form again."""

from __future__ import annotations

from collections.abc import Mapping

from nnfront.dims.divide import floordiv, map_atoms, mod
from nnfront.dims.min_max import extreme
from nnfront.dims.polynomial import Atom, Form, of_atom
from nnfront.dims.symbol import Symbol


def rebuild(form: Form, values: Mapping[Symbol, Form]) -> Form:
    """The form with each symbol in `values` replaced, all at once; the same object if none occurs."""
    changed = False

    def replaced(atom: Atom) -> Form:
        nonlocal changed
        found = _rebuild_atom(atom, values)
        changed |= found is not None
        return of_atom(atom) if found is None else found

    made = map_atoms(form, replaced)
    return made if changed else form


def _rebuild_atom(atom: Atom, values: Mapping[Symbol, Form]) -> Form | None:
    """The new form, or None if nothing changes."""
    if isinstance(atom, Symbol):
        return values.get(atom)
    args = [rebuild(arg, values) for arg in atom.args]
    if all(new is old for new, old in zip(args, atom.args, strict=True)):
        return None
    if atom.kind == "floordiv":
        return floordiv(*args)
    if atom.kind == "mod":
        return mod(*args)
    return extreme("min" if atom.kind == "min" else "max", args)
