# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu launches on a GPU is compiled before, and what is not is said."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from few_of import few_of
from moe_plans import moe_plans
from nnfront_kernels import ahead
from nnfront_kernels.common import launched_by, planning_for
from test_gpu_bench import bench

from nnfront.artefact.loader import kernels_of
from nnfront.backends.cuda import graph_capture, many_rows
from nnfront.backends.cuda.ahead import launcher
from nnfront.backends.cuda.ahead.cubin import CompiledKernels, read_cubin
from nnfront.backends.cuda.ahead.driver import Driver
from nnfront.backends.device import overriding_device

HERE = Path(__file__).parent
GPU_BENCH, RUNTIME = HERE.parents[1] / "bench" / "gpu", HERE.parent / "runtime"


@pytest.fixture
def compiled_before(monkeypatch):
    monkeypatch.syspath_prepend(GPU_BENCH)
    return importlib.import_module("compiled")


@pytest.mark.matrix
def test_machine_code_is_compiled_before_and_found_by_its_key(compiled_before, tmp_path):
    done = bench("--compile", "--dry", "--only", "moe_combine", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernels for sm_90" in done.stdout
    made = {file.stem for file in (tmp_path / "sm_90").glob("*.json")}
    assert made
    assert made == {file.stem for file in (tmp_path / "sm_90").glob("*.cubin")}
    assert {cubin.key for cubin in compiled_before.brought("sm_90", tmp_path).cubins} == made
    assert compiled_before.brought("sm_100", tmp_path) is None


class Anything:
    """What every number is less than: results of kernels that were not launched are not looked at."""

    def __gt__(self, other: object) -> bool:
        return True


class Again:
    """Captures nothing: a replay does what was captured once more, with its launches."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def is_capturing(self) -> bool:
        return False

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def launched_on_a_gpu() -> Iterator[set[str]]:
    """The keys of what is launched inside of this, on sm_90, captured or not, with tensors on the CPU."""
    launched: set[str] = set()
    with (
        pytest.MonkeyPatch.context() as patch,
        overriding_device(torch.device("cpu")),
        planning_for("sm_90"),
        launched_by(lambda plan: launched.add(ahead.key_of(plan, "sm_90"))),
    ):
        patch.syspath_prepend(GPU_BENCH)
        patch.setattr(graph_capture, "graph_capture_for", lambda device: Again())
        patch.setattr(many_rows, "on_gpu", lambda x: True)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        yield launched


def of_architectures(file: str, quant: str | None) -> tuple[set[str], set[str]]:
    """The keys of what a comparison launches, and of what is compiled for it."""
    with launched_on_a_gpu() as launched, pytest.MonkeyPatch.context() as patch:
        architectures = importlib.import_module("architectures")
        patch.setattr(architectures, "NEAR", Anything())
        for page_size in (None, architectures.PAGE):
            found = architectures.compared(file, quant, page_size, dry=False)
            assert isinstance(found, dict), found
    return launched, {ahead.key_of(plan, "sm_90") for plan in architectures.plans(file, quant, "sm_90")}


def known_of(module: Any) -> set[str]:
    """The keys of what is compiled for the models of a part."""
    model = importlib.import_module("model")
    return {key for program in module.programs(dry=False) for key in model.plans(*program, "sm_90")}


def of_runtime() -> tuple[set[str], set[str]]:
    """The keys of what is launched by the runtime's part, and of what is compiled for it; the model has one layer, and is narrow."""
    with launched_on_a_gpu() as launched, pytest.MonkeyPatch.context() as patch:
        runtime = importlib.import_module("runtime")
        narrow = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
        config = dataclasses.replace(runtime.SMALL, dtype="bfloat16", vocab_size=512, **narrow)
        patch.setattr(runtime, "LARGE", dataclasses.replace(config, max_position_embeddings=8192))
        patch.setattr(runtime, "taken_by", lambda call, dry: call() is None)
        patch.setattr(runtime, "refused", lambda *given: None)
        replays = graph_capture.graph_capture_for
        sessions = runtime.sessions(dry=False)
        patch.setattr(graph_capture, "graph_capture_for", replays)
        told: list[str] = []
        for page_size in (None, runtime.PAGE):
            runtime.decode(*sessions, page_size, False, lambda what, holds, figure="": told.append(figure))
            assert sessions[0]["decode"].graphs.replays
        runtime.memory(sessions[1], False, lambda *given: None)
        return launched, known_of(runtime)


def of_model(quant: str | None) -> tuple[set[str], set[str]]:
    """The keys of what is launched by the model's part, and of what is compiled for it; the model has one layer, and is narrow."""
    with launched_on_a_gpu() as launched, pytest.MonkeyPatch.context() as patch:
        model = importlib.import_module("model")
        narrow = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4}
        config = dataclasses.replace(
            model.LLAMA_3_8B, num_hidden_layers=1, vocab_size=512, num_key_value_heads=2, **narrow
        )
        patch.setattr(torch.Tensor, "normal_", lambda tensor: tensor)  # of tokens before, nobody reads them
        patch.setattr(torch.Tensor, "random_", lambda tensor, *bounds: tensor)
        sizes = dataclasses.replace(model.FULL, config=config, prompts=(512, 1024), steps=3)
        patch.setattr(model, "FULL", sizes)
        session = model.on_device(model.compiled(config, quant, "cuda"), torch.device("cpu"))
        for batch, length, stored_as in sizes.decodes:
            model.decoded(session, sizes, "", batch, length, stored_as, 1.0)
        for length in sizes.prompts:
            model.prefilled(session, sizes, "", length)
        model.right(sizes, quant, "cuda")
        if quant:
            cache = session.make_cache(batch=1, max_seq=model.FIRST_TOKEN["max_seq"][0])
            session["prefill"](torch.arange(16)[None], cache)
        return launched, known_of(model)


