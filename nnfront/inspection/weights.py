# SPDX-License-Identifier: Apache-2.0
"""Where each weight comes from: its formula, the tensors that it is made of, what it is stored in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnfront import dtypes
from nnfront.inspection.model import Inspected
from nnfront.ir import OPS, ScalarType, TensorType, Type, type_text
from nnfront.quant_format import FORMATS
from nnfront.transform.weight_usage import Use, weight_uses
from nnfront.weights import check_weights


def weights_of(model: Inspected) -> list[dict[str, Any]]:
    """Return each weight that methods read, in their order: name, formula (None: as it is stored), type, bytes, format, sources, methods.

    A source is a tensor of the checkpoint, with its file where that is there; of an artefact, which holds the weight itself, `stored` is its
    own tensor.
    """
    program = model.executable.program
    uses = weight_uses(program)
    made = {
        name: transform.slots[slot].type
        for transform in program.transforms.values()
        for name, slot in transform.results.items()
    }
    names = _stored_names(model, uses.wanted)
    tensors = {stored: name for places in (model.places or {}).values() for name, stored in places.items()}
    by_weight = {name: stored for stored, name in tensors.items()}
    found = []
    for use in uses.uses:
        type = (
            uses.wanted.get(use.name) if use.formula == use.name and use.name not in made else made[use.name]
        )
        entry: dict[str, Any] = {
            "name": use.name,
            "formula": None if use.formula == use.name else use.formula,
            "type": type_text(type) if type is not None else "?",
            "bytes": bytes_of(type),
            "format": _format(use, type),
            "methods": list(use.methods),
            "sources": [
                _source(model, name, names.get(name, name), uses.wanted.get(name)) for name in use.sources
            ],
        }
        if model.is_artefact:
            entry["stored"] = _source(model, use.name, by_weight.get(use.name, use.name), None)
        found.append(entry)
    return found


def bytes_of(type: Type | None) -> int | None:
    """Return the bytes of a tensor or number; None where a size is not known."""
    if isinstance(type, ScalarType):
        return dtypes.size_bytes(type.dtype)
    return type.size_bytes if isinstance(type, TensorType) else None


def _format(use: Use, type: Type | None) -> str:
    """The format of quantised weights that the last part of a name says, as quantising gives it, before the ops that brought it into an order; else the dtype."""
    parts = use.name.split(".")
    while len(parts) > 1 and parts[-1] in OPS:
        parts.pop()
    return parts[-1] if parts[-1] in FORMATS else str(getattr(type, "dtype", ""))


def _stored_names(model: Inspected, wanted: Mapping[str, TensorType]) -> Mapping[str, str]:
    """The name in the files of each weight that the program wants."""
    if model.stored is None or model.is_artefact:
        return {}
    aliases = model.executable.program.aliases
    return check_weights(wanted, model.stored.infos, aliases=aliases, ignored=["*"]).sources


def _source(model: Inspected, name: str, stored: str, type: TensorType | None) -> dict[str, Any]:
    info = None if model.stored is None else model.stored.infos.get(stored)
    if info is None:
        return {"name": name, "type": "" if type is None else type_text(type), "bytes": bytes_of(type)}
    return {
        "name": stored,
        "type": str(info),
        "bytes": info.size_bytes,
        "file": info.file.name,
        "format": info.encoding or info.dtype,
    }
