# SPDX-License-Identifier: Apache-2.0
"""Models in several GGUF files, `NAME-00001-of-00003.gguf`: which files belong together, and whether they say so themselves.

Each part says its number from 0 on, how many parts there are, and how many tensors all have together; the first one says everything else.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from nnfront.errors import LoadError
from nnfront.files import shown
from nnfront.weights.name_hints import shortened
from nnfront.weights.safetensors import Header

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def whole_of(name: str) -> tuple[str, int] | None:
    """What all parts of a model share: the beginning of their names and how many there are; None for a file that is no part."""
    part = _PART.fullmatch(name)
    return (part[1], int(part[3])) if part is not None and int(part[3]) > 1 else None


def with_its_parts(name: str, names: Collection[str]) -> list[str]:
    """Those of `names` that are of the model that the file `name` is, or is a part of."""
    whole = whole_of(name)
    return [name] if whole is None else sorted(other for other in names if whole_of(other) == whole)


def all_parts(path: Path, name: str, names: Collection[str]) -> list[str]:
    """The files of the model that the file `name` is, or is a part of, in order. Raises LoadError that names those that are not among `names`."""
    whole = whole_of(name)
    if whole is None:
        return [name]
    wanted = [f"{whole[0]}-{part:05}-of-{whole[1]:05}.gguf" for part in range(1, whole[1] + 1)]
    missing = [other for other in wanted if other not in names]
    if missing:
        raise LoadError(
            f"{path}: of a model in {whole[1]} GGUF files {len(missing)} {'is' if len(missing) == 1 else 'are'} not there",
            details=shortened([(other, other) for other in missing]),
            help="put all parts into one folder",
        )
    return wanted


def disagreements(headers: Sequence[Header]) -> list[str]:
    """What the files of one model say against each other, given in the order of their names."""
    if len(headers) == 1:
        count = headers[0].metadata.get(_COUNT, 1)
        if count in (0, 1):
            return []
        shown_count = f"{count:05}" if isinstance(count, int) else "*****"
        return [
            f"{headers[0].file.name} is one of {shown(count)} files of a model that was split; the others are found by "
            f"names that end with -00001-of-{shown_count}.gguf"
        ]
    total = sum(len(header.tensors) for header in headers)
    said: dict[str, tuple[Any, str]] = {}
    problems = []
    for number, header in enumerate(headers):
        file, metadata = header.file.name, header.metadata
        expected = {_NUMBER: number, _COUNT: len(headers), _TENSORS: total}
        for key, value in expected.items():
            if metadata.get(key) != value:
                problems.append(f"{file}: {key} is {shown(metadata.get(key))}, expected {value}")
        for key in metadata.keys() - expected.keys():
            value, first = said.setdefault(key, (metadata[key], file))
            if metadata[key] != value:
                problems.append(
                    f"{file}: {shown(key)} is {shown(metadata[key])}, and {shown(value)} in {first}"
                )
    return problems