@pytest.mark.parametrize(
    ("look", "given"),
    few_of(
        [
            (of_runtime, ()),
            (of_architectures, ("mamba2", None)),
            (of_architectures, ("deepseek_v3", None)),
            (of_model, ("int4",)),
            (of_model, (None,)),
            (of_architectures, ("qwen3_moe", "int8")),
            (of_architectures, ("llama", "int4")),
        ],
        2,
    ),
)
def test_what_is_launched_on_a_gpu_is_compiled_before(compiled, look, given):
    launched, known = compiled(look, *given)
    assert launched
    assert launched <= known


def bring(folder: Path) -> str:
    """Compile one of them into a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GPU_BENCH)
        facts, image = ahead.build(moe_plans()[0], "sm_90")
        importlib.import_module("compiled").write(facts, image, folder)
    return facts["key"]


# bench/gpu/part.py on a driver that launches nothing; the second case is an illegal access, after which the device takes no more work.
ON_A_FAKE_DRIVER = """
import functools, sys
from pathlib import Path
sys.path[:0] = PLACES
import compiled, part, torch
from fake_driver import FakeDriver
from nnfront.backends.cuda.ahead import launcher
from nnfront.backends.cuda.ahead.driver import Driver
from nnfront_kernels import ahead, common
from moe_plans import moe_plans

folder = Path(__file__).parent
brought = compiled.brought("sm_90", folder)
sizes = {c.image: tuple(ahead.sizes_of(c.fields()["parameters"])) for c in brought.cubins}
library = FakeDriver(sizes=sizes)

def synchronize():
    if library.fails:
        raise RuntimeError("an illegal memory access was encountered")

def look(plan, fails=False):
    if fails:
        library.fails["cuLaunchKernelEx"] = 700
    plan.launch()
    return {"rows": [len(library.launches)]}

known, other = moe_plans()
common.jit = lambda plan: None
launcher.open_driver = lambda device: Driver(0, library)
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.current_stream = lambda device: type("Stream", (), {"cuda_stream": 0})
torch.cuda.synchronize = synchronize
compiled.brought = lambda arch: brought
part.cases = lambda name, options: [
    part.Case(f"case {i}", functools.partial(look, plan, i == 1)) for i, plan in enumerate([known, known, known, other, other])
]
part.main()
"""


@pytest.mark.matrix  # whole processes
def test_a_fault_of_the_device_begins_a_new_process_and_what_is_compiled_there_is_said(
    compiled, compiled_before, monkeypatch, tmp_path, capsys
):
    compiled(bring, tmp_path)
    run = importlib.import_module("run")
    places = [str(place) for place in (GPU_BENCH, HERE, HERE.parent, RUNTIME)]
    (tmp_path / "part.py").write_text(ON_A_FAKE_DRIVER.replace("PLACES", repr(places)))
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(run, "machine", lambda dry: {})
    monkeypatch.setattr(run, "table", lambda results: "")
    assert run.main(["--parts", "full", "--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "call_full.json").read_text())
    (wrong,) = results["wrong"]
    assert (wrong["case"], "ILLEGAL_ADDRESS" in wrong["why"]) == ("case 1", True)
    # Of each process how many launches there have been: in the second one what Triton has compiled is launched by Triton.
    assert results["rows"] == [1, 1, 1, 1]
    ((_, why),) = results["compiled_here"]["full"].items()
    assert why.startswith("the artefact has it otherwise: ")
    assert (
        f"full: {results['parts']['full']:.0f} s, 1 kernels compiled here: {why}" in capsys.readouterr().out
    )
    lines = [line for line in run.read(tmp_path / "full.jsonl") if line.get("compiled_here")]
    assert [line["ended"] for line in lines] == ["case 3"]


def save_first_token() -> tuple[set[str], set[str]]:
    """The keys of the kernels in the artefact whose first token is timed, and of what its program launches."""
    with launched_on_a_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(RUNTIME)
        model, library = importlib.import_module("model"), importlib.import_module("fake_driver").FakeDriver()
        keys = model.plans(model.SMALL, "int4", model.FIRST_TOKEN, "sm_90").keys()
        facts = {"arch": "sm_90", "triton": "3.9.0", "cuda": "13.0", "threads": 128, "cluster": 1}
        facts |= dict.fromkeys(("shared_bytes", "scratch_bytes"), 0) | {"parameters": [], "about": ""}
        facts |= dict.fromkeys(("cooperative", "pdl"), False) | {"kernel": "k"}
        brought = tuple(read_cubin(facts | {"key": key}, b"code") for key in {*keys, "0" * 16})
        patch.setattr(launcher, "open_driver", lambda device: Driver(0, library))
        found: set[str] = set()

        def first_token(command: list[str], **options: Any) -> Any:
            found.update(cubin.key for cubin in kernels_of(command[-1]).cubins)
            row = {"first_token_s": 1.0, "compiled_here": {"a key": "a reason"}}
            return SimpleNamespace(returncode=0, stdout=json.dumps(row))

        patch.setattr(subprocess, "run", first_token)
        told = model.first_token(
            model.DRY, "int4", "", torch.device("cpu"), CompiledKernels("sm_90", brought)
        )
        assert told["compiled_here"] == {"a key": "a reason"}
        assert told["model"] == [{"who": "", "what": "first token", "first_token_s": 1.0}]
        return found, set(keys)


def test_the_first_token_is_that_of_an_artefact_with_the_kernels_that_were_brought_along(compiled):
    found, launched = compiled(save_first_token)
    assert found == launched != set()
