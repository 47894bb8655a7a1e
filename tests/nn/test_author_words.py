# SPDX-License-Identifier: Apache-2.0
"""What model files are written with, besides layers: fused projections, heads, positions, no cache, the dtype, the methods and their spec."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import SpecError


def linears(*sizes: int, bias: bool = False) -> list[nn.Linear]:
    layers = [nn.Linear(6, size, bias) for size in sizes]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn([int(size) for size in parameter.shape])
    return layers


class TestFused:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("sizes", [(4, 4), (4, 2), (8, 4, 4), (2, 2, 2), (1, 2, 3, 4)])
    def test_it_gives_what_each_layer_would(self, sizes: tuple[int, ...], bias: bool) -> None:
        layers, x = linears(*sizes, bias=bias), torch.randn(2, 3, 6)
        got = nn.Fused(*layers)(x)
        for layer, part in zip(layers, got, strict=True):
            expected = F.linear(x, layer.weight.data, layer.bias.data if bias else None)
            torch.testing.assert_close(part, expected)

    def test_its_weight_is_in_no_checkpoint(self) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                self.q, self.k = nn.Linear(4, 8, False), nn.Linear(4, 2, False)
                self.qk = nn.Fused(self.q, self.k)

        model = Attention()
        assert [name for name, _ in model.named_parameters()] == ["q.weight", "k.weight"]
        assert [name for name, _ in model.named_derived()] == ["qk.weight"]

    def test_layers_that_are_no_one_product_are_refused(self) -> None:
        for layers in (
            [nn.Linear(4, 2)],
            [nn.Linear(4, 2), nn.Linear(4, 2, bias=False)],
            [nn.Linear(4, 2), nn.Linear(5, 2)],
        ):
            with pytest.raises(SpecError) as caught:
                nn.Fused(*layers)
            assert caught.value.what == "nnfront.Fused: these layers are not one product"
        assert caught.value.details == ("[4] to [2], bias", "[5] to [2], bias")
        assert caught.value.help == "give two layers or more of one input, either all with a bias or none"
        assert __file__ in caught.value.where


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gated_mlp_is_down_of_activation_of_gate_times_up(activation: str) -> None:
    mlp = nn.GatedMLP(6, 10, activation, bias=True)
    for parameter in mlp.parameters():
        parameter.data = torch.randn([int(size) for size in parameter.shape])
    x = torch.randn(2, 6)
    gate, up, down = (
        lambda y, layer=layer: F.linear(y, layer.weight.data, layer.bias.data)
        for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    act = {"silu": F.silu, "gelu_pytorch_tanh": lambda y: F.gelu(y, approximate="tanh")}[activation]
    torch.testing.assert_close(mlp(x), down(act(gate(x)) * up(x)))


def test_an_mlp_without_a_gate_has_the_names_that_it_is_given() -> None:
    mlp = nn.MLP(6, 10, "relu2", names=("fc1", "fc2"))
    assert [name for name, _ in mlp.named_parameters()] == [
        "fc1.weight",
        "fc1.bias",
        "fc2.weight",
        "fc2.bias",
    ]
    for parameter in mlp.parameters():
        parameter.data = torch.randn([int(size) for size in parameter.shape])
    x = torch.randn(2, 6)
    inner = F.relu(F.linear(x, mlp.fc1.weight.data, mlp.fc1.bias.data)).square()
    torch.testing.assert_close(mlp(x), F.linear(inner, mlp.fc2.weight.data, mlp.fc2.bias.data))


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_rows_that_are_stored_head_by_head_are_put_part_by_part(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    heads = x.reshape(4, 3, 2, *shape[1:])
    expected = torch.cat([heads[:, part].reshape(8, *shape[1:]) for part in range(3)])
    assert torch.equal(nn.eager(nn.part_by_part, x, 4), expected)


def test_heads_are_taken_apart_and_put_together_in_order() -> None:
    x = torch.arange(24.0).reshape(2, 1, 12)
    split = nn.eager(op.split_heads, x, 4)
    assert torch.equal(split, x.reshape(2, 1, 3, 4))
    assert torch.equal(nn.eager(op.merge_heads, split), x)


class Ends(nn.Module):
    """Gives the positions of its tokens, and attends, so that a cache moves on."""

    def __init__(self) -> None:
        self.embed = nn.Embedding(10, 4)

    def at(self, tokens: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE) -> nn.Tensor:
        positions = op.positions(tokens, cache)
        x = op.split_heads(self.embed(tokens), 4)
        return positions, op.attention(x, x, x, cache=cache[0])


def test_positions_go_on_where_a_cache_ends_and_begin_at_zero_without_one() -> None:
    tokens = spec.Tensor(["batch", "seq"], "int64")
    cached = {"tokens": tokens, "cache": spec.Cache(1, 1, 4)}
    session = nn.compile(Ends().export({"at": cached})).load({"embed.weight": torch.ones(10, 4)})
    cache = session.make_cache(batch=2, max_seq=8)
    assert session["at"](torch.ones(2, 3, dtype=torch.int64), cache)[0].tolist() == [[0, 1, 2]] * 2
    assert session["at"](torch.ones(2, 2, dtype=torch.int64), cache)[0].tolist() == [[3, 4]] * 2
    plain = nn.compile(Ends().export({"at": {"tokens": tokens}})).load({"embed.weight": torch.ones(10, 4)})
    assert torch.equal(plain["at"](torch.ones(2, 3, dtype=torch.int64))[0], torch.tensor([[0, 1, 2]]))


def test_within_default_dtype_parameters_have_it_and_after_an_error_no_longer() -> None:
    with nn.default_dtype("bfloat16"):
        assert nn.Linear(2, 2).weight.dtype == "bfloat16"
    with pytest.raises(SpecError), nn.default_dtype("float16"):
        nn.Fused()
    assert nn.Linear(2, 2).weight.dtype == "float32"


class Body(nn.Module):
    def __init__(self) -> None:
        self.embed_tokens = nn.Embedding(7, 4, "bfloat16")

    def forward(self, tokens: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE) -> nn.Tensor:
        x = op.split_heads(self.embed_tokens(tokens), 4)
        return op.merge_heads(op.attention(x, x, x, cache=cache[0]))


class TestCausalLM:
    @pytest.mark.parametrize("tied", [False, True])
    def test_its_methods_agree_on_the_last_token(self, tied: bool) -> None:
        body = Body()
        model = nn.CausalLM(body, body.embed_tokens, tied)
        names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not tied)
        assert [name for name, _ in model.named_parameters()] == names
        ir = model.export(nn.causal_lm_spec(spec.Cache(1, 1, 4, "bfloat16"), 16))
        session = nn.compile(ir).load({name: torch.randn(7, 4).bfloat16() for name in names})
        tokens = torch.tensor([[1, 2, 3, 6], [5, 0, 0, 4]])
        whole = session["logits"](tokens)
        assert (whole.dtype, list(whole.shape)) == (torch.float32, [2, 4, 7])
        cache = session.make_cache(batch=2, max_seq=8)
        first = session["prefill"](tokens[:, :3], cache)
        torch.testing.assert_close(first, whole[:, 2:3], rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            session["decode"](tokens[:, 3:], cache), whole[:, 3:], rtol=0.02, atol=0.02
        )

    def test_its_spec_bounds_texts_and_leaves_the_cache_given_as_it_was(self) -> None:
        given = spec.Cache(1, 1, 4, "bfloat16", window=3)
        made = nn.causal_lm_spec(given, 16)
        assert [*made] == ["logits", "prefill", "decode"]
        assert str(given.max_seq) == "max_seq"
        assert given.max_seq.symbols[0].max is None
        cache = made["decode"]["cache"]
        assert cache.windows == (3,)
        assert cache.max_seq.symbols[0].max == 16
        assert cache.batch.symbols[0].min == 1


def test_without_a_cache_every_layer_has_none() -> None:
    assert nn.NO_CACHE[0] is nn.NO_CACHE[57] is None
    assert repr(nn.NO_CACHE) == "<no cache>"


@pytest.mark.parametrize("rotated", [2, 6, 8])
def test_rows_in_the_order_of_halves_give_the_scores_of_pairs_of_neighbours(rotated: int) -> None:
    q, k, x = torch.randn(24, 5), torch.randn(24, 5), torch.randn(2, 7, 5)
    angles = torch.randn(7, rotated // 2)
    order = nn.pairs_as_halves(8, rotated)

    def scores(weights: list[torch.Tensor], **kwargs: bool) -> torch.Tensor:
        heads = [nn.eager(op.split_heads, x @ weight.T, 8) for weight in weights]
        turned = [op.rope(h, angles.cos(), angles.sin(), **kwargs) for h in heads]
        return torch.einsum("bshk,bthk->bhst", *turned)

    ordered = [nn.eager(order, weight) for weight in (q, k)]
    torch.testing.assert_close(scores(ordered), scores([q, k], interleaved=True))


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_slopes_of_alibi_are_those_of_its_paper_and_of_its_code_for_other_numbers_of_heads(
    heads: int,
) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    expected = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32).reshape(1, heads, 1, 5)
    tokens = torch.zeros(1, 5, dtype=torch.int64)
    torch.testing.assert_close(nn.eager(nn.ALiBi(heads), tokens, nn.NO_CACHE), expected)
