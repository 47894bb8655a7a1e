# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet, and the one form they all take.

    NnfrontError
      DimError       a dim expression, a fact about a dim, or a comparison of dims is wrong
      SpecError      the caller's spec does not fit the method
      TraceError     the method did something that cannot be traced
        UnknownName  an attribute or function that does not exist; an AttributeError too, so that hasattr answers
        WrongUse     a traced value where Python or a library wants another; a TypeError too
      InferError     an op got operands it is not defined for
        WrongCall    an op was called with arguments that it does not have; a TypeError too
      VerifyError    IR breaks a numbered rule
      ParseError     IR text is not well formed
      PassError      a pass's requirement was not met
      LowerError     no kernel or reference for a call
      LoadError      weights or files do not match what the model declares
      RunError       inputs do not match the signature of the method that was called
        Busy         a server has as many requests waiting as it takes

A message has up to four parts: *what* is wrong in one sentence, *details* (got, expected; one line each), *where* (module
path, method, source line) and *help* (what to do about it).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST_LINE = 2000
"""Characters of one line of a message: it may quote what somebody else has written into a file."""


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}... ({len(line)} characters)"


class NnfrontError(Exception):
    """Base of all errors that a user's mistake can cause.

    The text is `what`, then one indented line for each of `details`, then `at where`, then `help: help`.
    """

    def __init__(self, what: str, *, details: Iterable[str] = (), where: str = "", help: str = "") -> None:
        self.what = _cut(what)
        self.details = tuple(map(_cut, details))
        self.where = where
        self.help = help
        super().__init__(self.what)

    def __str__(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.details)]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)


class DimError(NnfrontError):
    """A dim expression, a fact about a dim, or a comparison of dims is wrong."""


class SpecError(NnfrontError):
    """The caller's spec does not fit the method."""


class TraceError(NnfrontError):
    """The method did something that cannot be traced."""


class UnknownName(TraceError, AttributeError):
    """A model asks for an attribute or function that does not exist."""


class WrongUse(TraceError, TypeError):
    """Python or a library was given a traced value where it wants another."""


class InferError(NnfrontError):
    """An op got operands it is not defined for."""


class WrongCall(InferError, TypeError):
    """An op was called with arguments that do not fit its signature."""


class VerifyError(NnfrontError):
    """IR breaks a numbered rule of the verifier."""


class ParseError(NnfrontError):
    """IR text is not well formed."""


class PassError(NnfrontError):
    """A pass's requirement was not met."""


class LowerError(NnfrontError):
    """No kernel and no reference can run a call."""


class LoadError(NnfrontError):
    """Weights or files do not match what the model declares."""


class RunError(NnfrontError):
    """Inputs do not match the signature of the method that was called."""


class Busy(RunError):
    """A server has as many requests waiting as it takes."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Return `did you mean 'x'?` for the name among `known` that is most like `name`, empty if none is."""
    near = difflib.get_close_matches(str(name), known, 1, cutoff=0.7)
    return f"did you mean {near[0]!r}?" if near else ""
