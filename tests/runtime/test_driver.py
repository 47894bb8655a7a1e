# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver through ctypes: what arrives there, by the prototypes of cuda.h, and what its errors become."""

from __future__ import annotations

import ctypes
import re

import pytest
from fake_driver import CONTEXT, FakeDriver, prototype

from nnfront.backends.cuda.ahead import driver as driver_module
from nnfront.backends.cuda.ahead.driver import PROTOTYPES, Driver, launch_config, version_text
from nnfront.errors import LoadError, RunError

CUBIN = b"\x7fELF machine code"


def launched(library: FakeDriver, **options: object) -> None:
    driver = Driver(0, library)
    kernel = driver.load(CUBIN, "kernel", 0, "a.cubin")
    config = launch_config(128, 100_000, **options)  # type: ignore[arg-type]
    config.grid[:] = 7, 8, 9
    config.stream = 0x7FFF_1234_5678
    value = ctypes.c_uint64(0x0123_4567_89AB_CDEF)
    driver.launch("kernel", kernel, config, (ctypes.c_void_p * 1)(ctypes.addressof(value)))


@pytest.mark.parametrize("name", PROTOTYPES)
def test_every_parameter_has_the_size_that_the_header_says(name: str) -> None:
    assert [ctypes.sizeof(kind) for kind in PROTOTYPES[name]] == [ctypes.sizeof(k) for k in prototype(name)]


def test_a_launch_arrives_as_it_was_asked_for() -> None:
    library = FakeDriver(sizes={CUBIN: (8,)})
    launched(library)
    (launch,) = library.launches
    assert (launch.kernel, launch.grid, launch.block) == ("kernel", (7, 8, 9), (128, 1, 1))
    assert (launch.shared, launch.stream, launch.attributes) == (100_000, 0x7FFF_1234_5678, {})
    assert launch.parameters == [(0x0123_4567_89AB_CDEF).to_bytes(8, "little")]


@pytest.mark.parametrize(
    ("options", "attributes"),
    [
        ({"pdl": True}, {6: (1, 0, 0)}),
        ({"cooperative": True}, {2: (1, 0, 0)}),
        ({"cluster": 2}, {4: (2, 1, 1), 5: (1, 0, 0)}),
        (
            {"cluster": 4, "pdl": True, "cooperative": True},
            {6: (1, 0, 0), 2: (1, 0, 0), 4: (4, 1, 1), 5: (1, 0, 0)},
        ),
    ],
    ids=str,
)
def test_a_launch_has_the_attributes_that_it_needs(
    options: dict[str, object], attributes: dict[int, object]
) -> None:
    library = FakeDriver(sizes={CUBIN: (8,)})
    launched(library, **options)
    assert library.launches[0].attributes == attributes


def test_a_thread_without_a_context_gets_the_primary_one() -> None:
    library = FakeDriver(sizes={CUBIN: (8,)})
    launched(library)
    assert library.context == CONTEXT
    assert library.launches[0].context == CONTEXT


def test_a_launch_is_in_the_context_of_its_gpu_and_the_threads_own_comes_back() -> None:
    library = FakeDriver(sizes={CUBIN: (8,)}, context=0x77)  # another GPU's
    launched(library)
    assert library.launches[0].context == CONTEXT
    assert library.context == 0x77


def test_the_context_is_looked_up_once() -> None:
    library = FakeDriver(sizes={CUBIN: (8,)})
    driver = Driver(0, library)
    kernel = driver.load(CUBIN, "kernel", 0, "a.cubin")
    value = ctypes.c_uint64(1)
    for _ in range(3):
        driver.launch("kernel", kernel, launch_config(32, 0), (ctypes.c_void_p * 1)(ctypes.addressof(value)))
    names = [name for name, *_ in library.calls]
    assert names.count("cuDevicePrimaryCtxRetain") == 1
    assert names.count("cuCtxSetCurrent") == 1


def test_machine_code_that_is_there_is_not_loaded_again() -> None:
    """A session that is made anew has the same kernels, in other bytes of the same content."""
    library = FakeDriver()
    driver = Driver(0, library)
    first, other = driver.load(CUBIN, "kernel", 0, "a.cubin"), driver.load(CUBIN, "another", 0, "a.cubin")
    again = driver.load(bytes(bytearray(CUBIN)), "kernel", 0, "b.cubin")
    assert again.value == first.value != other.value
    assert [name for name, *_ in library.calls].count("cuModuleLoadData") == 2


@pytest.mark.parametrize(("size", "asked"), [(49_152, []), (49_153, [49_153])])
def test_more_shared_memory_than_usual_is_asked_for(size: int, asked: list[int]) -> None:
    library = FakeDriver()
    Driver(0, library).load(CUBIN, "kernel", size, "a.cubin")
    assert [call[3] for call in library.calls if call[0] == "cuFuncSetAttribute"] == asked
    assert len([call for call in library.calls if call[0] == "cuFuncSetCacheConfig"]) == len(asked)


def test_a_driver_says_its_version_and_its_gpu() -> None:
    driver = Driver(1, FakeDriver(version=12080, capability=(10, 0)))
    assert (driver.version, version_text(driver.version), driver.arch) == (12080, "12.8", "sm_100")


def described(library: FakeDriver, shape: list[int], strides: list[int], **options: object) -> bytes:
    memory = (ctypes.c_uint8 * 256)()
    at = -ctypes.addressof(memory) % 128
    box = [64] * len(shape)
    Driver(0, library).encode_map(
        ctypes.addressof(memory) + at,
        0x7000_0000_0100,
        shape,
        strides,
        box=box,
        element=9,
        element_bytes=2,
        swizzle=3,
        **options,  # type: ignore[arg-type]
    )
    return bytes(memory[at : at + 128])


