# SPDX-License-Identifier: Apache-2.0
"""What weights are to be quantised to: formats as text, and rules by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf
from pathlib import Path
from typing import Any

from nnfront.errors import PassError, nearest
from nnfront.quant_format import FORMATS, TOGETHER, QuantFormat

KEEP = "keep"
AUTO = "auto"
ACTIVATIONS = "int8"
HEAD = "int8"
"""What the head and the embedding are stored in where other weights have fewer bits."""


@dataclass(frozen=True)
class QuantScheme:
    """What weights are to be quantised to.

    format  of all weights that nothing else is said of: the name of a format of `nnfront.quant_format`, with `:` and how many neighbours share a
            scale, such as `int4:64`, or `:channel`, one scale for each output; of float8 `:tensor`, one for a matrix, or `:block`, for 128 x 128; `auto:4.5`, for whole folders, chooses one for each weight by its
            measured error, so that all together take no more than 4.5 bits for an element
    head    of the head and the embedding, or `keep`, which leaves them as they are; by default `format`, or `int8` if that has fewer bits
    rules   (pattern, format or `keep`): for the weights of modules of these paths, and of modules inside them, `*` standing for anything; the last that fits counts
    activations  `int8`: what weights in integers, or in blocks of them, are multiplied with is rounded to 8 bits as well (`quantize_activations`), for whole folders; `format` may be `keep` then
    calibration  a file that `nnfront.calibrate` wrote, for whole folders: weights are rounded by the inputs that they are multiplied with on some text
    """

    format: str
    head: str | None = None
    rules: tuple[tuple[str, str], ...] = ()
    calibration: str | Path | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        if self.activations not in (None, ACTIVATIONS):
            raise PassError(
                f"activations are rounded to {ACTIVATIONS}, got {self.activations!r}",
                help=f"write {ACTIVATIONS}, or leave them as they are",
            )
        if self.format == KEEP and self.activations is None:
            raise PassError(
                "the format of a scheme is 'keep'",
                help="say what weights are to be quantised to, such as 'int8'",
            )
        formats = [self.head, *(to for _, to in self.rules)]
        for text in (*formats, None if self.budget else self.format):
            if text is not None:
                format_of(text)

    @property
    def budget(self) -> float | None:
        """The bits for an element that all weights together may take; None if their formats are said."""
        name, _, bits = self.format.partition(":")
        if name != AUTO:
            return None
        try:
            found = float(bits)
        except ValueError:
            found = 0.0
        if not 0 < found < inf:
            raise PassError(
                f"{self.format!r} does not say how many bits an element may take", help="write auto:4.5"
            )
        return found

    @property
    def body_format(self) -> QuantFormat | None:
        """The format of most weights; None if they stay as they are. Raises PassError if it is to be chosen by errors."""
        if self.budget is not None:
            raise PassError(
                f"{self.format} is by the errors of weights, which are not known here",
                help="give it to LLM.load, nnfront run or nnfront export, or name a format",
            )
        return format_of(self.format)

    @property
    def head_format(self) -> QuantFormat | None:
        """The format of the head and the embedding; None if they stay as they are."""
        if self.head is not None:
            return format_of(self.head)
        body = self.body_format
        return body if body is None or body.bits >= FORMATS[HEAD].bits else FORMATS[HEAD]

    def rule_for(self, paths: Sequence[str]) -> tuple[str, QuantFormat | None] | None:
        """Return the last rule that fits one of the paths: its pattern and its format, None if they are to stay as they are."""
        found = [(pattern, to) for pattern, to in self.rules if any(fits(pattern, path) for path in paths)]
        return (found[-1][0], format_of(found[-1][1])) if found else None

    def check(self, paths: Iterable[str]) -> None:
        """Raise PassError for a pattern that fits none of the paths."""
        known = list(paths)
        ends = dict.fromkeys(f"*.{path.rpartition('.')[2]}" for path in known)
        for pattern, _ in self.rules:
            if not any(fits(pattern, path) for path in known):
                raise PassError(
                    f"no weight that can be quantised is in a module {pattern!r}",
                    help=nearest(pattern, [*ends, *known])
                    or "patterns are for paths of modules, such as '*.o_proj' or 'model.layers.0'",
                )


def scheme_of(given: str | QuantScheme) -> QuantScheme:
    """Return a scheme as it is, the name of a format as the scheme of that format."""
    return given if isinstance(given, QuantScheme) else QuantScheme(given)


def fits(pattern: str, path: str) -> bool:
    """Whether a path is that of the modules of a pattern, or of one inside them."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def format_of(text: str) -> QuantFormat | None:
    """Return the format of a text such as `int4`, `int4:64` or `int4:channel`; None for `keep`.

    Raises PassError for a format that does not exist, and for groups that it does not come in.
    """
    if text == KEEP:
        return None
    name, _, group = text.partition(":")
    if name not in FORMATS:
        raise PassError(
            f"there is no format {name!r} to quantise weights to",
            help=f"use one of {', '.join(map(repr, FORMATS))}",
        )
    found = FORMATS[name]
    if not group:
        return found
    if "float8" in found.dtype and group in SHARED:
        return replace(found, **SHARED[group])
    size = None if group == "channel" else int(group) if group.isdecimal() else 0
    if size == found.group_size:
        return found
    if size == 0 and not found.fixed_groups:
        raise PassError(
            f"{text!r} does not say how many neighbours share a scale",
            help=f"write {name}:64, or {name}:channel for one scale for each output",
        )
    if found.fixed_groups:
        each = "output" if found.group_size is None else f"group of {found.group_size}"
        others = ", ".join(other.name for other in FORMATS.values() if not other.fixed_groups)
        forms = [name, *(f"{name}:{word}" for word in SHARED if "float8" in found.dtype)]
        raise PassError(
            f"{name} has a scale for each {each}, got {text!r}",
            help=f"write {', '.join(forms)}, or use one of {others}",
        )
    return replace(found, group_size=size)


def named(text: str) -> QuantFormat:
    """Return the format of a text that is not `keep`."""
    found = format_of(text)
    assert found is not None
    return found


def text_of(format: QuantFormat) -> str:
    """Return the text of which `format_of` makes a format."""
    shared = {"shared_outputs": format.shared_outputs, "group_size": format.group_size}
    if format.shared_outputs != 1:
        return f"{format.name}:{next(word for word, said in SHARED.items() if said == shared)}"
    if format.group_size == FORMATS[format.name].group_size:
        return format.name
    return f"{format.name}:{format.group_size or 'channel'}"


def fitted(format: QuantFormat, depth: int) -> QuantFormat:
    """Return the format in which so many inputs are stored: where its groups or half its blocks do not divide them, smaller groups, else one scale for each output, else 8 bits."""
    if format.block is not None:
        return FORMATS["int8"] if depth % (format.block.numbers // 2) else format
    if format.packing is not None and depth % 2:
        return FORMATS["int8"]
    group = format.group_size
    if group is None or depth % group == 0:
        return format
    if format.fixed_groups:
        return FORMATS[format.name if format.shared_outputs != 1 else "int8"]
    return replace(format, group_size=next((g for g in SMALLER if g < group and depth % g == 0), None))


SHARED: dict[str, dict[str, Any]] = {
    "tensor": {"shared_outputs": None, "group_size": None},
    "block": {"shared_outputs": TOGETHER, "group_size": TOGETHER},
}
"""What shares a scale of float8, by the word for it."""

SMALLER = (64, 32, 16)
"""Groups that are tried where larger ones do not divide a size."""
