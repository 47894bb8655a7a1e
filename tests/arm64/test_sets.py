# SPDX-License-Identifier: Apache-2.0
"""Which sets of instructions run on which arm64, by processors that the emulator knows: part of `make test-arm64`."""

import sys

import pytest

emulated = sys.modules.get("emulated")  # the plugin
pytestmark = pytest.mark.skipif(emulated is None, reason="make test-arm64")


@pytest.mark.parametrize(
    ("processor", "sets"),
    [
        ("max", ["neon_bf16", "neon_dotprod", "neon", "portable"]),
        ("neoverse-n1", ["neon_dotprod", "neon", "portable"]),
        ("cortex-a72", ["neon", "portable"]),
    ],
)
def test_a_processor_runs_what_it_has_and_the_fastest_first(processor, sets):
    assert emulated.sets_of(processor) == sets
