# SPDX-License-Identifier: Apache-2.0
"""What is a target is what the list of targets says."""

import pytest

from nnfront.backends.registry import is_target, targets


@pytest.mark.parametrize(
    "text",
    [
        "cpu",
        "cuda",
        "cuda:sm_90",
        "cuda:sm_1",
        "cuda:0",
        "cuda:sm_90:1",
        "cpu:",
        "cpu:x",
        "",
        "abacus",
        "abacus:x",
    ],
)
def test_a_target_is_what_the_list_has(text: str) -> None:
    assert is_target(text) is (text in targets())
