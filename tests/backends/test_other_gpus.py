# SPDX-License-Identifier: Apache-2.0
"""GPUs that kernels were not made for: a program for "cuda" runs on torch's there, and says why."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from nnfront_models import llama, qwen3_moe

import nnfront as nn
from nnfront.backends.cuda.table import ON_DEVICE
from nnfront.backends.registry import device_of
from nnfront.errors import LoadError, LowerError
from nnfront.lower import Run


@pytest.mark.parametrize("quant", [None, "int4", "int8", "fp8"])
@pytest.mark.parametrize("file", [llama, qwen3_moe])
def test_on_a_gpu_that_no_kernel_is_made_for_torch_computes_everything(monkeypatch, file, quant):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *which: (7, 5))
    config = dataclasses.replace(file.TINY, dtype="bfloat16", head_dim=64)
    ir = file.build(config).export(file.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target="cuda")
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    assert not {run.kernel for run in runs} & {kernel.name for kernel in ON_DEVICE}
    told = [reason for run in runs for reason in run.refused if "sm_75" in reason]
    assert any(
        "arch must be one of sm_80, sm_86, sm_89, sm_90, sm_100, sm_103, sm_120, got 'sm_75'" in reason
        for reason in told
    )


@pytest.mark.parametrize("target", ["hip:gfx942", "xpu", "cuda:sm_75"])
def test_what_nothing_is_compiled_for_is_no_target(target):
    with pytest.raises(LowerError, match="unknown target"):
        nn.compile(llama.build(llama.TINY).export(llama.export_spec(llama.TINY)), target=target)


def test_a_torch_for_other_gpus_is_said(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(LoadError) as caught:
        device_of("cuda")
    assert str(caught.value) == (
        "target 'cuda' needs a GPU of NVIDIA, and this torch is built for AMD's (ROCm 6.4)\n"
        "  help: install a build of torch for CUDA, or compile for 'cpu'"
    )


def test_a_torch_for_cuda_that_finds_no_gpu_says_where_to_look(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(LoadError) as caught:
        device_of("cuda")
    assert list(caught.value.details) == [
        f"torch {torch.__version__} is built for CUDA 13.0: `nvidia-smi` says whether the driver finds a GPU"
    ]


def test_without_triton_a_program_for_a_gpu_is_refused_in_words(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("triton", "nnfront_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(LoadError) as caught:
        nn.compile(llama.build(llama.TINY).export(llama.export_spec(llama.TINY)), target="cuda:sm_90")
    assert str(caught.value) == (
        "the package 'triton' is not installed, in which kernels for a GPU are written\n"
        "  help: pip install triton, or a build of torch for CUDA, which brings it; or compile for 'cpu'"
    )
