# SPDX-License-Identifier: Apache-2.0
"""Where the kernels in C are used, and where not."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from nnfront.backends.cpu import extension
from nnfront.backends.cpu.extension import TABLE, find_native, torch_library


def module(is_able: bool, taken: list) -> SimpleNamespace:
    return SimpleNamespace(
        is_able=is_able, table=TABLE.read_text(), use_torch=lambda *entries: taken.extend(entries)
    )


def test_the_kernels_run_on_tensors_and_threads_of_torch():
    taken: list[int] = []
    stands_for_it = module(True, taken)
    assert find_native(stands_for_it, torch_library()) is stands_for_it
    assert len(taken) == 3
    assert all(taken)


def test_without_a_build_an_able_processor_tensors_or_openmp_there_are_no_kernels(monkeypatch):
    taken: list[int] = []
    assert find_native(None, torch_library()) is None
    assert find_native(module(False, taken), torch_library()) is None
    assert find_native(module(True, taken), None) is None
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert find_native(module(True, taken), torch_library()) is None
    monkeypatch.undo()
    monkeypatch.setattr(extension, "_OPENMP", ("no_such_name",))
    assert find_native(module(True, taken), torch_library()) is None
    assert not taken


@pytest.mark.parametrize("change", ["nothing", "another name", "another size", "none"])
def test_kernels_of_another_source_are_not_called(change):
    taken: list[int] = []
    old = module(True, taken)
    if change == "none":
        del old.table
    else:
        text = {"nothing": "", "another name": old.table.replace("rotate", "turn")}
        old.table = text.get(change, old.table.replace("IN(both, 4 *", "IN(both, 2 *"))
    with pytest.warns(
        UserWarning, match="kernels in C are older than nnfront and do not run: install it again"
    ):
        assert find_native(old, torch_library()) is None
    assert not taken


@pytest.mark.skipif(
    extension.NATIVE is None, reason="no C compiler at installation, or a processor without AVX512_BF16"
)
@pytest.mark.parametrize("major", [0, 2])
def test_tensors_of_another_version_are_not_read(major):
    table = (ctypes.c_uint64 * 8)(major, *[1] * 7)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    with pytest.raises(ValueError, match=f"DLPack of version 1 is wanted, torch has {major}"):
        extension.NATIVE.use_torch(make(ctypes.addressof(table), b"dlpack_exchange_api", None), 0, 0)
    with pytest.raises(ValueError, match="PyCapsule"):
        extension.NATIVE.use_torch(None, 0, 0)
    with pytest.raises(TypeError, match="use_torch takes 3 arguments, got 1"):
        extension.NATIVE.use_torch(None)
