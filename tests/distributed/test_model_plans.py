# SPDX-License-Identifier: Apache-2.0
"""Every model file that says what ranks divide: two ranks as threads compute what transformers does, by the plan that transformers has."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from configurations import CONFIGS, SIZES, assert_near, configurations, with_random_weights
from rank_threads import Threads
from transformers import AutoConfig, AutoModelForCausalLM

import nnfront as nn
from nnfront.errors import LoadError, SpecError
from nnfront.llm.model_files import find_architecture, known_architectures
from nnfront.nn.ranks import RankRMSNorm, _as
from nnfront.passes.taken_apart import taken_apart

DIVIDED = [
    name for name in known_architectures() if getattr(find_architecture(name).file.Config, "divided", ())
]
STYLES = {"colwise": {"column", "vocabulary"}, "rowwise": {"row", "vocabulary"}}


def sizes_of(name: str) -> dict[str, Any]:
    given = json.loads((CONFIGS / f"{name}.json").read_text())
    sizes = {**given.get("sizes", SIZES), **next(iter(given["configs"].values()))}
    sizes |= {"qk_layernorm": False} if name == "stablelm" else {}  # a norm for each head is refused
    return sizes | {key: 6 for key in ("num_experts", "num_local_experts") if key in sizes}


ALWAYS = (
    "bloom",
    "deepseek_v3",
    "gemma2",
    "gpt_oss",
    "llama",
    "mamba2",
    "olmo2",
    "phi3",
    "qwen2_moe",
    "qwen3_next",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.matrix) for n in DIVIDED]
)
def test_two_ranks_compute_what_transformers_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes_of(name))
    theirs = with_random_weights(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(0, 100, (2, 20))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    folder = nn.compile_folder(tmp_path, ranks=2)
    threads = Threads(2, monkeypatch)

    def logits(rank: int) -> torch.Tensor:
        session = folder.executable.of_rank(rank).load(folder.checkpoint)
        cache = session.make_cache(batch=2, max_seq=20)
        first = session["prefill"](ids[:, :15], cache)
        return torch.cat([first, *(session["decode"](ids[:, i : i + 1], cache) for i in range(15, 20))], 1)

    for found in threads.run(logits):
        assert_near(found, expected[:, 14:])
    assert threads.record[0] == threads.record[1]

    # What transformers divides, it divides alike; of what it replicates we may divide more.
    pattern = {k: v for k, v in (getattr(config, "base_model_tp_plan", None) or {}).items() if v in STYLES}
    _, plan = find_architecture(name).divided(folder.config, 2)
    for weight, planned in plan.weights.items():
        path = re.sub(r"^model\.", "", weight).rpartition(".")[0]
        for key, style in pattern.items():
            is_bias_of_row = weight.endswith(".bias") and style == "rowwise"
            if fnmatch.fnmatchcase(path, key) and not is_bias_of_row:
                assert planned.style in STYLES[style], weight


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "sizes"), [*configurations(lambda name: name in DIVIDED)])
def test_four_ranks_compute_what_one_process_does_or_say_what_does_not_divide(
    name: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = sizes | {key: 8 for key in ("num_experts", "num_local_experts") if sizes.get(key) == 5}
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes))
    with_random_weights(theirs).save_pretrained(tmp_path)
    ids, alone = torch.randint(0, 100, (2, 20)), nn.compile_folder(tmp_path)
    expected = alone.executable.load(alone.checkpoint)["logits"](ids)
    folder, refused = None, ""
    try:
        folder = nn.compile_folder(tmp_path, ranks=4)
    except (LoadError, SpecError) as error:
        refused = error.what
    if folder is None:
        assert re.search(r"divide|is in no rank's part", refused)
        return
    threads = Threads(4, monkeypatch)
    for found in threads.run(
        lambda rank: folder.executable.of_rank(rank).load(folder.checkpoint)["logits"](ids)
    ):
        assert_near(found, expected)


def test_sizes_that_do_not_divide_are_all_named() -> None:
    config = find_architecture("llama").file.TINY
    with pytest.raises(LoadError) as error:
        config.of_ranks(3)
    assert str(error.value) == (
        "the model does not divide among 3 ranks\n  num_attention_heads is 4\n  num_key_value_heads is 2\n"
        "  help: take a number of ranks that divides them"
    )


def test_experts_that_do_not_divide_are_refused() -> None:
    architecture = find_architecture("qwen3_moe")
    config = architecture.file.Config(**{**vars(architecture.file.TINY), "num_experts": 5})
    with pytest.raises(
        SpecError, match=re.escape("model.layers.1.mlp.experts: 5 experts do not divide among 2 ranks")
    ):
        architecture.divided(config, 2)


def test_a_model_file_that_says_nothing_is_not_divided() -> None:
    with pytest.raises(LoadError) as error:
        find_architecture("gpt2").file.TINY.of_ranks(2)
    what, where, help = str(error.value).split("\n")
    assert what == "the model file does not say how ranks divide the model"
    assert where.endswith("examples/models/gpt2.py")
    assert help == (
        "  help: name the fields of its Config that they divide in Config.divided, if a model of less of them is what one rank computes"
    )


class Normed(nn.Module):
    """A norm over features that ranks would divide."""

    def __init__(self, size: int) -> None:
        self.up = nn.Linear(8, size, bias=False)
        self.norm = nn.LayerNorm(size)


class Raw(nn.Module):
    """A product with a parameter of its own, whose sum nobody would complete."""

    def __init__(self, size: int) -> None:
        self.down = nn.Parameter([8, size])


def test_a_norm_over_what_is_divided_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        nn.divide(Normed(4), Normed(8), 2)
    assert str(error.value) == (
        "norm normalises over features that ranks divide among them\n  8 features together, of which a rank has 4\n"
        "  help: this model cannot be divided like this: its norm needs all features of a token"
    )


def test_a_product_that_nobody_adds_up_is_refused() -> None:
    with pytest.raises(SpecError) as error:
        nn.divide(Raw(4), Raw(8), 2)
    assert str(error.value) == (
        "down is divided along axis 1, and nobody adds up what is multiplied with it\n"
        "  a rank has float32[8, 4] of float32[8, 8]\n"
        "  help: use nnfront.Linear or nnfront.Experts, whose parts ranks know how to add up"
    )


def test_explain_counts_what_ranks_send(tmp_path: Path) -> None:
    architecture = find_architecture("llama")
    ir = nn.passes.lift_transform_params(
        architecture.export(architecture.file.TINY, ranks=4), shared_transform=True
    )
    last = nn.compile(ir).explain("decode", batch=2).splitlines()[-1]
    # An embedding and two sums for each of two layers of [2, 1, 64] floats, of which a rank sends 2 * 3/4; and 65 logits for each of two rows to three others.
    assert last == (
        f"decode: 4 ranks meet for 5 all_reduce, 1 all_gather; each sends {5 * 2 * 64 * 4 * 2 * 3 // 4 + 3 * 2 * 65 * 4:,} bytes in a step"
    )


def test_a_weight_of_several_matrices_that_nobody_named_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    architecture = find_architecture("phi3")
    monkeypatch.setattr(nn, "joined", lambda sizes, *parameters: None)
    with pytest.raises(SpecError) as error:
        architecture.export(architecture.file.TINY, ranks=2)
    assert error.value.what == (
        "model.layers.0.self_attn.qkv_proj.weight holds several matrices one after the other, and ranks would cut it as one"
    )
    assert "phi3.py:" in str(error.value)
    assert error.value.help == "say what it holds: nnfront.joined(sizes, weight)"


def test_a_row_of_a_weight_that_a_dim_names_is_one_of_its_parts() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            self.table = nn.Parameter(("rows", 4), "float32")

        def last(self, x: nn.Tensor) -> nn.Tensor:
            return self.table[x.shape[0] - 1] + x

    ir = Rows().export({"last": {"x": nn.spec.Tensor([nn.Dim("rows", min=1), 4], "float32")}})
    assert [name for name, _ in taken_apart(ir, ["table"])] == ["table"]


@dataclass(frozen=True)
class OfHeads(nn.DecoderConfig):
    """Its heads are as large as their number makes them."""

    divided: ClassVar = nn.USUALLY_DIVIDED

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads


def test_heads_that_grow_where_there_are_fewer_are_refused() -> None:
    with pytest.raises(LoadError) as error:
        OfHeads().of_ranks(2)
    assert error.value.details == ("head_size is 128, and 256 where heads are divided",)


def test_weights_that_no_rank_would_have_are_refused() -> None:
    architecture = find_architecture("stablelm")
    config = dataclasses.replace(architecture.file.TINY, qk_layernorm=True, num_hidden_layers=1)
    with pytest.raises(SpecError) as error:
        architecture.divided(config, 2)
    assert str(error.value) == (
        "model.layers.0.self_attn.k_layernorm.norms.1.weight is in no rank's part of the model\n"
        "  ranks would lack 3 weights\n"
        "  help: build the same modules for fewer heads: nnfront.divide compares them by their names"
    )


@pytest.mark.parametrize(("offset", "bias"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_of_all_ranks_features_is_torch_s(
    offset: float, bias: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(12) for name in (["weight", "bias"] if bias else ["weight"])}
    x = torch.randn(5, 12).to(getattr(torch, dtype))
    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    expected = expected * (weights["weight"] + offset) + weights.get("bias", 0.0)
    threads = Threads(3, monkeypatch)

    def one(rank: int) -> torch.Tensor:
        norm = _as(RankRMSNorm, nn.RMSNorm(4, -1, 1e-3, bias, "float32", offset), world=3)
        ir = norm.export({"forward": {"x": nn.spec.Tensor(["n", 4], dtype)}})
        mine = slice(4 * rank, 4 * rank + 4)
        session = nn.compile(ir).load({name: value[mine] for name, value in weights.items()})
        return session["forward"](x[:, mine])

    found = torch.cat(threads.run(one), 1)
    assert found.dtype == x.dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=1e-5 if dtype == "float32" else 2**-7, atol=1e-5
    )


def test_features_that_several_ranks_have_are_not_added_up() -> None:
    class Rounded(nn.Module):
        def __init__(self, size: int) -> None:
            self.up, self.down = nn.Linear(8, size, bias=False), nn.Linear(size, 8, bias=False)

    with pytest.raises(SpecError) as error:
        nn.divide(Rounded(16), Rounded(32), 4)
    assert str(error.value) == (
        "down.weight takes features of which several ranks have the same, and they would be added up more than once\n"
        "  a rank has float32[8, 16] of float32[8, 32]\n  help: let a rank have one of 4 parts of them"
    )
