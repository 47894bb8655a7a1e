# SPDX-License-Identifier: Apache-2.0
"""transformers logs what it thinks of tiny sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Many of the configurations log what they think of the sizes."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
