# SPDX-License-Identifier: Apache-2.0
"""Packages that extras install, and errors that say which where they are missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from nnfront.errors import LoadError


def package(name: str, extra: str, called: str = "") -> Any:
    """Return a package, or a module of ours that imports some. Raises LoadError without one of them that says which extra of nnfront's installs it, under the name that
    installers know: `called`, if that is another.
    """
    try:
        return import_module(name)
    except ImportError as error:
        what = called or error.name or name
        raise LoadError(
            f"the package {what!r} is not installed", help=f"pip install 'nnfront[{extra}]'"
        ) from None


def transformers() -> Any:
    """The package `transformers`: what models are compared with, and what prepares sounds and images. Raises LoadError without it."""
    found = package("transformers", "transformers")
    found.utils.logging.disable_progress_bar()
    return found
