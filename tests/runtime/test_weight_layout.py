# SPDX-License-Identifier: Apache-2.0
"""Weights that are transposes lie row by row where a product reads them so, whatever they come from, and their bytes are planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from nnfront_models import gpt2
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.backends import table
from nnfront.backends.cpu import tape
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.kernel import Kernel
from nnfront.lower.reference import reference
from nnfront.session import Session


class Turned(nn.Module):
    """A product with the transpose of a weight, which another file has as [in, out]."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((64, 32))
        self.turned = op.permute_dims(self.weight)

    def linear(self, x: nn.Tensor) -> nn.Tensor:
        return op.linear(x, self.turned)

    def matmul(self, y: nn.Tensor) -> nn.Tensor:
        return op.matmul(y, self.turned)


class Parts(nn.Module):
    """Heads with two matrices each, which lie between one another in a checkpoint."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((4 * 6, 32))
        by_head = op.reshape(self.weight, (4, 6, 32))
        self.first, self.second = op.split(by_head, [2], axis=1)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.einsum("nhr,hvr->nhv", op.einsum("nhi,hir->nhr", x, self.first), self.second)


def executable(method: str, width: int) -> nn.Executable:
    model = Turned().to("bfloat16")
    ir = model.export({method: {"x" if method == "linear" else "y": spec.Tensor(["n", width], "bfloat16")}})
    return nn.compile(nn.passes.lift_transform_params(ir))


WEIGHT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def loaded(executable: nn.Executable, kind: str, folder: Path, weight: torch.Tensor = WEIGHT) -> Session:
    weights = {"weight": weight}
    if kind == "dict":
        return executable.load(weights)
    if kind == "artefact":
        executable.save(folder / "artefact", weights)
        return nn.load(folder / "artefact")
    save_file(weights, folder / "model.safetensors")
    checkpoint = nn.Checkpoint(folder / "model.safetensors")
    return executable.load(checkpoint, cache=folder / "cache" if kind == "cached" else None)


@pytest.mark.parametrize("kind", ["dict", "folder", "cached", "artefact"])
def test_a_transpose_that_a_product_reads_lies_row_by_row(kind, tmp_path):
    session = loaded(executable("linear", 64), kind, tmp_path)
    (held,) = session.weights.values()
    assert held.is_contiguous()
    assert torch.equal(held, WEIGHT.T)
    x = torch.randn(3, 64).bfloat16()
    torch.testing.assert_close(session["linear"](x), x @ WEIGHT, rtol=1e-2, atol=1e-1)
    session.export_checkpoint(tmp_path / "back")
    assert torch.equal(nn.Checkpoint(tmp_path / "back").tensor("weight"), WEIGHT)


@pytest.mark.parametrize("kind", ["dict", "folder", "cached", "artefact"])
def test_a_transpose_that_is_turned_back_stays_the_weight_itself(kind, tmp_path):
    session = loaded(executable("matmul", 32), kind, tmp_path)
    (held,) = session.weights.values()
    assert held.T.is_contiguous()
    assert torch.equal(held, WEIGHT.T)


@pytest.mark.parametrize("kind", ["dict", "folder", "cached", "artefact"])
def test_parts_of_each_head_lie_in_one_piece(kind, tmp_path):
    ir = Parts().to("bfloat16").export({"forward": {"x": spec.Tensor(["n", 4, 2], "bfloat16")}})
    exe = nn.compile(nn.passes.lift_transform_params(ir))
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    session = loaded(exe, kind, tmp_path, weight)
    first, second = weight.view(4, 6, 32).split([2, 4], 1)
    assert all(held.is_contiguous() for held in session.weights.values())
    assert {tuple(held.shape) for held in session.weights.values()} == {first.shape, second.shape}
    x = torch.randn(3, 4, 2).bfloat16()
    hidden = torch.einsum("nhi,hir->nhr", x.double(), first.double())
    expected = torch.einsum("nhr,hvr->nhv", hidden, second.double())
    torch.testing.assert_close(session["forward"](x).double(), expected, rtol=2e-2, atol=2e-1)
    plan = exe.plan({"weight": weight})
    assert (plan.resident_bytes, plan.peak_bytes) == (weight.nbytes, weight.nbytes)
    session.export_checkpoint(tmp_path / "back")
    assert torch.equal(nn.Checkpoint(tmp_path / "back").tensor("weight"), weight)


def test_what_is_turned_is_in_the_plan():
    turned, kept = (
        executable("linear", 64).plan({"weight": WEIGHT}),
        executable("matmul", 32).plan({"weight": WEIGHT}),
    )
    assert (turned.resident_bytes, turned.peak_bytes) == (WEIGHT.nbytes, WEIGHT.nbytes)
    assert (kept.resident_bytes, kept.peak_bytes) == (0, 0)
    assert turned.results[0].formula == kept.results[0].formula


def test_an_update_turns_as_loading_does():
    session = executable("linear", 64).load({"weight": WEIGHT})
    session.update({"weight": -WEIGHT})
    (held,) = session.weights.values()
    assert held.is_contiguous()
    assert torch.equal(held, -WEIGHT.T)


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
def test_no_product_of_a_gpt2_leaves_the_sequence(monkeypatch):
    config = dataclasses.replace(gpt2.TINY, dtype="bfloat16")
    model = gpt2.build(config)
    weights = {name: (torch.randn(p.shape) * 0.1).bfloat16() for name, p in model.named_parameters()}
    ir = nn.passes.lift_transform_params(model.export(gpt2.export_spec(config)), shared_transform=True)
    session = nn.compile(ir).load(weights)
    cache = session.make_cache(batch=1, max_seq=8)
    session["prefill"](torch.arange(3)[None], cache)

    alone, execute = set(), tape.execute

    def one_by_one(code, frame):
        alone.update(run.kernel for run in code.instructions)
        execute(code, frame)

    monkeypatch.setattr(tape, "execute", one_by_one)
    session["decode"](torch.tensor([[5]]), cache)
    assert alone == {"take", "cache_positions"}  # of embeddings, before the first layer


@pytest.mark.parametrize("in_rows", [True, False])
def test_a_weight_is_copied_row_by_row_if_the_kernel_says_that_it_reads_it_so(in_rows):
    ours = Kernel("linear_of_ours", "linear", reference, in_rows=in_rows)
    table.add("cpu", ours)
    try:
        session = executable("linear", 64).load({"weight": WEIGHT})
    finally:
        table.remove("cpu", ours.name)
    (held,) = session.weights.values()
    assert held.is_contiguous() == in_rows
    assert torch.equal(held, WEIGHT.T)
