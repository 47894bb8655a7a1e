# SPDX-License-Identifier: Apache-2.0
"""`nnfront.json`, the table of contents of an artefact: written by `Manifest.text`, read and checked in full by `read_manifest`.

{
 "format": "nnfront artefact",
 "schema": 1,                        grows when an older nnfront could not read what is written: 2 has kernels in a folder, 3 weights of ranks
 "nnfront": "0.1.0",                 the version that wrote it
 "target": "cpu",
 "methods": {"decode": "decode(token: int64[batch, 1], ...) -> float32[batch, 1, 4096]"},
 "dims": {"vocab_size": 4096},       sizes that the weights have said
 "weights": {"": {NAME: TENSOR}, "transform_params": {NAME: TENSOR}},
                                     which tensor of the files is which weight, where the names differ: "" holds those read as they
                                     are, the others are results of the transform of that name
 "orders": {TENSOR: [1, 0]},         the axes as a tensor is stored, if not in its own order: a transposed one stays one
 "ranks": 2,                         among how many ranks the program is divided; not there for one of a single process
 "llm": {"model_type": "llama", "max_position_embeddings": 512, "vocab_size": 4096, "eos_token_ids": [1]},    or null
 "files": {"program.nnir": {"bytes": 1234, "sha256": "...", "crc32": ["..."]}},
 "sha256": "..."                     of all of the above
}
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import nnfront
from nnfront.artefact.integrity import BLOCK_BYTES, Digest
from nnfront.errors import LoadError
from nnfront.files import Folder, parse_json, shown
from nnfront.weights.checkpoint import MANIFEST

FORMAT = "nnfront artefact"
SCHEMA = 3
_RANKS = "ranks"


@dataclass(frozen=True, slots=True)
class TextModel:
    """What is needed to generate text beyond the methods: how many tokens fit, how many there are, which of them end a text."""

    model_type: str
    max_position_embeddings: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """The fields of nnfront.json.

    `weights` maps origin, then the weight's name, to the tensor's where that is another; `orders` are the axes of tensors that are
    stored transposed. `ranks`: among how many the program is divided.
    """

    target: str
    methods: Mapping[str, str]
    dims: Mapping[str, int]
    files: Mapping[str, Digest]
    weights: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    llm: TextModel | None = None
    ranks: int = 1
    nnfront: str = nnfront.__version__

    def text(self) -> str:
        """Return the file's text."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "schema": 3 if self.ranks > 1 else 2 if any("/" in name for name in self.files) else 1,
            "nnfront": self.nnfront,
            "target": self.target,
            "methods": dict(self.methods),
            "dims": dict(self.dims),
            "weights": {origin: dict(names) for origin, names in self.weights.items()},
            "orders": {name: list(order) for name, order in self.orders.items()},
            **({_RANKS: self.ranks} if self.ranks > 1 else {}),
            "llm": None if self.llm is None else asdict(self.llm),
            "files": {name: _digest_fields(digest) for name, digest in self.files.items()},
        }
        return json.dumps({**fields, "sha256": digest_of_fields(fields)}, indent=1, ensure_ascii=False) + "\n"


_KEYS = ("format", "schema", *(each.name for each in fields(Manifest) if each.name != _RANKS), "sha256")


