# SPDX-License-Identifier: Apache-2.0
"""A language model exported for a GPU that is not here, and loaded where a driver that launches nothing stands for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_driver import FakeDriver, Launch
from nnfront_kernels import ahead, common
from nnfront_kernels.common import planning_for
from nnfront_models import llama

import nnfront as nn
from nnfront.artefact.save import Options
from nnfront.backends.cuda.ahead import launcher as launcher_module
from nnfront.backends.cuda.ahead.cubin import Cubin
from nnfront.backends.cuda.ahead.driver import Driver
from nnfront.backends.cuda.ahead.enumerate_kernels import kernels_of
from nnfront.backends.device import CPU, overriding_device

CONFIG = dataclasses.replace(
    llama.TINY, dtype="float16", head_dim=64, num_hidden_layers=1, max_position_embeddings=32
)
BATCH, ROOM = 2, 16
SIZES = {"pointer": (8,), "i32": (4,), "i64": (8,), "f32": (4,)}


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = llama.build(CONFIG)
    spec = {name: llama.export_spec(CONFIG)[name] for name in ("prefill", "decode")}
    ir = nn.passes.lift_transform_params(model.export(spec), shared_transform=True)
    weights = {
        name: torch.zeros([int(n) for n in p.shape], dtype=torch.float16)
        for name, p in model.named_parameters()
    }
    folder = tmp_path_factory.mktemp("cubins") / "llama"
    compiled: list[tuple[int, int]] = []
    options = Options(
        sizes={"batch": [BATCH], "seq": [5], "earlier": [0, 5]}, compiled=lambda *done: compiled.append(done)
    )
    nn.compile(ir, target="cuda:sm_90").save(folder, weights, options=options)
    assert compiled[-1][0] == compiled[-1][1] == len(compiled)
    return folder


@pytest.fixture
def library(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The driver, in a process where nothing can be compiled and the GPU's memory is the host's."""
    found = FakeDriver(sizes={cubin.image: parameter_bytes(cubin) for cubin in kernels(artefact)})
    monkeypatch.setattr(launcher_module, "open_driver", lambda device: Driver(0, found))
    monkeypatch.setattr(triton, "compile", lambda *args, **options: pytest.fail("a kernel was compiled"))
    monkeypatch.setattr(common, "jit", lambda plan: pytest.fail(f"{plan.kernel} was given to Triton"))
    with overriding_device(CPU), planning_for("sm_90"):
        yield found


def kernels(folder: Path) -> tuple[Cubin, ...]:
    found = nn.artefact.kernels_of(folder)
    assert found is not None
    return found.cubins


def parameter_bytes(cubin: Cubin) -> tuple[int, ...]:
    return (*(size for parameter in cubin.parameters for size in SIZES[parameter.kind]), 8, 8)


def decoded(session: nn.Session, library: FakeDriver) -> list[Launch]:
    """What one decode launches after a prefill."""
    cache = session.make_cache(batch=BATCH, max_seq=ROOM)
    session["prefill"](torch.zeros(BATCH, 5, dtype=torch.int64), cache)
    library.launches.clear()
    session["decode"](torch.zeros(BATCH, 1, dtype=torch.int64), cache)
    return library.launches


def test_decode_launches_its_kernels_and_compiles_none(artefact: Path, library: FakeDriver) -> None:
    session = nn.load(artefact)
    assert [launch.kernel for launch in decoded(session, library)] == [
        "matmul_small_m_kernel",  # q, k and v of the rows' norm
        "rope_angles_kernel",  # cosines and sines for all layers
        "attention_decode_kernel",  # which rotates, and stores the token
        "matmul_small_m_kernel",  # o, and what came in
        "matmul_small_m_kernel",  # gate and up of the rows' norm
        "matmul_small_m_kernel",  # down, and what came in
        "matmul_small_m_kernel",  # logits of the rows' norm
    ]
    assert session.kernels is not None
    assert session.kernels.compiled_here == {}
    assert "attention_decode_kernel" in str(session.kernels)


def test_launches_are_given_the_weights_and_the_sizes_of_the_call(
    artefact: Path, library: FakeDriver
) -> None:
    session = nn.load(artefact)
    weights = {value.data_ptr(): name for name, value in session.weights.items()}
    products = [launch for launch in decoded(session, library) if launch.kernel == "matmul_small_m_kernel"]
    by_image = {cubin.image: cubin for cubin in kernels(artefact)}
    read, rows = [], []
    for launch in products:
        names = (parameter.name for parameter in by_image[launch.image].parameters)
        named = dict(zip(names, launch.parameters, strict=False))
        read.append(weights[int.from_bytes(named["w_ptr"], "little")])
        rows.append(int.from_bytes(named["M"], "little"))
    assert rows == [BATCH] * 5
    assert len(set(read)) == 5
    assert read[-1] == "lm_head.weight"


def test_the_artefact_names_no_file_of_the_machine_that_made_it(artefact: Path) -> None:
    here = str(Path(nn.__file__).parents[1]).encode()
    for file in artefact.rglob("*"):
        if file.is_file() and file.suffix in (".cubin", ".json"):
            assert here not in file.read_bytes(), file


def test_a_loaded_session_saves_the_same_files(artefact: Path, library: FakeDriver, tmp_path: Path) -> None:
    nn.load(artefact).save(tmp_path / "again")
    names = sorted(file.relative_to(artefact) for file in artefact.rglob("*") if file.is_file())
    assert names == sorted(
        f.relative_to(tmp_path / "again") for f in (tmp_path / "again").rglob("*") if f.is_file()
    )
    assert all((artefact / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_an_artefact_for_another_gpu_does_not_load(artefact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_capability": lambda: (8, 0),
        "get_device_name": lambda: "A100",
        "current_device": lambda: 0,
    }
    for name, function in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, function)
    with pytest.raises(
        nn.errors.LoadError, match="this program was compiled for sm_90, the GPU here is sm_80\n  GPU: A100"
    ):
        nn.load(artefact)


def test_an_artefact_loads_where_triton_interprets_and_keeps_its_kernels(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "can_compile", lambda: False)
    with overriding_device(CPU):
        session = nn.load(artefact)
        assert session.kernels is None
        session.save(tmp_path / "again")
    assert nn.artefact.kernels_of(tmp_path / "again") == nn.artefact.kernels_of(artefact)


def test_nothing_is_compiled_where_triton_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "can_compile", lambda: False)
    program = nn.compile(
        nn.Linear(64, 32).export({"forward": {"x": nn.spec.Tensor(["n", 64])}}), target="cuda:sm_90"
    ).program
    what = "kernels cannot be compiled in a process where Triton interprets them\n  help: unset TRITON_INTERPRET, or compile for 'cuda'"
    with pytest.raises(nn.errors.LowerError, match=what):
        kernels_of(program, {})
