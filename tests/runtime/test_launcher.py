# SPDX-License-Identifier: Apache-2.0
"""Launching from machine code: arguments arrive as they are, what is not there is compiled and says why, what cannot run is refused."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from nnfront_kernels import ahead, common, matmul_tma, rms_norm
from nnfront_kernels.common import Plan, launched_by
from triton.backends.nvidia import driver as tritons

from nnfront.backends.cuda.ahead.cubin import CompiledKernels, Cubin, Parameter, TensorMap, read_cubin
from nnfront.backends.cuda.ahead.driver import Driver
from nnfront.backends.cuda.ahead.launcher import Launcher, Layout, launching
from nnfront.errors import LoadError, RunError

SIZES = {"pointer": (8,), "i32": (4,), "i64": (8,), "f32": (4,), "descriptor": (128, 4, 4, 8, 8)}
MAP = TensorMap(9, 2, 3, (64, 64))


def cubin(*parameters: Parameter, key: str = "0123456789abcdef", **facts: Any) -> Cubin:
    plain = Cubin(
        key,
        "kernel",
        "sm_90",
        "3.9.0",
        "13.4",
        128,
        1,
        0,
        0,
        False,
        False,
        parameters,
        "kernel 01234567 for sm_90",
        key.encode(),
    )
    return replace(plain, **facts)


def sizes_of(kernel: Cubin) -> tuple[int, ...]:
    return (*(size for parameter in kernel.parameters for size in SIZES[parameter.kind]), 8, 8)


def launcher_of(
    *cubins: Cubin, library: FakeDriver | None = None, **options: Any
) -> tuple[Launcher, FakeDriver]:
    library = library or FakeDriver()
    library.sizes = {c.image: sizes_of(c) for c in cubins}
    return Launcher(
        CompiledKernels("sm_90", cubins, **options), Driver(0, library), stream=lambda: 0x55
    ), library


def listed(plan: Plan, *parameters: Parameter, **facts: Any) -> Cubin:
    """The kernel of a plan as an artefact would have it."""
    about = ahead.describe(plan, "sm_90")
    return cubin(
        *parameters, key=ahead.key_of(plan, "sm_90"), kernel=plan.kernel.__name__, about=about, **facts
    )


def norm(rows: int = 3, size: int = 64, offset: int = 0) -> Plan:
    x = torch.zeros(rows * size + offset, dtype=torch.float16)[offset:].view(rows, size)
    return rms_norm.plan(x, torch.zeros(size, dtype=torch.float16), eps=1e-6, arch="sm_90")


def norm_parameters(plan: Plan) -> list[Parameter]:
    kinds = {
        name: "f32" if isinstance(value, float) else "i32" if isinstance(value, int) else "pointer"
        for name, value in plan.arguments.items()
    }
    signature = ahead.specialize(plan)[0]
    return [Parameter(name, kinds[name]) for name, kind in signature.items() if kind != "constexpr"]


VALUES: dict[str, tuple[Any, Callable[[Any], bytes]]] = {
    "pointer": (st.integers(0, 2**47), lambda value: value.to_bytes(8, "little")),
    "i32": (st.integers(-(2**31), 2**31 - 1), lambda value: (value % 2**32).to_bytes(4, "little")),
    "i64": (st.integers(-(2**63), 2**63 - 1), lambda value: (value % 2**64).to_bytes(8, "little")),
    "f32": (st.floats(width=32), lambda value: struct.pack("<f", value)),
}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(sorted(VALUES)).flatmap(lambda kind: st.tuples(st.just(kind), VALUES[kind][0])),
        max_size=20,
    )
)
def test_every_argument_arrives_bit_for_bit(given_values: list[tuple[str, Any]]) -> None:
    kernel = cubin(*(Parameter(f"a{i}", kind) for i, (kind, _) in enumerate(given_values)))
    launcher, library = launcher_of(kernel)
    arguments = {
        f"a{i}": SimpleNamespace(data_ptr=lambda value=value: value) if kind == "pointer" else value
        for i, (kind, value) in enumerate(given_values)
    }
    launcher.loaded(kernel)(SimpleNamespace(grid=(2, 3), arguments=arguments))
    (launch,) = library.launches
    assert launch.parameters == [
        *(VALUES[kind][1](value) for kind, value in given_values),
        bytes(8),
        bytes(8),
    ]
    assert (launch.grid, launch.block, launch.stream) == ((2, 3, 1), (128, 1, 1), 0x55)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(SIZES)), max_size=20))
def test_parameters_lie_apart_and_aligned(kinds: list[str]) -> None:
    layout = Layout.of([Parameter("a", kind, MAP if kind == "descriptor" else None) for kind in kinds])
    sizes = [*(size for kind in kinds for size in SIZES[kind]), 8, 8]
    assert len(layout.offsets) == len(sizes)
    end = 0
    for offset, size in zip(layout.offsets, sizes, strict=True):
        assert offset % size == 0
        assert 0 <= offset - end < size
        end = offset + size
    assert layout.format.size == end


def test_a_kernel_is_loaded_once_and_launched_every_time() -> None:
    plan = norm()
    launcher, library = launcher_of(listed(plan, *norm_parameters(plan), shared_bytes=50_000))
    with launched_by(launcher):
        for _ in range(3):
            plan.launch()
    assert [name for name, *_ in library.calls].count("cuModuleLoadData") == 1
    assert len(library.launches) == 3
    assert launcher.launches == {ahead.key_of(plan, "sm_90"): 3}
    assert launcher.compiled_here == {}
    pointer = plan.arguments["x_ptr"].data_ptr().to_bytes(8, "little")
    assert {(launch.kernel, launch.shared, launch.parameters[0]) for launch in library.launches} == {
        ("norm_kernel", 50_000, pointer)
    }


def test_a_grid_without_blocks_is_not_launched() -> None:
    kernel = cubin()
    launcher, library = launcher_of(kernel)
    launcher.loaded(kernel)(SimpleNamespace(grid=(4, 0), arguments={}))
    assert library.launches == []


def test_blocks_of_a_cluster_are_launched_together() -> None:
    kernel = cubin(cluster=2, pdl=True)
    launcher, library = launcher_of(kernel)
    launcher.loaded(kernel)(SimpleNamespace(grid=(4, 5), arguments={}))
    assert library.launches[0].grid == (8, 5, 1)
    assert library.launches[0].attributes == {6: (1, 0, 0), 4: (2, 1, 1), 5: (1, 0, 0)}


def test_a_kernel_gets_the_scratch_memory_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = cubin(scratch_bytes=100)
    launcher, library = launcher_of(kernel)
    made: list[torch.Tensor] = []
    scratch = Launcher.scratch

    def kept(self: Launcher, size_bytes: int) -> torch.Tensor | None:
        made.append(scratch(self, size_bytes))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(Launcher, "scratch", kept)
    launcher.loaded(kernel)(SimpleNamespace(grid=(4, 5), arguments={}))
    assert made[0].nbytes == 2000
    assert library.launches[0].parameters == [made[0].data_ptr().to_bytes(8, "little"), bytes(8)]


def test_threads_do_not_share_the_memory_of_their_arguments() -> None:
    kernel = cubin(*(Parameter(f"a{i}", "i64") for i in range(8)))
    launcher, library = launcher_of(kernel)
    run = launcher.loaded(kernel)

    def work(first: int) -> None:
        for number in range(first, first + 150):
            run(SimpleNamespace(grid=(1,), arguments=dict.fromkeys([f"a{i}" for i in range(8)], number)))

    threads = [Thread(target=work, args=(first * 1000,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(library.launches) == 600
    assert all(len(set(launch.parameters[:8])) == 1 for launch in library.launches)


def test_tensor_descriptors_are_made_as_triton_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.zeros(70, 96, dtype=torch.bfloat16)[:, :64], torch.zeros(304, 64, dtype=torch.bfloat16)
    plan = matmul_tma.plan(x, w, arch="sm_90")
    metadata = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [128, 64], "fp4_padded": False}
    asked: list[tuple[Any, ...]] = []
    stand_in = SimpleNamespace(
        active=SimpleNamespace(
            utils=SimpleNamespace(fill_tma_descriptor_tiled=lambda *args: asked.append(args))
        )
    )
    monkeypatch.setattr(tritons.triton.runtime, "driver", stand_in)
    rest = tritons.make_tensordesc_arg(plan.arguments["x_desc"], metadata, None)[1:]
    monkeypatch.undo()
    (address, swizzle, size, element, box, shape, strides, padding) = asked[0]

    kernel = cubin(Parameter("x_desc", "descriptor", TensorMap(element, size, swizzle, tuple(box))))
    launcher, library = launcher_of(kernel)
    launcher.loaded(kernel)(SimpleNamespace(grid=(1,), arguments={"x_desc": plan.arguments["x_desc"]}))
    (found,) = library.maps
    assert found["address"] == address == x.data_ptr()
    assert (found["element"], found["swizzle"], found["fill"]) == (element, swizzle, padding)
    # driver.c of Triton turns the axes round and leaves out the fastest axis' stride.
    assert found["sizes"] == list(shape)[::-1]
    assert found["box"] == list(box)[::-1]
    assert found["steps"] == [size * stride for stride in list(strides)[-2::-1]]
    made, *numbers = library.launches[0].parameters[:5]
    assert made[:8] == b"\1" * 8  # what the fake driver wrote into the map
    assert numbers == [n.to_bytes(width, "little") for n, width in zip(rest, (4, 4, 8, 8), strict=True)]


def test_the_compilers_element_types_are_those_of_the_driver() -> None:
    assert ahead._DRIVER_TYPES.items() <= tritons.TMA_DTYPE_DEVICE_TO_HOST.items()


@pytest.fixture
def compiled_by_triton(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were given to Triton."""
    plans: list[Plan] = []
    monkeypatch.setattr(common, "jit", plans.append)
    return plans


