# SPDX-License-Identifier: Apache-2.0
"""Numbers in blocks of bytes: what they stand for by the library that defines them, how much is lost, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from few_of import few_of
from gguf.constants import GGMLQuantizationType

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError
from nnfront.passes import QuantScheme
from nnfront.quant_format import BLOCK_FORMATS

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
# The mean square of what is lost of normally distributed numbers, over theirs; quantised by llama.cpp it is 0.00511, 0.00130 and 0.000314.
LOST = {"q4_k": 0.00493, "q5_k": 0.00123, "q6_k": 0.000295}


def by_the_library(blocks: torch.Tensor, name: str) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), GGMLQuantizationType[name.upper()]))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("spread", [0.02, 1.0, 300.0])
def test_blocks_are_those_of_the_library_and_lose_no_more_than_is_said(name, spread):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * spread
    blocks = op.quantize_blocks(x, name)
    found = op.dequantize_blocks(blocks, name)
    assert torch.equal(found, by_the_library(blocks, name))
    lost = (found - x).square().mean() / x.square().mean()
    assert lost < LOST[name] * (1.02 if spread < 1 else 1)  # of small numbers float16 has fewer bits


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_half_a_block_at_the_end_of_a_row_is_the_first_half_of_a_whole_one(name):
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(0))
    found = op.dequantize_blocks(op.quantize_blocks(x, name), name)
    assert found.shape == x.shape
    assert (found[:, 256:] - x[:, 256:]).square().mean() < 1.2 * LOST[name]
    assert torch.equal(found[:, :256], op.dequantize_blocks(op.quantize_blocks(x[:, :256], name), name))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_is_stored_again_changes_no_more(name):
    """Numbers that are integers of the blocks' own are among those that are tried."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    once = op.dequantize_blocks(op.quantize_blocks(x, name), name)
    twice = op.dequantize_blocks(op.quantize_blocks(once, name), name)
    assert (twice - once).square().mean() < 0.1 * (once - x).square().mean()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0])
def test_blocks_of_one_number_hold_it(name, value):
    x = torch.full((2, 256), value)
    assert (op.dequantize_blocks(op.quantize_blocks(x, name), name) - x).abs().max() <= abs(value) * 2**-10


@pytest.mark.parametrize("name", few_of(BLOCK_FORMATS))
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_not_finite_is_refused_when_it_is_loaded(name, wrong):
    x = torch.zeros(2, 384)
    x[1, 300] = wrong
    found = op.dequantize_blocks(op.quantize_blocks(x, name), name)
    assert found[1, 256:].isnan().all()
    assert (found.flatten()[: 384 + 256] == 0).all()
    checkpoint = nn.Checkpoint(FOLDER)
    weights = {key: checkpoint.tensor(key) for key in checkpoint.infos}
    weights["model.layers.1.mlp.down_proj.weight"] = weights["model.layers.1.mlp.down_proj.weight"].clone()
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = wrong
    ir = nn.passes.quantize_weights(nn.export_folder(FOLDER), name)
    with pytest.raises(LoadError, match="a weight that is to be quantised holds NaN or infinities"):
        nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(weights)


@pytest.mark.parametrize("name", few_of(BLOCK_FORMATS))
def test_a_model_in_blocks_is_the_model_of_what_they_stand_for(name):
    """Products of few rows and many, an embedding that is the head as well, and none of it by our own reading of blocks."""
    llm = nn.LLM.load(FOLDER, quant=QuantScheme(name, head=name))
    assert {w.stored for w in llm.quantized.quantized} == {name}
    plain, checkpoint = nn.LLM.load(FOLDER), nn.Checkpoint(FOLDER)
    weights = {key: checkpoint.tensor(key) for key in checkpoint.infos}
    stands_for = {
        key: by_the_library(op.quantize_blocks(w, name), name).bfloat16()
        for key, w in weights.items()
        if w.ndim == 2
    }
    plain.session.update(stands_for)
    for count in (3, 9, 70):
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 4096, (1, count)))
        expected = plain.logits(ids)
        assert (llm.logits(ids) - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_experts_in_blocks_are_experts_of_what_these_stand_for(name):
    class Experts(nn.Module):
        def __init__(self) -> None:
            self.gate_up, self.down = nn.Parameter((3, 512, 256)), nn.Parameter((3, 256, 256))

        def forward(self, x: nn.Tensor, experts: nn.Tensor, weights: nn.Tensor) -> nn.Tensor:
            return op.moe_mlp(x, self.gate_up, self.down, experts, weights, activation="silu")

    pairs = spec.Tensor(["n", 2])
    given = {"x": spec.Tensor(["n", 256]), "experts": spec.Tensor(["n", 2], "int32"), "weights": pairs}
    model = Experts()
    ir = model.export({"forward": given})
    weights = {key: torch.randn(tuple(p.shape)) / 16 for key, p in model.named_parameters()}
    stands_for = {key: op.dequantize_blocks(op.quantize_blocks(w, name), name) for key, w in weights.items()}
    quantised = nn.passes.lift_transform_params(nn.passes.quantize_weights(ir, name), shared_transform=True)
    chosen = torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0]], dtype=torch.int32)
    x = torch.randn(5, 256), chosen, torch.rand(5, 2)
    expected = nn.compile(ir).load(stands_for)["forward"](*x)
    found = nn.compile(quantised).load(weights)["forward"](*x)
    torch.testing.assert_close(found, expected)
