# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters that PEFT has written, merged: the logits are those of PEFT, which keeps them apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
SHIPPED = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
VOCAB = 80
IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def llama(**changes: Any) -> LlamaForCausalLM:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}, attn_implementation="eager")).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config).eval()


def adapted(base: torch.nn.Module, folder: Path, seed: int = 1, **settings: Any) -> PeftModel:
    """Write a random adapter and the base itself; return PEFT's model of both."""
    base.save_pretrained(folder / "base")
    torch.manual_seed(seed)
    values = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS, **settings}
    model = get_peft_model(base, LoraConfig(**values)).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name or "modules_to_save" in name or (name.endswith("bias") and settings.get("bias")):
            parameter.data.normal_(std=0.3).add_(1.0 if "magnitude" in name else 0.0)
    model.save_pretrained(folder / "adapter")
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def assert_equals(model: torch.nn.Module, folder: Path, **settings: Any) -> nn.LLM:
    llm = nn.LLM.load(folder / "base", lora=[folder / "adapter"], **settings)
    torch.testing.assert_close(llm.logits(IDS), logits(model), atol=2e-4, rtol=2e-4)
    return llm


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp.down_proj": 3}, "alpha_pattern": {"v_proj": 11}},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"use_dora": True},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"},
    ],
    ids=["plain", "rslora", "patterns", "embedding and head", "modules to save", "dora", "no say"],
)
def test_a_merged_adapter_computes_what_peft_computes(settings: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(llama(), tmp_path, **settings)
    assert not torch.allclose(logits(model), logits(llama()), atol=1e-2)
    assert_equals(model, tmp_path)


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"lora_bias": True}], ids=["bias", "lora_bias"])
def test_biases_of_an_adapter_are_merged(settings: dict[str, Any], tmp_path: Path) -> None:
    base = llama(attention_bias=True)
    assert_equals(adapted(base, tmp_path, **{"target_modules": ["q_proj", "o_proj"], **settings}), tmp_path)


@pytest.mark.parametrize("dora", [False, True])
def test_weights_that_are_stored_turned_are_changed_turned(dora: bool, tmp_path: Path) -> None:
    """`c_proj` of attention is square: the shapes do not tell."""
    targets = ["attn.c_attn", "attn.c_proj", "mlp.c_proj"]
    model = adapted(gpt2(), tmp_path, target_modules=targets, fan_in_fan_out=True, use_dora=dora)
    assert_equals(model, tmp_path)


def test_several_adapters_count_by_their_weights(tmp_path: Path) -> None:
    base = llama()
    expected = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    for name, factor, seed in (("one", 0.5, 1), ("two", -2.0, 2)):
        adapted(llama(), tmp_path / name, seed)
        stored = load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        for key, a in stored.items():
            if key.endswith("lora_A.weight"):
                weight = key.removeprefix("base_model.model.").replace("lora_A.", "")
                expected[weight] += factor * 6 / 4 * stored[key.replace("lora_A", "lora_B")] @ a
    base.load_state_dict(expected)
    folders = [(tmp_path / "one" / "adapter", 0.5), f"{tmp_path / 'two' / 'adapter'}=-2"]
    llm = nn.LLM.load(tmp_path / "one" / "base", lora=folders)
    torch.testing.assert_close(llm.logits(IDS), logits(base), atol=2e-4, rtol=2e-4)


def test_a_merged_weight_is_quantised_like_one_that_was_stored_merged(tmp_path: Path) -> None:
    model = adapted(llama(), tmp_path)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = nn.LLM.load(tmp_path / "merged", quant="int8")
    llm = nn.LLM.load(tmp_path / "base", quant="int8", lora=[tmp_path / "adapter"])
    assert str(llm.quantized) == str(merged.quantized)
    torch.testing.assert_close(llm.logits(IDS), merged.logits(IDS), atol=5e-3, rtol=5e-3)