def test_a_tensor_map_begins_with_the_fastest_axis() -> None:
    library = FakeDriver()
    described(library, [5, 300, 70], [30_000, 80, 1])
    (found,) = library.maps
    assert found == {
        "element": 9, "address": 0x7000_0000_0100, "sizes": [70, 300, 5], "steps": [160, 60_000], "box": [64, 64, 64],
        "ones": [1, 1, 1], "interleave": 0, "swizzle": 3, "promotion": 2, "fill": 0,
    }  # fmt: skip


def test_a_tensor_is_described_to_its_own_gpu_and_the_threads_comes_back() -> None:
    library = FakeDriver(context=7)
    described(library, [8, 64], [64, 1])
    done = [call[:2] for call in library.calls if call[0] in ("cuCtxSetCurrent", "cuTensorMapEncodeTiled")]
    assert [name for name, _ in done] == ["cuCtxSetCurrent", "cuTensorMapEncodeTiled", "cuCtxSetCurrent"]
    assert (done[0][1], done[2][1], library.context) == (CONTEXT, 7, 7)


def test_what_lies_outside_of_a_tensor_may_be_nan() -> None:
    library = FakeDriver()
    described(library, [8, 64], [64, 1], nan=True)
    assert library.maps[0]["fill"] == 1


@pytest.mark.parametrize(
    ("version", "rows", "cleared"),
    [(13010, 1023, True), (13010, 1024, True), (13010, 1025, False), (13020, 8, False), (12080, 8, True)],
)
def test_the_maps_of_small_tensors_are_mended_for_drivers_that_need_it(
    version: int, rows: int, cleared: bool
) -> None:
    # Rows of 64 elements of 2 bytes: 1024 of them are 128 KiB.
    written = described(FakeDriver(version=version), [rows, 64], [64, 1])
    second = int.from_bytes(written[8:16], "little")
    assert second == (2**64 - 1 - (1 << 21) if cleared else 2**64 - 1)
    assert written[:8] == b"\1" * 8
    assert written[16:] == b"\xff" * 112


FAILURES = {
    "cuInit": (1, "the CUDA driver could not start\n  CUDA_ERROR_INVALID_VALUE (1): the text of invalid_value"),
    "cuDriverGetVersion": (1, "the CUDA driver could not say its version\n  CUDA_ERROR_INVALID_VALUE (1): the text of invalid_value"),
    "cuDeviceGet": (1, "the CUDA driver could not find GPU 0\n  CUDA_ERROR_INVALID_VALUE (1): the text of invalid_value"),
    "cuDevicePrimaryCtxRetain": (
        2,
        "the CUDA driver could not open the GPU\n  CUDA_ERROR_OUT_OF_MEMORY (2): the text of out_of_memory\n"
        "  help: close what else uses the GPU, or take smaller batches",
    ),
    "cuModuleLoadData": (
        200,
        "the CUDA driver could not load kernel from a.cubin\n  CUDA_ERROR_INVALID_IMAGE (200): the text of invalid_image\n"
        "  help: the machine code is for another GPU, or damaged",
    ),
    "cuModuleGetFunction": (1, "the CUDA driver could not load kernel from a.cubin\n  CUDA_ERROR_INVALID_VALUE (1): the text of invalid_value"),
    "cuLaunchKernelEx": (
        700,
        "the CUDA driver could not launch kernel\n  CUDA_ERROR_ILLEGAL_ADDRESS (700): the text of illegal_address\n"
        "  help: a kernel that was launched before has failed; CUDA_LAUNCH_BLOCKING=1 shows which",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
def test_what_the_driver_refuses_is_an_error_that_says_what_was_being_done(name: str) -> None:
    code, text = FAILURES[name]
    kind = RunError if name in ("cuDevicePrimaryCtxRetain", "cuLaunchKernelEx") else LoadError
    with pytest.raises(kind, match=re.escape(text) + "$"):
        launched(FakeDriver(sizes={CUBIN: (8,)}, fails={name: code}))


def test_shared_memory_that_the_gpu_does_not_have_is_an_error() -> None:
    with pytest.raises(
        LoadError, match="could not give kernel 300000 bytes of shared memory\n  CUDA_ERROR_INVALID_VALUE"
    ):
        Driver(0, FakeDriver(fails={"cuFuncSetAttribute": 1})).load(CUBIN, "kernel", 300_000, "a.cubin")


def test_a_tensor_that_cannot_be_described_is_an_error() -> None:
    what = r"could not describe a tensor of \[8, 64\] with strides \[64, 1\] at 0x700000000100\n  CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(RunError, match=what):
        described(FakeDriver(fails={"cuTensorMapEncodeTiled": 1}), [8, 64], [64, 1])


def test_an_error_without_a_name_is_still_one() -> None:
    library = FakeDriver(fails={"cuInit": 999, "cuGetErrorName": 1, "cuGetErrorString": 1})
    with pytest.raises(LoadError, match=r"could not start\n  unknown \(999\): unknown$"):
        Driver(0, library)


def test_a_driver_without_a_function_is_too_old() -> None:
    what = "the CUDA driver here has no cuTensorMapEncodeTiled\n  help: it is too old: install one for CUDA 12 or newer"
    with pytest.raises(LoadError, match=what):
        Driver(0, FakeDriver(lacks=frozenset({"cuTensorMapEncodeTiled"})))


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    what = "there is no CUDA driver here\n  libcuda.so.1: cannot open shared object file\n  help: install NVIDIA's driver, or compile for 'cpu'"
    with pytest.raises(LoadError, match=what):
        Driver()
