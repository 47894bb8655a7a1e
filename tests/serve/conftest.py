# SPDX-License-Identifier: Apache-2.0
"""The shipped checkpoint, loaded once, and what serves it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import FOLDER, LIMITS, Client

import nnfront as nn
from nnfront.serve.engine import Engine


@pytest.fixture(scope="session")
def llm() -> nn.LLM:
    return nn.LLM.load(FOLDER)


@pytest.fixture(scope="session")
def text(llm: nn.LLM) -> list[int]:
    """Tokens of the held-out text."""
    return llm.tokenizer.encode((FOLDER / "heldout.txt").read_text())


@pytest.fixture
def engine(llm: nn.LLM) -> Iterator[Engine]:
    with Engine(llm, LIMITS) as engine:
        yield engine


@pytest.fixture
def client(engine: Engine) -> Client:
    return Client(engine)
