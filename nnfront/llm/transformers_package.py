# SPDX-License-Identifier: Apache-2.0
"""The package `transformers`, where it is installed: what models are compared with, and what prepares sounds and images."""

from __future__ import annotations

from typing import Any

from nnfront.errors import LoadError


def transformers() -> Any:
    """Return the package. Raises LoadError without it."""
    try:
        import transformers as found
    except ImportError:
        raise LoadError(
            "the package 'transformers' is not installed", help="pip install 'nnfront[transformers]'"
        ) from None
    package: Any = found
    package.utils.logging.disable_progress_bar()
    return package
