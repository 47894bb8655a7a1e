# SPDX-License-Identifier: Apache-2.0
"""`nnfront verify`: models that agree with transformers are equal; of planted mistakes it names the module that has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "examples" / "models"
SHIPPED = HERE.parents[1] / "examples" / "checkpoints" / "pylib-3m"
LAYER = "model.layers.0"
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with biases and grouped heads, its numbers large enough that each matters."""
    return _saved(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True)),
        tmp_path_factory.mktemp("llama"),
    )


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.MistralConfig(**SIZES, sliding_window=8, head_dim=8, tie_word_embeddings=True)
    return _saved(transformers.MistralForCausalLM(config), tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(**SIZES, **more, head_dim=8)
    return _saved(transformers.Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("experts"))


def _saved(model: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def _mistaken(source: Path, right: str, wrong: str, folder: Path) -> Path:
    text = source.read_text(encoding="utf-8")
    assert text.count(right) == 1
    file = folder / "mistaken.py"
    file.write_text(text.replace(right, wrong), encoding="utf-8")
    return file


LLAMA = HERE / "explicit_llama.py"
MOE = MODELS / "qwen3_moe.py"
MISTAKES = {
    "gate and up swapped": ("llama", LLAMA, "[self.gate_proj.weight, self.up_proj.weight]", "[self.up_proj.weight, self.gate_proj.weight]", f"{LAYER}.mlp"),
    "rotary pairs neighbours": ("llama", LLAMA, "q = op.rope(op.reshape(q, (b, s, h, k)), cos, sin)", "q = op.rope(op.reshape(q, (b, s, h, k)), cos, sin, interleaved=True)", f"{LAYER}.self_attn"),
    "scale missing": ("llama", LLAMA, "cache=cache, window", "cache=cache, scale=1.0, window", f"{LAYER}.self_attn"),
    "positions of queries off by one": ("llama", LLAMA, "q = op.rope(op.reshape(q, (b, s, h, k)), cos, sin)", "later = [op.concat([t[:, 1:], t[:, -1:]], 1) for t in (cos, sin)]\n        q = op.rope(op.reshape(q, (b, s, h, k)), *later)", f"{LAYER}.self_attn"),
    "expert transposed": ("experts", MOE, "super().__init__(gate, nn.Experts(e, d, inner, config.hidden_act))", "super().__init__(gate, nn.Experts(e, d, inner, config.hidden_act))\n        self.experts.down_weight = nn.op.permute_dims(self.experts.down_weight, (0, 2, 1))", f"{LAYER}.mlp.experts"),
    "epsilon": ("llama", LLAMA, "self.input_layernorm = nn.RMSNorm(c.hidden_size, -1, c.rms_norm_eps", "self.input_layernorm = nn.RMSNorm(c.hidden_size, -1, 1e-3", f"{LAYER}.input_layernorm"),
    "window one too wide": ("mistral", LLAMA, "self.window = c.sliding_window", "self.window = c.sliding_window and c.sliding_window + 1", f"{LAYER}.self_attn"),
    "bias dropped": ("llama", LLAMA, "self.qkv_weight, self.qkv_bias)", "self.qkv_weight)", f"{LAYER}.self_attn"),
    "router not renormalised": ("experts", MOE, "normalized=config.norm_topk_prob)", "normalized=False)", f"{LAYER}.mlp"),
    "norm after instead of before": ("llama", LLAMA, "x + self.mlp(self.post_attention_layernorm(x))", "x + self.post_attention_layernorm(self.mlp(x))", LAYER),
    "heads of keys in another order": ("llama", LLAMA, "y = op.attention(q, key", "key = op.concat([key[:, :, 1:], key[:, :, :1]], 2)\n        y = op.attention(q, key", f"{LAYER}.self_attn"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_of_a_planted_mistake_its_module_is_named(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder, source, right, wrong, module = MISTAKES[name]
    file = _mistaken(source, right, wrong, tmp_path)
    found = nn.verify(request.getfixturevalue(folder), file)
    assert found.fault is not None
    assert found.fault.path == module, str(found)


@pytest.mark.parametrize(("folder", "tied"), [("mistral", False), ("llama", True)])
def test_a_head_that_is_tied_or_not_as_the_checkpoint_is_not_is_named_before_anything_runs(
    folder: str, tied: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    file = _mistaken(LLAMA, "config.tie_word_embeddings)", f"{tied})", tmp_path)
    with pytest.raises(LoadError) as caught:
        nn.verify(request.getfixturevalue(folder), file)
    assert "lm_head.weight" in str(caught.value)


@pytest.mark.parametrize("folder", ["llama", "mistral"])
def test_models_without_a_mistake_are_equal(folder: str, request: pytest.FixtureRequest) -> None:
    found = nn.verify(request.getfixturevalue(folder), LLAMA)
    assert found.fault is None, str(found)
    assert found.eager < 1e-5
    assert {"model.layers.1.self_attn.o_proj", "model.norm", "lm_head"} <= set(found.compared)


def test_parts_of_a_fused_product_are_compared_by_their_own_names() -> None:
    found = nn.verify(SHIPPED)
    assert found.fault is None
    assert f"{LAYER}.self_attn.k_proj" in found.compared


def test_a_formula_that_gives_no_part_of_what_transformers_multiplies_is_told_from_the_computation(
    llama: Path, tmp_path: Path
) -> None:
    right = "[self.gate_proj.weight, self.up_proj.weight]"
    wrong = "[self.gate_proj.weight, self.gate_proj.weight + self.up_proj.weight]"
    found = nn.verify(llama, _mistaken(LLAMA, right, wrong, tmp_path))
    assert found.fault is not None
    assert (found.fault.path, found.fault.kind) == (f"{LAYER}.mlp", "weights")
    assert found.fault.details == (f"no product gives what {LAYER}.mlp.up_proj gives",)
    (formula,) = found.fault.formulas
    assert formula.startswith(
        f"gate_up_weight = concat({LAYER}.mlp.gate_proj.weight, add({LAYER}.mlp.gate_proj.weight, "
    )
    assert "mistaken.py:" in formula
    assert "mistaken.py:" in found.fault.where


def test_a_mistake_after_the_products_is_one_of_the_computation(llama: Path, tmp_path: Path) -> None:
    found = nn.verify(llama, _mistaken(LLAMA, "op.silu(gate)", "op.relu(gate)", tmp_path))
    assert found.fault is not None
    assert (found.fault.path, found.fault.kind, found.fault.details) == (f"{LAYER}.mlp", "computation", ())


def test_a_transform_that_gives_other_weights_than_the_formulas_is_told(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = nn.Executable.load

    def spoiled(self: nn.Executable, *args: Any, **kwargs: Any) -> nn.Session:
        session = load(self, *args, **kwargs)
        session.weights[f"{LAYER}.mlp.gate_up_weight"].mul_(2)
        return session

    monkeypatch.setattr(nn.Executable, "load", spoiled)
    found = nn.verify(llama, LLAMA)
    assert found.fault is not None
    assert (found.fault.path, found.fault.kind) == (f"{LAYER}.mlp", "weights")
    assert found.eager < 1e-5 < found.compiled


def test_the_command_says_equal_or_where(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(llama), "--model", str(LLAMA), "--tokens", "1", "5", "3"]) == 0
    assert capsys.readouterr().out.endswith("equal to transformers\n")
    wrong = _mistaken(LLAMA, "op.silu(gate)", "op.relu(gate)", tmp_path)
    assert main(["verify", str(llama), "--model", str(wrong)]) == 1
    assert f"first divergence: {LAYER}.mlp (computation)" in capsys.readouterr().out


def test_what_transformers_cannot_load_is_one_error(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "model"))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError):
        nn.verify(folder)


ENCODER = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
BERT, T5, WHISPER = (MODELS / f"{name}.py" for name in ("bert", "t5", "whisper"))
OTHERS: dict[Path, tuple[str, dict[str, Any]]] = {
    BERT: ("BertModel", {**ENCODER, "type_vocab_size": 2}),
    MODELS / "modernbert.py": ("ModernBertModel", {**ENCODER, "pad_token_id": 0}),
    T5: ("T5ForConditionalGeneration", {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    WHISPER: ("WhisperForConditionalGeneration", {
        "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "pad_token_id": 0,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Path]:
    """Folders of models that do not continue texts, by their model files."""
    folders = {}
    for file, (name, sizes) in OTHERS.items():
        kind = getattr(transformers, name)
        folders[file] = _saved(kind(kind.config_class(**sizes)), tmp_path_factory.mktemp(file.stem))
    return folders


@pytest.mark.parametrize("file", OTHERS, ids=lambda file: file.stem)
def test_encoders_and_encoder_decoders_without_a_mistake_are_equal(
    file: Path, others: dict[Path, Path]
) -> None:
    found = nn.verify(others[file])
    assert found.fault is None, str(found)
    assert found.eager < 1e-4
    assert len(found.compared) > 20
    what = "hidden states" if file.stem.endswith("bert") else "logits"
    assert f"modules compared; {what} differ by" in str(found)


OTHER_MISTAKES = {
    "position ignored": (BERT, "x_BSD + self.position_embeddings(self.positions(tokens))", "x_BSD", "embeddings"),
    "another activation": (BERT, "return self.activation(self.dense(x_BSD))", "return op.relu(self.dense(x_BSD))", "encoder.layer.0.intermediate"),
    "what it came from left out": (BERT, "self.LayerNorm(self.dense(y) + x_BSD)", "self.LayerNorm(self.dense(y))", "encoder.layer.0.attention.output"),
    "scores scaled": (T5, "is_causal=self.is_causal, scale=1.0)", "is_causal=self.is_causal)", "encoder.block.0.layer.0.SelfAttention"),
    "cross attention scaled": (T5, "nn.cross_attention(q, memory, scale=1.0)", "nn.cross_attention(q, memory)", "decoder.block.0.layer.1.EncDecAttention"),
    "the gate left out": (WHISPER, "self.fc2(self.activation(self.fc1(self.final_layer_norm(x_BSD))))", "self.fc2(self.fc1(self.final_layer_norm(x_BSD)))", "model.encoder.layers.0"),
    "the wrong part of a sound": (WHISPER, "stride=2, padding=1)", "stride=2, padding=1)\n        self.conv2.forward = lambda x, f=self.conv2.forward: f(op.flip(x, 2))", "model.encoder.conv2"),
    "memory of another layer's norm": (WHISPER, "self.encoder_attn(self.encoder_attn_layer_norm(x_BSD), memory)", "self.encoder_attn(self.self_attn_layer_norm(x_BSD), memory)", "model.decoder.layers.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MISTAKES)
def test_of_a_mistake_in_an_encoder_or_a_decoder_its_module_is_named(
    name: str, others: dict[Path, Path], tmp_path: Path
) -> None:
    source, right, wrong, module = OTHER_MISTAKES[name]
    found = nn.verify(others[source], _mistaken(source, right, wrong, tmp_path))
    assert found.fault is not None
    assert found.fault.path == module, str(found)


def test_of_a_model_that_gives_something_else_nothing_is_compared(
    others: dict[Path, Path], tmp_path: Path
) -> None:
    file = _mistaken(BERT, 'methods = ("hidden", "mean", ', 'methods = ("mean", ', tmp_path)
    with pytest.raises(LoadError) as caught:
        nn.verify(others[BERT], file)
    assert str(caught.value) == (
        f"{others[BERT]} holds a model of which nothing is compared\n"
        "  methods are 'mean', 'pooled'\n"
        "  help: `logits`, or `hidden` of an encoder, is what transformers' model gives as well"
    )