def test_a_kernel_that_the_artefact_does_not_have_is_compiled_and_says_so(
    compiled_by_triton: list[Plan],
) -> None:
    launcher, library = launcher_of(cubin())
    plan = norm()
    with launching(launcher):
        plan.launch()
        plan.launch()
    assert compiled_by_triton == [plan, plan]
    assert library.launches == []
    assert launcher.compiled_here == {ahead.key_of(plan, "sm_90"): "the artefact has no norm_kernel"}


def test_the_note_of_the_export_says_why_a_kernel_is_missing(compiled_by_triton: list[Plan]) -> None:
    launcher, _ = launcher_of(cubin(), notes={"look": "take at model: nothing says what 'n' is"})
    launcher(norm())
    assert list(launcher.compiled_here.values()) == [
        "the artefact has no norm_kernel; look: take at model: nothing says what 'n' is"
    ]


def test_a_specialisation_that_was_not_foreseen_says_what_is_different(
    compiled_by_triton: list[Plan],
) -> None:
    foreseen, found = norm(), norm(offset=1)
    launcher, _ = launcher_of(listed(foreseen, *norm_parameters(foreseen)))
    launcher(found)
    (reason,) = launcher.compiled_here.values()
    assert reason == "the artefact has it otherwise: x_ptr *fp16 (there: x_ptr *fp16 % 16)"


