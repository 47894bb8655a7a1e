# SPDX-License-Identifier: Apache-2.0
"""Artefacts that earlier versions wrote load for ever, and give what torch computes of the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from artefact_cases import VARIED_WEIGHTS, llama_weights, varied_inputs
from torch.nn import functional as F

import nnfront as nn
from nnfront.backends.cuda.ahead import launcher
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.device import CPU, overriding_device

GOLDEN = Path(__file__).parent / "golden"


def test_every_golden_artefact_has_a_test() -> None:
    assert {folder.name for folder in GOLDEN.iterdir() if folder.is_dir()} == {
        "integers-1",
        "kernels-2",
        "llama-1",
        "ranks-3",
        "varied-1",
    }


@pytest.mark.parametrize("name", ["integers-1", "kernels-2", "llama-1", "ranks-3", "varied-1"])
def test_every_byte_is_as_it_was_written(name: str) -> None:
    assert nn.artefact.check(GOLDEN / name) == []


def test_the_weights_of_each_rank_of_ranks_3() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    for rank in range(2):
        weights = nn.load(GOLDEN / "ranks-3", rank=rank, ranks=2).weights
        assert {name: tuple(value.shape) for name, value in weights.items()} == {
            "a.weight.part": (4, 3),
            "b.weight": (4,),
        }
        assert torch.equal(weights["a.weight.part"], whole[:, 3 * rank : 3 * rank + 3])
        assert torch.equal(weights["b.weight"], torch.arange(4.0))


def integers(rows: int, columns: int, most: int) -> torch.Tensor:
    """Of each row `most` is the largest element, so that it is its own rounding."""
    made = (torch.arange(rows)[:, None] * 7 + torch.arange(columns) * 5) % (2 * most + 1) - most
    made[:, 0] = most
    return made.double()


def test_integers_1_whose_weights_lie_as_they_did_before_kernels_wanted_panels() -> None:
    """relu(first half of x @ up.T) * second half, and y + y @ down.T, with up in int8 and down in int4."""
    session = nn.load(GOLDEN / "integers-1")
    up, down, x, y = integers(64, 64, 127), integers(32, 32, 7), integers(3, 64, 127), integers(3, 32, 127)
    assert torch.equal(session.weights["up_integers"].double(), up)
    found = session["forward"](x.bfloat16(), y.bfloat16())
    gate, other = (x @ up.T).chunk(2, -1)
    torch.testing.assert_close(found["gated"].double(), gate.relu() * other, rtol=2**-7, atol=0)
    torch.testing.assert_close(found["sum"].double(), y + y @ down.T, rtol=2**-7, atol=1)


def test_the_methods_of_varied_1() -> None:
    session = nn.load(GOLDEN / "varied-1")
    w = VARIED_WEIGHTS
    (x,), (ids, flag) = varied_inputs()["forward"], varied_inputs()["look"]
    found = session["forward"](x)
    expected = F.silu(x @ w["gate.weight"].T) * (x @ w["up.weight"].T + w["up.bias"])
    torch.testing.assert_close(found["y"], expected)
    torch.testing.assert_close(found["half"], x.bfloat16() @ w["gate.weight"].bfloat16().T)
    rows = w["table.weight"][ids]
    doubled, scores = session["look"](ids, flag)
    torch.testing.assert_close(doubled, rows * 2)
    torch.testing.assert_close(scores, rows @ w["table.weight"].T)
    torch.testing.assert_close(session["look"](ids, torch.tensor(False))[0], rows + 1)


def llama_logits(w: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Two layers, two heads of four over one key head, rotary positions, no cache: float32 [batch, seq, 16]."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[f"{name}.weight"]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, 4, 2) / 4)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        return x * cos + torch.cat([-x[..., 2:], x[..., :2]], -1) * sin

    batch, seq = ids.shape
    x = w["model.embed_tokens.weight"][ids]
    for i in range(2):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ w[f"{layer}.self_attn.{p}_proj.weight"].T).view(batch, seq, -1, 4).transpose(1, 2)
            for p in "qkv"
        )
        scores = rotate(q) @ rotate(k).transpose(2, 3) / 2
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, seq, -1)
        x = x + mixed @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ w[f"{layer}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T


def test_the_logits_and_tokens_of_llama_1() -> None:
    llm = nn.LLM.load(GOLDEN / "llama-1")
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    torch.testing.assert_close(llm.logits(ids), llama_logits(llama_weights(), ids), rtol=1e-4, atol=1e-4)
    expected = ids
    for _ in range(12):
        next_token = llama_logits(llama_weights(), expected)[:, -1].argmax(-1)
        expected = torch.cat([expected, next_token[:, None]], 1)
    assert llm.generate_ids(ids, max_new_tokens=12).tolist() == expected[:, 5:].tolist()
    assert llm.eos_token_ids == (1, 2)
    assert llm.tokenizer.encode("c a") == [3, 1]


def test_the_kernels_of_kernels_2(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[CompiledKernels] = []
    monkeypatch.setattr(launcher, "launcher_for", lambda ahead, device: given.append(ahead))
    with overriding_device(CPU):
        loaded = nn.load(GOLDEN / "kernels-2")
    assert loaded.methods == ("forward",)
    (ahead,) = given
    (kernel,) = ahead.cubins
    assert (ahead.arch, kernel.kernel, kernel.triton, kernel.cuda) == (
        "sm_90",
        "matmul_small_m_kernel",
        "3.9.0",
        "13.4",
    )
    assert (kernel.threads, kernel.cluster, kernel.min_driver) == (128, 1, 13000)
    assert [p.name for p in kernel.parameters[:3]] == ["x_ptr", "w_ptr", "y_ptr"]
    assert kernel.image[:4] == b"\x7fELF"


def test_what_is_loaded_is_saved_in_todays_form(tmp_path: Path) -> None:
    nn.load(GOLDEN / "llama-1").save(tmp_path / "a")
    ids = torch.tensor([[3, 1, 4]])
    again = nn.LLM.load(tmp_path / "a").logits(ids)
    assert torch.equal(again, nn.LLM.load(GOLDEN / "llama-1").logits(ids))


def test_the_golden_artefacts_need_nothing_beside_them(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "varied-1", tmp_path / "a")
    assert nn.load(tmp_path / "a").methods == ("forward", "look")
