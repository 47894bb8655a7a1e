# SPDX-License-Identifier: Apache-2.0
"""Where the kernels in C are used, and where not."""

from types import SimpleNamespace

import pytest

from nnfront.backends.cpu import extension
from nnfront.backends.cpu.extension import KERNELS, find_native, torch_library


def module(is_able: bool, taken: list) -> SimpleNamespace:
    kernels = " ".join(f"{name}/{count}" for name, count in KERNELS.items())
    return SimpleNamespace(
        is_able=is_able, kernels=kernels, use_openmp=lambda *entries: taken.extend(entries)
    )


def test_the_kernels_run_on_the_threads_of_torch():
    taken: list[int] = []
    stands_for_it = module(True, taken)
    assert find_native(stands_for_it, torch_library()) is stands_for_it
    assert len(taken) == 2
    assert all(taken)


def test_without_a_build_an_able_processor_or_openmp_there_are_no_kernels(monkeypatch):
    taken: list[int] = []
    assert find_native(None, torch_library()) is None
    assert find_native(module(False, taken), torch_library()) is None
    assert find_native(module(True, taken), None) is None
    monkeypatch.setattr(extension, "_OPENMP", ("no_such_name",))
    assert find_native(module(True, taken), torch_library()) is None
    assert not taken


@pytest.mark.parametrize("kernels", [None, "", "multiply/9 rms_norm/6"])
def test_kernels_of_another_source_are_not_called(kernels):
    taken: list[int] = []
    old = module(True, taken)
    if kernels is None:
        del old.kernels
    else:
        old.kernels = kernels
    with pytest.warns(
        UserWarning, match="kernels in C are older than nnfront and do not run: install it again"
    ):
        assert find_native(old, torch_library()) is None
    assert not taken
