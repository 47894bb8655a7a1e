# SPDX-License-Identifier: Apache-2.0
"""`page`: a model as one HTML page, which needs neither a network nor anything beside it."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from nnfront.inspection.model import inspect_model
from nnfront.inspection.page_data import page_data

PARTS = files("nnfront.inspection") / "page"


def page(
    path: str | Path,
    *,
    target: str | None = None,
    model_file: str | Path | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:
    """Return a page that shows what a folder or an artefact holds: methods as graphs, dims, weights, kernels, memory over time.

    target: whose kernels; cpu, or an artefact's own. sizes: numbers for dims; memory is planned for 128, or 1 of a dim without a bound,
    where none is given. Reads headers of weights at most, and of a folder config.json is enough. Raises LoadError if there is no model,
    and LowerError for a number that a dim cannot be.
    """
    data = page_data(inspect_model(path, target, model_file), sizes)
    # A name in the data must not end the element that holds it, nor begin a comment there.
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = {part: _part(f"{part}.js") for part in ("page", "layout", "graph", "tables", "memory")}
    parts = {
        "title": html.escape(f"{data['name']} · nnfront"),
        "style": _part("page.css"),
        "data": text,
        **scripts,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
