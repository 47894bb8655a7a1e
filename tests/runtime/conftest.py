# SPDX-License-Identifier: Apache-2.0
"""Lets tests here record with the tape of the kernels' tests, and run kernels in C for each set of instructions that the processor has."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from few_of import few_of

from nnfront.backends.cpu.extension import NATIVE

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))


@pytest.fixture(scope="module", params=few_of(NATIVE.sets if NATIVE else ["none"]))
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the tests of a module once for each set of instructions: in `make test` for the fastest."""
    if NATIVE is not None:
        NATIVE.use_set(request.param)
    yield request.param
    if NATIVE is not None:
        NATIVE.use_set(NATIVE.sets[0])
