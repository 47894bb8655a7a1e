# SPDX-License-Identifier: Apache-2.0
"""What a config.json says of how weights are quantised, and the proof that nothing of it is dropped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from nnfront.errors import LoadError
from nnfront.files import shown


class Settings:
    """A JSON object whose keys are asked for one by one; what nobody has asked for, and is not switched off, is refused.

    `ignored` collects patterns of tensors that weights are not made of; `help` is what the user is told who has what is refused.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        help: str = "load a checkpoint that is not quantised, or take out keys that do not change what weights stand for",
    ) -> None:
        self.values, self.where, self.help = values, where, help
        self.asked: set[str] = set()
        self.problems: list[str] = []
        self.ignored: list[str] = []

    def get(self, key: str, default: Any = None, only: Collection[Any] | None = None) -> Any:
        """The value of a key; with `only`, one of these or a problem."""
        self.asked.add(key)
        value = self.values.get(key)
        value = default if value is None else value
        if only is not None and not any(value == each and type(value) is type(each) for each in only):
            *others, last = [shown(each) for each in only]
            expected = f"{', '.join(others)} or {last}" if others else last
            self.problems.append(f"{key} is {shown(value)}, expected {expected}")
        return value

    def positive(self, key: str, default: int | None = None, *, or_all: bool = False) -> int | None:
        """An int of at least 1; None for all if -1 may say that."""
        value = self.get(key, default)
        if or_all and (value is None or value == -1):
            return None
        if type(value) is not int or not 1 <= value < 2**31:
            self.problems.append(
                f"{key} is {shown(value)}, expected an int >= 1{', or -1' if or_all else ''}"
            )
            return 1
        return value

    def within(self, key: str) -> Settings:
        """The object under a key; its problems are told here."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            self.problems.append(f"{key} is {shown(value)}, expected an object")
            value = {}
        inner = Settings(value, f"{self.where}.{key}")
        inner.problems, inner.ignored = self.problems, self.ignored
        return inner

    def unused(self, *keys: str) -> None:
        """Keys that have no say in what weights are: how the library that wrote them ran, or runs."""
        self.asked.update(keys)

    def close(self) -> None:
        """Note the keys that nobody has asked for."""
        for key, value in self.values.items():
            if key not in self.asked and value not in (None, False, "", [], {}):
                self.problems.append(f"{key} is {shown(value)}, and no reader knows the key")

    def check(self) -> None:
        """Raise LoadError for all problems, keys that nobody has asked for among them."""
        self.close()
        if self.problems:
            raise LoadError(
                f"{self.where} says what is not read",
                details=self.problems,
                help=self.help,
            )