def test_a_weight_that_others_quantised_is_dequantised_and_changed(tmp_path: Path) -> None:
    base, scales = llama(), {}
    for name, weight in base.named_parameters():
        if name.endswith("proj.weight"):
            scale = weight.detach().abs().amax(1, keepdim=True) / 127
            scales[name] = (weight.detach() / scale).round().to(torch.int8), scale
            weight.data = scales[name][0] * scale
    model = adapted(base, tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    stored = load_file(file)
    for name, (q, scale) in scales.items():
        stored |= {name: q, f"{name}_scale": scale}
    save_file(stored, file)
    config = tmp_path / "base" / "config.json"
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": quantization}))
    assert_equals(model, tmp_path)


def test_an_update_puts_another_adapter_in_the_place_of_one(tmp_path: Path) -> None:
    other = adapted(llama(), tmp_path / "other", seed=2)
    llm = assert_equals(adapted(llama(), tmp_path), tmp_path)
    stored = load_file(tmp_path / "other" / "adapter" / "adapter_model.safetensors")
    llm.session.update({f"lora0.{name}": tensor for name, tensor in stored.items()})
    torch.testing.assert_close(llm.logits(IDS), logits(other), atol=2e-4, rtol=2e-4)


def test_commands_that_load_take_adapters(tmp_path: Path, capfd: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = "model.layers.0.mlp.down_proj"
    outputs, inputs = load_file(SHIPPED / "model.safetensors")[f"{weight}.weight"].shape
    shapes = {"A": (4, inputs), "B": (outputs, 4)}
    stored = {
        f"base_model.model.{weight}.lora_{side}.weight": torch.randn(shape, generator=generator)
        for side, shape in shapes.items()
    }
    save_file(stored, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    expected = nn.LLM.load(SHIPPED, lora=[(tmp_path, 0.25)]).generate("def main", 8)
    assert expected != nn.LLM.load(SHIPPED).generate("def main", 8)
    assert main(["run", str(SHIPPED), "-p", "def main", "-n", "8", "--lora", f"{tmp_path}=0.25"]) == 0
    assert capfd.readouterr().out == f"def main{expected}\n"


def test_an_adapter_of_a_checkpoint_in_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    model = adapted(llama().to(torch.bfloat16), tmp_path)
    llm = nn.LLM.load(tmp_path / "base", dtype="float32", lora=[tmp_path / "adapter"])
    torch.testing.assert_close(llm.logits(IDS), logits(model.float()), atol=2e-4, rtol=2e-4)


def test_an_artefact_and_a_cache_hold_what_was_merged(tmp_path: Path, capfd: Any) -> None:
    model = adapted(llama(), tmp_path)
    base, adapter, out = (str(tmp_path / name) for name in ("base", "adapter", "out"))
    assert main(["export", base, "-o", out, "--lora", f"{adapter}=1.0"]) == 0
    torch.testing.assert_close(nn.LLM.load(out).logits(IDS), logits(model), atol=2e-4, rtol=2e-4)
    for _ in range(2):
        assert_equals(model, tmp_path, cache=tmp_path / "cache")
    without = nn.LLM.load(base, cache=tmp_path / "cache")
    torch.testing.assert_close(without.logits(IDS), logits(llama()), atol=2e-4, rtol=2e-4)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(out, lora=[adapter])
    assert "nnfront export DIR -o OUT --lora ADAPTER" in str(caught.value)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(folder / "base", lora=[folder / "adapter"], **settings)
    return str(caught.value).replace(str(folder), "DIR")


def change(folder: Path, **changes: Any) -> None:
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_every_key_that_is_not_understood_is_named(tmp_path: Path) -> None:
    adapted(llama(), tmp_path)
    change(
        tmp_path,
        use_qalora=True,
        layer_replication=[[0, 2]],
        init_lora_weights="pissa",
        novelty=3,
        r="4",
        rank_pattern={"(a+)+": 2},
        alpha_pattern={"q_proj": "x"},
    )
    assert refusal(tmp_path) == (
        "DIR/adapter/adapter_config.json says what is not read\n"
        "  init_lora_weights is 'pissa', expected True, False, 'gaussian', 'orthogonal' or 'eva'\n"
        "  r is '4', expected an int >= 1\n"
        "  rank_pattern has the pattern '(a+)+', expected a module's name or the end of it\n"
        "  alpha_pattern['q_proj'] is 'x', expected a number\n"
        "  layer_replication is [[0, 2]], and no reader knows the key\n"
        "  use_qalora is True, and no reader knows the key\n"
        "  novelty is 3, and no reader knows the key\n"
        "  help: merge the adapter where it was trained, or take out keys that do not change what weights are"
    )


def test_tensors_that_fit_no_weight_are_one_error(tmp_path: Path) -> None:
    adapted(llama(), tmp_path, target_modules=["q_proj"])
    change(tmp_path, base_model_name_or_path="org/base")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = load_file(file)
    first = "base_model.model.model.layers.0.self_attn.q_proj"
    stored[f"{first}.lora_A.weight"] = torch.zeros(3, 64)
    stored[first.replace("q_proj", "q_prj") + ".lora_A.weight"] = torch.zeros(4, 64)
    stored[first.replace("q_proj", "q_prj") + ".lora_B.weight"] = torch.zeros(64, 4)
    del stored["base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"]
    stored["other"] = torch.zeros(1)
    save_file(stored, file)
    text = refusal(tmp_path)
    assert text.splitlines()[0] == "DIR/adapter: the adapter does not fit the model"
    assert f"'{first}.lora_A.weight': it is float32[3, 64], expected floats [4, 64]" in text
    assert (
        "the model has no 'model.layers.0.self_attn.q_prj.weight'; nearest: 'model.layers.0.self_attn.q_proj.weight'"
        in text
    )
    assert (
        "'base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight': a module's product has two matrices, A and B"
        in text
    )
    assert "'other': its name does not begin with base_model.model." in text
    assert text.splitlines()[-1] == "  help: it was trained on 'org/base': load it with that"


def test_an_adapter_of_another_base_is_refused_before_bytes_are_read(tmp_path: Path) -> None:
    adapted(llama(), tmp_path)
    llama(hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "base")
    assert "the adapter does not fit the model" in refusal(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
    ],
    ids=["embedding", "head", "head saved", "both saved"],
)
@pytest.mark.parametrize("quant", [None, "int8"])
def test_tied_tables_are_two_where_an_adapter_changes_one(
    settings: dict[str, Any], quant: str | None, tmp_path: Path
) -> None:
    model = adapted(llama(tie_word_embeddings=True), tmp_path, **settings)
    if quant is None:
        assert_equals(model, tmp_path)
    else:
        llm = nn.LLM.load(tmp_path / "base", quant=quant, lora=[tmp_path / "adapter"])
        torch.testing.assert_close(llm.logits(IDS), logits(model), atol=0.2, rtol=0.1)


def test_a_tie_that_no_config_undoes_is_refused(tmp_path: Path) -> None:
    adapted(llama(tie_word_embeddings=True), tmp_path, target_modules=["lm_head"])
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    source = (SHIPPED.parents[1] / "models" / "llama.py").read_text()
    model_file = tmp_path / "always_tied.py"
    model_file.write_text(source.replace("config.tie_word_embeddings)", "True)"))
    assert (
        "'model.embed_tokens.weight' and 'lm_head.weight' are one tensor here, and the adapter changes one of them"
        in refusal(tmp_path, model_file=model_file)
    )


@pytest.mark.parametrize("given", [3, None, ("adapter",), ("adapter", "half")])
def test_what_names_no_folder_is_said(given: Any) -> None:
    with pytest.raises(LoadError, match="expected a folder, or a folder and its weight"):
        nn.LLM.load(SHIPPED, lora=[given])


def test_an_adapter_without_tensors_and_numbers_without_meaning_are_refused(tmp_path: Path) -> None:
    adapted(llama(), tmp_path)
    save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")
    assert "'adapter_model.safetensors': it holds no tensor" in refusal(tmp_path)
    change(tmp_path, lora_alpha=10**399, rank_pattern={"q_proj": 10**399})
    text = refusal(tmp_path)
    assert "lora_alpha is 1000" in text
    assert "rank_pattern['q_proj'] is 1000" in text


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ("adapter", "expected a list of folders"),
        (["nowhere"], "cannot be opened"),
        (["base"], "adapter_config.json does not exist"),
        (["adapter=nan"], "expected a finite number"),
    ],
)
def test_what_is_no_adapter_is_said(lora: Any, message: str, tmp_path: Path) -> None:
    adapted(llama(), tmp_path)
    given = str(tmp_path / lora) if isinstance(lora, str) else [str(tmp_path / each) for each in lora]
    with pytest.raises(LoadError, match=message):
        nn.LLM.load(tmp_path / "base", lora=given)