def test_a_kernel_whose_source_has_changed_is_compiled(compiled_by_triton: list[Plan]) -> None:
    plan = norm()
    old = listed(plan, *norm_parameters(plan))
    changed = re.sub(r"^(\w+) \w{8}", r"\1 00000000", old.about)
    launcher, _ = launcher_of(replace(old, key="0" * 16, about=changed))
    launcher(plan)
    assert list(launcher.compiled_here.values()) == [
        "the artefact has norm_kernel from another version of nnfront's source"
    ]


def test_the_table_says_what_ran_and_where_it_came_from(compiled_by_triton: list[Plan]) -> None:
    plan, other = norm(), norm(offset=1)
    launcher, _ = launcher_of(listed(plan, *norm_parameters(plan)))
    for each in (plan, plan, other):
        launcher(each)
    key, stranger = (ahead.key_of(each, "sm_90") for each in (plan, other))
    rows = {
        f"  norm_kernel {key}  2 launches  from the artefact",
        f"  norm_kernel {stranger}  1 launches  compiled here: {launcher.compiled_here[stranger]}",
    }
    first, *lines = str(launcher).split("\n")
    assert first == "1 kernels for sm_90, 0.00 MB, compiled by Triton 3.9.0 and CUDA 13.4"
    assert set(lines) == rows


def test_kernels_of_another_gpu_are_refused() -> None:
    what = "the kernels were compiled for sm_90, the GPU here is sm_80\n  help: export the model for 'cuda:sm_80', or for 'cuda'"
    with pytest.raises(LoadError, match=what):
        launcher_of(cubin(), library=FakeDriver(capability=(8, 0)))


