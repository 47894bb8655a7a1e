# SPDX-License-Identifier: Apache-2.0
"""GPUs that kernels were not made for: a program for "cuda" runs on torch's there, and says why."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nnfront_models import llama, qwen3_moe

import nnfront as nn
from nnfront.backends.cuda.table import ON_DEVICE
from nnfront.errors import LowerError
from nnfront.lower import Run


@pytest.mark.parametrize("quant", [None, "int4", "int8", "fp8"])
@pytest.mark.parametrize("file", [llama, qwen3_moe])
def test_on_a_gpu_that_no_kernel_is_made_for_torch_computes_everything(monkeypatch, file, quant):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *which: (8, 9))
    config = dataclasses.replace(file.TINY, dtype="bfloat16", head_dim=64)
    ir = file.build(config).export(file.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target="cuda")
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    assert not {run.kernel for run in runs} & {kernel.name for kernel in ON_DEVICE}
    told = [reason for run in runs for reason in run.refused if "sm_89" in reason]
    assert any("arch must be one of sm_80, sm_90, sm_100, got 'sm_89'" in reason for reason in told)


@pytest.mark.parametrize("target", ["hip:gfx942", "xpu", "cuda:sm_89"])
def test_what_nothing_is_compiled_for_is_no_target(target):
    with pytest.raises(LowerError, match="unknown target"):
        nn.compile(llama.build(llama.TINY).export(llama.export_spec(llama.TINY)), target=target)
