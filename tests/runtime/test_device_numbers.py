# SPDX-License-Identifier: Apache-2.0
"""`cuda:1` is the GPU of number 1, with or without an architecture before it; what is saved runs on any of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver
from tape import TapeCapture

import nnfront as nn
from nnfront.artefact.folder import read_artefact
from nnfront.artefact.loader import session_of
from nnfront.backends.cuda import graph_capture, sampling, upload
from nnfront.backends.cuda.ahead import driver, launcher
from nnfront.backends.cuda.kernel_package import arch_of
from nnfront.backends.device import CPU, META, current, overriding_device
from nnfront.backends.registry import Parts, device_of, parts_of
from nnfront.cli import main
from nnfront.errors import LoadError, LowerError

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


class Doubling(nn.Module):
    def __init__(self) -> None:
        self.weight = nn.Parameter([2])

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x * 2 + self.weight


def exported() -> nn.ir.IRModule:
    return Doubling().export({"forward": {"x": nn.spec.Tensor(["n", 2])}})


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that there are two GPUs, the second a newer one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: [(8, 0), (9, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: ["Older", "Newer"][index])


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("cpu", Parts("cpu", None, None)),
        ("cuda", Parts("cuda", None, None)),
        ("cuda:1", Parts("cuda", None, 1)),
        ("cuda:sm_90", Parts("cuda", "sm_90", None)),
        ("cuda:sm_90:12", Parts("cuda", "sm_90", 12)),
        ("cuda:", Parts("cuda", "", None)),
    ],
)
def test_a_target_is_a_back_end_an_architecture_and_a_number(target: str, parts: Parts) -> None:
    assert parts_of(target) == parts


@pytest.mark.parametrize(
    "target", ["cpu:0", "cuda:", "cuda:sm_1", "cuda:1:sm_90", "cuda:-1", "cuda:0x1", "cuda:١"]
)
def test_other_targets_are_unknown(target: str) -> None:
    with pytest.raises(LowerError, match=f"^unknown target '{target}'"):
        nn.compile(exported(), target)


@pytest.mark.usefixtures("two_gpus")
class TestTwo:
    def test_tensors_live_on_the_gpu_of_the_number(self) -> None:
        assert device_of("cuda") == torch.device("cuda", 0)
        assert device_of("cuda:1") == device_of("cuda:sm_90:1") == torch.device("cuda", 1)
        assert nn.compile(exported(), "cuda:1").program.target == "cuda:1"

    def test_kernels_are_chosen_for_its_architecture(self) -> None:
        assert [arch_of(target) for target in ("cuda", "cuda:0", "cuda:1", "cuda:sm_100:1")] == [
            "sm_80",
            "sm_80",
            "sm_90",
            "sm_100",
        ]

    def test_a_number_that_is_not_there_is_said(self) -> None:
        with pytest.raises(LoadError) as caught:
            device_of("cuda:2")
        assert str(caught.value) == (
            "target 'cuda:2' needs the GPU of number 2, and torch finds 2\n"
            "  help: numbers begin with 0; CUDA_VISIBLE_DEVICES in the environment says which GPUs are seen"
        )

    def test_another_architecture_than_that_of_the_number_is_said(self) -> None:
        with pytest.raises(LoadError) as caught:
            device_of("cuda:sm_80:1")
        assert str(caught.value) == (
            "this program was compiled for sm_80, the GPU here is sm_90\n"
            "  GPU: Newer\n"
            "  help: compile it for 'cuda:sm_90', or for 'cuda'"
        )

    def test_calls_run_with_that_gpu_as_the_current_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entered: list[Any] = []

        def entering(device: torch.device) -> Any:
            entered.append(device)
            return nullcontext()

        monkeypatch.setattr(torch.cuda, "device", entering)
        with current(torch.device("cuda", 1)), current(CPU):
            assert entered == [torch.device("cuda", 1)]


class TestSecond:
    """The current GPU is that of a session, whatever it was before, and in any thread."""

    @pytest.fixture
    def seen(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """How many GPUs that are current ones are asked about, each by a name: `seen(name)` notes it."""
        state, found = threading.local(), []

        @contextmanager
        def entering(device: torch.device) -> Iterator[None]:
            before, state.device = getattr(state, "device", 0), device.index
            yield
            state.device = before

        monkeypatch.setattr(torch.cuda, "device", entering)
        note = lambda name: found.append((name, getattr(state, "device", 0)))  # noqa: E731
        note.found = found  # type: ignore[attr-defined]
        return note

    def test_a_call_is_captured_and_replayed_there(self, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        class Capture(TapeCapture):
            def capture(self, run: Any) -> Any:
                seen("captured")
                replay = super().capture(run)
                return lambda: (seen("replayed"), replay())

        monkeypatch.setattr(graph_capture, "graph_capture_for", lambda device: Capture())
        with overriding_device(CPU):
            method = nn.compile(exported(), "cuda").load({"weight": torch.ones(2)})["forward"]
        method._device = torch.device("cuda", 1)
        (place,) = method.program.result.leaves()
        method.graphs._run = lambda frame: frame.__setitem__(place, torch.ones(1, 2) * 2)

        def work() -> None:
            for _ in range(3):
                method(torch.ones(1, 2))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen.found == [("captured", 1), ("replayed", 1), ("replayed", 1)]

    def test_a_token_is_drawn_there(self, seen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        kernel = SimpleNamespace(launch=lambda rows, **options: seen("drawn"), LEAST=5)
        monkeypatch.setattr(sampling, "kernel_module", lambda name: kernel)
        logits = SimpleNamespace(stride=lambda axis: 1, shape=(1, 4), device=torch.device("cuda", 1))
        options = {"temperature": 0.0, "top_k": None, "top_p": None, "min_p": None}
        sampling.DeviceSampler(options, 0)(logits, None)  # type: ignore[arg-type]
        assert seen.found == [("drawn", 1)]

    def test_machine_code_is_launched_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        library = FakeDriver()
        monkeypatch.setattr(driver, "_open", lambda: library)
        launcher.open_driver.cache_clear()
        first, second = (launcher.open_driver(torch.device("cuda", number)) for number in (0, 1))
        assert [number for name, *_, number in library.calls if name == "cuDeviceGet"] == [0, 1]
        assert launcher.open_driver(torch.device("cuda", 1)) is second is not first
        launcher.open_driver.cache_clear()

    def test_memory_is_pinned_for_it_by_the_thread_that_reads(
        self, seen: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = object.__new__(upload.CudaLink)
        link._device = torch.device("cuda", 1)
        empty = torch.empty

        def pinned(*sizes: int, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if pin_memory:
                seen("pinned")
            return empty(*sizes, **options)

        monkeypatch.setattr(torch, "empty", pinned)
        thread = threading.Thread(target=link.pinned, args=(8,))
        thread.start()
        thread.join()
        assert seen.found == [("pinned", 1)]


def test_without_a_gpu_the_number_is_understood_and_the_gpu_missed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(LoadError, match=r"^target 'cuda:1' needs a GPU, and torch finds none"):
        nn.LLM.load(FOLDER, "cuda:1")
    with pytest.raises(LoadError, match=r"^target 'cuda:1' needs a GPU, and torch finds none"):
        nn.LLM.load(FOLDER, torch.device("cuda", 1))  # type: ignore[arg-type]
    with pytest.raises(LowerError, match=r"^unknown target '5'"):
        nn.LLM.load(FOLDER, 5)  # type: ignore[arg-type]
    assert main(["run", str(FOLDER), "-p", "x", "--device", "cuda:1"]) == 1
    assert capsys.readouterr().err.startswith("error: target 'cuda:1' needs a GPU, and torch finds none\n")


class TestSaved:
    def test_an_artefact_does_not_say_on_which_gpu_it_was_made(self, tmp_path: Path) -> None:
        nn.compile(exported(), "cuda:1").save(tmp_path / "a", {"weight": torch.ones(2)})
        assert json.loads((tmp_path / "a" / "nnfront.json").read_text())["target"] == "cuda"

    def test_it_loads_on_the_gpu_of_a_number(self, tmp_path: Path) -> None:
        nn.compile(exported(), "cuda").save(tmp_path / "a", {"weight": torch.ones(2)})
        with overriding_device(META):
            session = session_of(read_artefact(tmp_path / "a"), 1)
        assert session.program.target == "cuda:1"

    @pytest.mark.parametrize(
        ("made", "device"), [("cuda", "cuda:1"), ("cuda:sm_90", "cuda:1"), ("cuda:sm_90", "cuda:sm_90:1")]
    )
    def test_a_language_model_takes_the_number(
        self, made: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from nnfront.llm import language_model, load_options

        text = SimpleNamespace(eos_token_ids=())
        manifest = SimpleNamespace(llm=text, target=made, text=str)
        files = SimpleNamespace(manifest=manifest, home=None)
        asked: list[int | None] = []
        monkeypatch.setattr(language_model, "is_artefact", lambda path: True)
        monkeypatch.setattr(load_options, "read_artefact", lambda folder, rank: files)
        monkeypatch.setattr(load_options, "session_of", lambda files, number, **ranks: asked.append(number))
        nn.LLM.load(tmp_path, device)
        assert asked == [1]