def test_a_driver_that_is_too_old_is_refused() -> None:
    what = (
        "the driver here is too old for the kernels: it is for CUDA 12.9\n"
        "  they were compiled by CUDA 13.4, expected a driver for 13.0 or newer\n"
        "  help: update the driver, or export the model for 'cuda', which compiles on the GPU's machine"
    )
    with pytest.raises(LoadError, match=re.escape(what)):
        launcher_of(cubin(cuda="12.4"), cubin(), library=FakeDriver(version=12090))


@pytest.mark.parametrize(
    ("version", "cuda"), [(13000, "13.4"), (13040, "13.0"), (14000, "13.4"), (12000, "12.9")]
)
def test_any_driver_of_the_same_major_version_or_a_newer_one_will_do(version: int, cuda: str) -> None:
    launcher_of(cubin(cuda=cuda), library=FakeDriver(version=version))


def test_machine_code_that_the_driver_does_not_take_is_an_error_that_names_the_file() -> None:
    plan = norm()
    kernel = listed(plan, *norm_parameters(plan))
    launcher, _ = launcher_of(kernel, library=FakeDriver(fails={"cuModuleLoadData": 200}))
    with pytest.raises(
        LoadError,
        match=f"could not load norm_kernel from kernels/{kernel.key}.cubin\n  CUDA_ERROR_INVALID_IMAGE",
    ):
        launcher(plan)


def test_a_launch_that_fails_is_an_error_and_the_next_one_is_tried() -> None:
    plan = norm()
    launcher, library = launcher_of(
        listed(plan, *norm_parameters(plan)), library=FakeDriver(fails={"cuLaunchKernelEx": 700})
    )
    with pytest.raises(RunError, match="could not launch norm_kernel"):
        launcher(plan)
    library.fails.clear()
    launcher(plan)
    assert len(library.launches) == 1


GOOD = {
    "key": "0123456789abcdef", "kernel": "k", "arch": "sm_90", "triton": "3.9.0", "cuda": "13.4", "threads": 128, "cluster": 1,
    "shared_bytes": 0, "scratch_bytes": 0, "cooperative": False, "pdl": False, "about": "k",
    "parameters": [
        {"name": "x", "kind": "pointer"},
        {"name": "d", "kind": "descriptor", "element": 9, "element_bytes": 2, "swizzle": 3, "box": [64, 64]},
    ],
}  # fmt: skip


def test_fields_give_the_kernel_and_the_kernel_its_fields() -> None:
    assert read_cubin(GOOD, b"code").fields() == GOOD
    assert read_cubin(GOOD, b"code").parameters == (
        Parameter("x", "pointer"),
        Parameter("d", "descriptor", TensorMap(9, 2, 3, (64, 64))),
    )


BAD: list[tuple[dict[str, Any], str]] = [
    ({"key": "../evil"}, "'../evil' is not the key of a kernel"),
    ({"kernel": 1}, "kernel is 1, expected a text"),
    ({"cuda": "13"}, "cuda is '13', expected a version such as '13.0'"),
    ({"threads": 0}, "threads is 0, expected a number from 1 to 1024"),
    ({"threads": True}, "threads is True, expected a number from 1 to 1024"),
    ({"shared_bytes": -1}, "shared_bytes is -1, expected a number from 0 to 1048576"),
    ({"pdl": 0}, "pdl is 0, expected true or false"),
    ({"parameters": {}}, r"parameters are \{\}, expected a list"),
    (
        {"parameters": [{"name": "x", "kind": "double"}]},
        "a parameter is of kind 'double', expected one of pointer, i32",
    ),
    ({"parameters": ["x"]}, "a parameter is of kind None, expected one of pointer"),
    (
        {"parameters": [{"name": "x", "kind": "i32", "box": []}]},
        "a parameter has 'box', 'kind', 'name'\n  expected 'kind', 'name'",
    ),
    (
        {"parameters": [{"name": "x", "kind": "descriptor"}]},
        "a descriptor has 'kind', 'name'\n  expected 'box', 'element'",
    ),
    (
        {"parameters": [{**GOOD["parameters"][1], "box": []}]},
        r"box is \[\], expected a list of 1 to 5 numbers",
    ),  # type: ignore[index]
    (
        {"parameters": [{**GOOD["parameters"][1], "box": [512]}]},
        "box is 512, expected a number from 1 to 256",
    ),  # type: ignore[index]
    ({"more": 1}, "a kernel has 'about', 'arch'"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text[:30] for _, text in BAD])
def test_fields_that_are_not_as_they_must_be_are_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(LoadError, match=text):
        read_cubin({**GOOD, **change}, b"code")
