# SPDX-License-Identifier: Apache-2.0
"""Every shipped encoder-decoder against transformers' own class, with random weights in the configurations of `configs/`, and the ways to texts."""

from __future__ import annotations

import json
import struct
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from configurations import TOKENS, assert_near, configurations, kind_of, with_random_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, WhisperFeatureExtractor

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError, RunError

RATE = 16000
CLASSES = {"t5": "T5ForConditionalGeneration", "whisper": "WhisperForConditionalGeneration"}


def reference(model_type: str, sizes: dict[str, Any], folder: Path) -> Any:
    """transformers' model, written to a folder with what prepares its sources."""
    torch.manual_seed(0)
    kind = getattr(transformers, CLASSES[model_type])
    config = AutoConfig.for_model(model_type, **sizes)
    model = with_random_weights(kind._from_config(config, attn_implementation="eager"))
    with torch.no_grad():  # texts in which tokens vary, as what the layers add outweighs what a token is
        for name, weight in model.named_parameters():
            if name.endswith(
                ("embed_positions.weight", "bias.weight", "o.weight", "wo.weight", "fc2.weight")
            ):
                weight.mul_(8)
    model.save_pretrained(folder)
    if model_type == "whisper":
        WhisperFeatureExtractor(feature_size=config.num_mel_bins, chunk_length=1).save_pretrained(folder)
    return model