def digest_of_fields(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 over all fields but `sha256`, however they are laid out."""
    rest = {name: value for name, value in fields.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Folder) -> Manifest:
    """Read and check nnfront.json. Raises LoadError: no artefact, another schema, damaged, or written by something else."""
    file = folder.path / MANIFEST
    if not folder.has(MANIFEST):
        raise LoadError(
            f"{folder.path} is not an nnfront artefact: it has no {MANIFEST}",
            help="session.save(DIR) or `nnfront export` makes one",
        )
    try:
        fields = parse_json(folder.read(MANIFEST), is_strict=True)
    except ValueError as error:
        raise LoadError(f"{file} is damaged: it is not JSON", details=[str(error)]) from None
    return _Reader(file).manifest(fields)


class _Reader:
    """Turns JSON into a manifest; whatever is not as it must be is an error that names the field."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def manifest(self, fields: Any) -> Manifest:
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise LoadError(f"{self.file} is not the manifest of an nnfront artefact")
        self.check_schema(fields)
        missing = [key for key in _KEYS if key not in fields]
        if missing:
            self.fail(f"it has no {', '.join(map(repr, missing))}")
        unknown = [key for key in fields if key not in (*_KEYS, _RANKS)]
        if unknown:
            self.fail(f"schema {fields['schema']} has no {', '.join(map(repr, unknown))}")
        if digest_of_fields(fields) != fields["sha256"]:
            self.fail("its sha256 is not that of its other fields")
        return Manifest(
            self.text(fields["target"], "target"),
            self.table(fields["methods"], "methods", self.text),
            self.table(fields["dims"], "dims", self.count),
            self.files(fields["files"]),
            self.table(fields["weights"], "weights", partial(self.table, read=self.text)),
            self.table(fields["orders"], "orders", self.numbers),
            None if fields["llm"] is None else self.llm(fields["llm"]),
            self.ranks(fields.get(_RANKS, 1), fields["schema"]),
            self.text(fields["nnfront"], "nnfront"),
        )

    def check_schema(self, fields: Mapping[str, Any]) -> None:
        schema = fields.get("schema")
        if type(schema) is not int or schema < 1:
            self.fail(f"its schema is {shown(schema)}, expected a number from 1")
        if schema > SCHEMA:
            raise LoadError(
                f"{self.file.parent} was made by a newer nnfront",
                details=[
                    f"got schema {schema}, written by nnfront {shown(fields.get('nnfront'))}",
                    f"expected schema {SCHEMA}: this is nnfront {nnfront.__version__}",
                ],
                help="upgrade nnfront, or export the model again with this one",
            )

    def ranks(self, value: Any, schema: int) -> int:
        if value == 1 and schema < 3:
            return 1
        if self.count(value, _RANKS) < 2 or schema < 3:
            self.fail(f"{_RANKS} is {value}, of schema {schema}")
        return int(value)

    def fail(self, what: str) -> NoReturn:
        raise LoadError(
            f"{self.file} is damaged: {what}", help="copy the artefact again, or export the model again"
        )

    def mapping(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.fail(f"{where} is {shown(value)}, expected an object")
        return value

    def table(self, value: Any, where: str, read: Callable[[Any, str], Any]) -> dict[str, Any]:
        return {name: read(item, f"{where}.{name}") for name, item in self.mapping(value, where).items()}

    def text(self, value: Any, where: str) -> str:
        if not isinstance(value, str):
            self.fail(f"{where} is {shown(value)}, expected a text")
        return value

    def count(self, value: Any, where: str) -> int:
        if type(value) is not int or not 0 <= value < 2**63:
            self.fail(f"{where} is {shown(value)}, expected a number from 0 to 2**63 - 1")
        return value

    def hex(self, value: Any, where: str, digits: int) -> str:
        if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            self.fail(f"{where} is {shown(value)}, expected {digits} hex digits")
        return value

    def numbers(self, value: Any, where: str) -> tuple[int, ...]:
        if not isinstance(value, list):
            self.fail(f"{where} is {shown(value)}, expected a list")
        return tuple(self.count(item, where) for item in value)

    def llm(self, value: Any) -> TextModel:
        found, names = self.mapping(value, "llm"), [field.name for field in fields(TextModel)]
        if sorted(found) != sorted(names):
            self.fail(f"llm has {shown(sorted(found))}")
        read: tuple[Any, ...] = (self.text, self.count, self.count, self.numbers)
        return TextModel(*(each(found[name], f"llm.{name}") for each, name in zip(read, names, strict=True)))

    def files(self, value: Any) -> dict[str, Digest]:
        found = {}
        for name, item in self.mapping(value, "files").items():
            where = f"files.{name}"
            if not re.fullmatch(r"(kernels/)?[\w][\w. +-]*", name) or name == MANIFEST:
                self.fail(f"{shown(name)} cannot be a file of an artefact")
            fields = self.mapping(item, where)
            if sorted(fields) != ["bytes", "crc32", "sha256"]:
                self.fail(f"{where} has {shown(sorted(fields))}")
            size = self.count(fields["bytes"], f"{where}.bytes")
            crcs = fields["crc32"]
            if not isinstance(crcs, list) or len(crcs) != -(-size // BLOCK_BYTES):
                self.fail(f"{where}.crc32 must have an entry for every {BLOCK_BYTES >> 20} MB")
            found[name] = Digest(
                size,
                self.hex(fields["sha256"], f"{where}.sha256", 64),
                tuple(int(self.hex(crc, f"{where}.crc32", 8), 16) for crc in crcs),
            )
        return found


def _digest_fields(digest: Digest) -> dict[str, Any]:
    return {
        "bytes": digest.size_bytes,
        "sha256": digest.sha256,
        "crc32": [f"{crc:08x}" for crc in digest.crc32],
    }