def sources(model_type: str, ours: nn.Seq2Seq, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Sources of different lengths, as `encode` takes them."""
    if model_type == "whisper":
        return [ours.source(torch.randn(700 * n) * 0.1) for n in lengths]
    return [torch.randint(2, TOKENS, (n,)) for n in lengths]


def logits_of(theirs: Any, source: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    name = "input_ids" if source.dtype == torch.int64 else "input_features"
    with torch.no_grad():
        logits: torch.Tensor = theirs(**{name: source}, decoder_input_ids=tokens).logits
    return logits


@pytest.mark.parametrize(
    ("model_type", "sizes"), [*configurations(lambda name: kind_of(name) == "encoder-decoder")]
)
def test_it_computes_what_transformers_does(model_type: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    theirs = reference(model_type, sizes, tmp_path)
    ours = nn.Seq2Seq.load(tmp_path)
    session = ours.session

    # Whole texts about sources of one length, longer than any distance that has a bucket of its own.
    source = torch.stack(sources(model_type, ours, (21, 21)))
    tokens = torch.randint(0, TOKENS, (2, 40))
    expected = logits_of(theirs, source, tokens)
    assert_near(session["logits"](source, tokens), expected)

    # What an encoder has stored once, and a text in two parts, then token by token.
    memory = session.make_cache("memory", batch=2, max_source=50)
    cache = session.make_cache("cache", batch=2, max_seq=40)
    session["encode"](source, memory)
    got = [session["prefill"](tokens[:, part], memory, cache) for part in (slice(0, 5), slice(5, 20))]
    got += [session["decode"](tokens[:, i : i + 1], memory, cache) for i in range(20, 40)]
    assert_near(torch.cat(got, 1), expected[:, [4, *range(19, 40)]])

    # Greedy texts about sources of different lengths in one batch, each as transformers writes it about its source alone.
    given = sources(model_type, ours, (3, 17, 8))
    texts = ours.generate_ids(given, max_new_tokens=32)
    for source, text in zip(given, texts, strict=True):
        # Without a cache: theirs counts the decoder's layers by the encoder's.
        written = theirs.generate(source[None], max_new_tokens=32, use_cache=False)[0].tolist()
        assert text.tolist() == written[model_type == "t5" :]  # whose first token is the one that is given
    assert len({token for text in texts for token in text.tolist()}) > 3


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", CLASSES)
def test_bfloat16_errs_no_more_than_three_times_as_much_as_transformers(
    model_type: str, tmp_path: Path
) -> None:
    _, sizes = next(each.values for each in configurations(lambda name: name == model_type))
    theirs = reference(model_type, sizes, tmp_path)
    ours = nn.Seq2Seq.load(tmp_path, dtype="bfloat16")
    source = torch.stack(sources(model_type, ours, (21, 21)))
    tokens = torch.randint(0, TOKENS, (2, 40))
    exact = logits_of(theirs, source, tokens)
    floats = source if source.dtype == torch.int64 else source.bfloat16()
    half = logits_of(theirs.to(torch.bfloat16), floats, tokens)
    got = ours.session["logits"](floats, tokens)
    assert 0 < (got - exact).square().mean().sqrt() < 3 * (half - exact).square().mean().sqrt()


def with_tokenizer(folder: Path) -> Any:
    """Words a1 ... a99, and an end token that a source ends with."""
    vocabulary = {"<pad>": 0, "</s>": 1, **{f"a{i}": i for i in range(2, TOKENS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>"
    )


def first_sizes(model_type: str) -> dict[str, Any]:
    return dict(next(each.values[1] for each in configurations(lambda name: name == model_type)))


def test_text_goes_in_and_text_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = reference("t5", first_sizes("t5"), tmp_path)
    tokenizer = with_tokenizer(tmp_path)
    ours = nn.Seq2Seq.load(tmp_path)
    text = "a7 a20 a9 a41 a3"
    written = theirs.generate(tokenizer(text, return_tensors="pt").input_ids, max_new_tokens=12)[0]
    expected = tokenizer.decode(written, skip_special_tokens=True)
    assert ours.generate(text, max_new_tokens=12) == expected
    assert "".join(ours.generate(text, max_new_tokens=12, stream=True)) == expected
    assert main(["run", str(tmp_path), "-p", text, "-n", "12"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{expected}\n"
    assert all(phase in printed.err for phase in ("encode", "prefill", "decode"))
    drawn = ours.generate(text, max_new_tokens=12, temperature=1.0, seed=3)
    assert drawn == ours.generate(text, max_new_tokens=12, temperature=1.0, seed=3) != expected


def test_the_head_of_a_checkpoint_that_is_not_tied_is_its_own(tmp_path: Path) -> None:
    theirs = reference("t5", {**first_sizes("t5"), "tie_word_embeddings": False}, tmp_path)
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(TOKENS, 32) / 6)
    written = json.loads((tmp_path / "config.json").read_text())
    del written["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps({**written, "tie_word_embeddings": False}))
    names = {name: x.contiguous() for name, x in theirs.state_dict().items() if "embed_tokens" not in name}
    save_file(names, tmp_path / "model.safetensors")
    source, tokens = torch.randint(0, TOKENS, (2, 1, 9))
    assert_near(
        nn.Seq2Seq.load(tmp_path).session["logits"](source, tokens), logits_of(theirs, source, tokens)
    )


LANGUAGES = {
    "lang_to_id": {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12},
    "task_to_id": {"transcribe": 20, "translate": 21},
    "no_timestamps_token_id": 98,  # those behind it are timestamps
    "suppress_tokens": [40, 41, 42, 43, 99],
    "is_multilingual": True,
    "forced_decoder_ids": [[1, None], [2, 20]],
    "return_timestamps": False,
}


@pytest.mark.parametrize("said", [{}, {"language": "de"}, {"language": "fr", "task": "translate"}])
def test_a_sound_is_heard_in_its_language(said: dict[str, str], tmp_path: Path) -> None:
    theirs = reference("whisper", first_sizes("whisper"), tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"decoder_start_token_id": 3, "eos_token_id": 2, **LANGUAGES}))
    theirs = type(theirs).from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = nn.Seq2Seq.load(tmp_path)
    sounds = [torch.randn(n) * 0.1 for n in (16000, 4000, 9000)]
    given = [ours.source(sound) for sound in sounds]
    for feature, text in zip(given, ours.generate_ids(given, max_new_tokens=20, **said), strict=True):
        expected = theirs.generate(feature[None], max_new_tokens=20, **said)[0]
        assert text.tolist() == expected.tolist()
    with pytest.raises(RunError, match="the model has no language 'xx'") as caught:
        ours.generate_ids(given, language="xx")
    assert caught.value.help == "it has de, en, fr"


def test_a_recording_becomes_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = reference("whisper", first_sizes("whisper"), tmp_path)
    tokenizer = with_tokenizer(tmp_path)
    samples = (torch.randn(8000, 2).clamp(-3, 3) * 8000).to(torch.int16)
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(struct.pack(f"<{samples.numel()}h", *samples.flatten().tolist()))
    extractor = WhisperFeatureExtractor.from_pretrained(tmp_path)
    sound = (samples.double() / 2**15).mean(1).float()
    features = extractor(sound.numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    written = theirs.generate(features, max_new_tokens=9)[0]
    assert main(["run", str(tmp_path), "--audio", str(tmp_path / "sound.wav"), "-n", "9"]) == 0
    assert capsys.readouterr().out == tokenizer.decode(written, skip_special_tokens=True) + "\n"
    (tmp_path / "sound.wav").write_bytes(b"RIFF")
    assert main(["run", str(tmp_path), "--audio", str(tmp_path / "sound.wav")]) == 1
    assert "sound.wav is not a WAV file" in capsys.readouterr().err


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory) -> nn.Seq2Seq:
    folder = tmp_path_factory.mktemp("whisper")
    reference("whisper", first_sizes("whisper"), folder)
    return nn.Seq2Seq.load(folder)


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> nn.Seq2Seq:
    folder = tmp_path_factory.mktemp("t5")
    reference("t5", first_sizes("t5"), folder)
    return nn.Seq2Seq.load(folder)


def test_sounds_that_cannot_be_heard_are_refused(hears: nn.Seq2Seq) -> None:
    for sound, rate, text in (
        (torch.zeros(RATE + 1), RATE, "the sound has 1.0 seconds, the model hears 1.0"),
        (torch.zeros(100), 8000, "the sound has 8000 samples a second, the model hears 16000"),
        (torch.zeros(2, 100), RATE, "the sound is not a float tensor [samples]"),
        ("hello", RATE, "the source is a text, the model reads a sound"),
    ):
        with pytest.raises(RunError) as caught:
            hears.source(sound, rate)
        assert caught.value.what == text


def test_sources_that_cannot_be_read_are_refused(reads: nn.Seq2Seq) -> None:
    for given, text in (
        ([], "there is no source"),
        ([torch.tensor([], dtype=torch.int64)], "source 0 is not int64 [source], a token at least"),
        ([torch.tensor([1, TOKENS])], f"source 0 holds a token outside the vocabulary of {TOKENS}"),
    ):
        with pytest.raises(RunError) as caught:
            reads.generate_ids(given)
        assert caught.value.what == text
    with pytest.raises(RunError, match="the source is a sound, the model reads a text"):
        reads.source(torch.zeros(100))
    with pytest.raises(RunError, match="the text does not fit"):
        reads.generate_ids([torch.tensor([1])], max_new_tokens=1 << 15)
    with pytest.raises(LoadError, match="so it takes no text"):
        reads.generate("a")


def test_each_class_names_the_other(reads: nn.Seq2Seq, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LoadError, match="holds no language model") as caught:
        nn.LLM.load(reads.path)
    assert caught.value.help == "nnfront.Seq2Seq.load(DIR) loads an encoder-decoder"
    folder = "examples/checkpoints/pylib-3m"
    with pytest.raises(LoadError) as caught:
        nn.Seq2Seq.load(folder)
    assert str(caught.value) == (
        f"{folder} holds no encoder-decoder\n"
        "  there is no method 'encode', methods are 'logits', 'prefill', 'decode'\n"
        "  help: nnfront.LLM.load(DIR) loads a language model without an encoder"
    )
    assert main(["run", folder, "--audio", "x.wav"]) == 1
    assert f"{folder} holds a model that hears nothing" in capsys.readouterr().err


def test_a_folder_says_how_texts_begin(reads: nn.Seq2Seq, tmp_path: Path) -> None:
    for file in reads.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"decoder_start_token_id": "x"}))
    with pytest.raises(LoadError, match="decoder_start_token_id is 'x', expected a token"):
        nn.Seq2Seq.load(tmp_path)
    path.write_text(json.dumps({"decoder_start_token_id": 0, "suppress_tokens": [1, -2]}))
    with pytest.raises(LoadError, match="-2 is no token"):
        nn.Seq2Seq.load(tmp_path)
