# SPDX-License-Identifier: Apache-2.0
"""Models that see images against transformers' own class, with random weights in the configurations of `configs/`, and the ways from images to texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from configurations import assert_near, configurations, kind_of, with_random_weights
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

import nnfront as nn
from nnfront.cli import main
from nnfront.engine.params import Sampling
from nnfront.errors import LoadError, RunError
from nnfront.llm.model_files import find_architecture
from nnfront.llm.sampling import Sampler

IMAGE = 99
SEEING = [*configurations(lambda name: name == "gemma3")]


def reference(model_type: str, sizes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes)
    kind: Any = transformers.AutoModelForImageTextToText
    return with_random_weights(kind.from_config(config, attn_implementation="eager"))


def with_images(texts: list[list[int]], count: int) -> torch.Tensor:
    """Random texts of one length in which images stand at these positions."""
    ids = torch.randint(2, 97, (len(texts), 90))
    for row, places in zip(ids, texts, strict=True):
        for at in places:
            row[at : at + count] = IMAGE
    return ids


def logits_of(theirs: Any, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = theirs(
            ids, pixel_values=pixels, token_type_ids=(ids == IMAGE).long(), use_cache=False
        ).logits
    return logits


@pytest.mark.parametrize(("model_type", "sizes"), SEEING)
def test_images_are_seen_as_transformers_sees_them(
    model_type: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = reference(model_type, sizes)
    theirs.save_pretrained(tmp_path)
    session = nn.LLM.load(tmp_path).session
    count, vision = sizes["mm_tokens_per_image"], sizes["vision_config"]
    pixels = torch.randn(3, 3, vision["image_size"], vision["image_size"])
    with torch.no_grad():
        expected = theirs.get_image_features(pixels).pooler_output
    features = session["image_features"](pixels)
    assert_near(features, expected)

    # Two images in the first text, one of them at its end, and one in the second.
    ids = with_images([[5, 90 - count], [1]], count)
    expected = logits_of(theirs, ids, pixels)
    assert_near(session["logits_with_images"](ids, features), expected)

    # A prompt that ends behind its images, then token by token.
    ids = with_images([[5, 6 + count], [2, 7 + count]], count)
    pixels = torch.cat([pixels, pixels[:1].flip(2)])
    features, expected = session["image_features"](pixels), logits_of(theirs, ids, pixels)
    cache, seen = session.make_cache(batch=2, max_seq=90), 80
    got = [session["prefill_with_images"](ids[:, :seen], features, cache)]
    got += [session["decode"](ids[:, i : i + 1], cache) for i in range(seen, 90)]
    assert_near(torch.cat(got, 1), expected[:, seen - 1 :])

    # A text, then one with images behind it.
    cache = session.make_cache(batch=1, max_seq=90)
    session["prefill"](ids[:1, :4], cache)
    got = [session["prefill_with_images"](ids[:1, 4:seen], features[:2], cache)]
    assert_near(got[0], expected[:1, seen - 1 : seen])


def prepared(folder: Path, size: int, count: int) -> Any:
    """What prepares images and prompts, written to a folder."""
    signs = {"boi_token": "<img>", "eoi_token": "</img>", "image_token": "<soft>"}
    words = {"<pad>": 0, "</s>": 1, **{f"a{i}": i for i in range(2, 97)}}
    vocabulary = {**words, "<img>": 97, "</img>": 98, "<soft>": IMAGE}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "</s>", *signs.values()])
    fast: Any = transformers.PreTrainedTokenizerFast
    processor = transformers.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": size, "width": size}),
        fast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>", extra_special_tokens=signs),
        image_seq_length=count,
    )
    processor.save_pretrained(folder)
    return processor


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder with all that a text with images needs, transformers' model and its processor."""
    sizes = SEEING[0].values[1]
    folder = tmp_path_factory.mktemp("gemma3")
    theirs = reference("gemma3", sizes)
    with torch.no_grad():  # texts in which tokens vary, as what the layers add outweighs what a token is
        theirs.get_input_embeddings().weight.mul_(0.1)
    theirs.save_pretrained(folder)
    for i in range(2):
        noise = torch.randint(0, 256, (40, 30 + i, 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(folder / f"{i}.png")
    return folder, theirs, prepared(folder, 24, sizes["mm_tokens_per_image"])


PROMPT = "a5 <img> a7 a8 <img> a9"


def test_images_and_text_go_in_and_text_comes_out(
    seeing: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, theirs, processor = seeing
    files = [folder / f"{i}.png" for i in range(2)]
    model = nn.VisionLanguageModel.load(folder)
    made = processor(text=PROMPT, images=[[Image.open(file) for file in files]], return_tensors="pt")
    written = theirs.generate(**made, max_new_tokens=32, do_sample=False)[0, made["input_ids"].shape[1] :]
    steps = model.steps(*model.prepared(PROMPT, files), 32, Sampler(Sampling()))
    assert [int(step) for step in steps] == written.tolist()
    assert len({*written.tolist()}) > 2
    expected = processor.tokenizer.decode(written[:9], skip_special_tokens=True)
    assert model.generate(PROMPT, files, max_new_tokens=9) == expected
    assert (
        main(
            ["run", str(folder), "-p", PROMPT, "--image", str(files[0]), "--image", str(files[1]), "-n", "9"]
        )
        == 0
    )
    printed = capsys.readouterr()
    assert printed.out == f"{PROMPT}{expected}\n"
    assert "images" in printed.err


def test_a_model_that_sees_images_continues_texts_as_well(
    seeing: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    folder, theirs, _ = seeing
    ids = torch.randint(2, 97, (1, 20))
    llm = nn.LLM.load(folder)
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    assert_near(llm.logits(ids), expected)
    assert llm.generate("a5 a6", max_new_tokens=4)


def test_prompts_and_images_that_do_not_fit_are_refused(
    seeing: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, *_ = seeing
    model = nn.VisionLanguageModel.load(folder)
    with pytest.raises(RunError) as caught:
        model.prepared("a5 a6", [folder / "0.png"])
    assert str(caught.value) == (
        "the prompt has 0 places for images, and there are 1 images\n"
        "  help: write <img> where an image stands"
    )
    with pytest.raises(RunError, match="an image cannot be read"):
        model.prepared("<img>", [folder / "config.json"])
    with pytest.raises(RunError, match="the prompt does not fit"):
        model.generate("<img>", [folder / "0.png"], max_new_tokens=1000)
    shipped = "examples/checkpoints/pylib-3m"
    with pytest.raises(LoadError, match="holds no language model that sees images"):
        nn.VisionLanguageModel.load(shipped)
    assert main(["run", shipped, "-p", "x", "--image", "x.png"]) == 1
    assert f"{shipped} holds a model that sees no images" in capsys.readouterr().err


def test_a_folder_that_does_not_say_how_images_are_prepared_is_refused(tmp_path: Path) -> None:
    reference("gemma3", SEEING[0].values[1]).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="does not say how images and prompts are prepared"):
        nn.VisionLanguageModel.load(tmp_path).prepared("<img>", [])


def test_of_an_unknown_model_that_reads_more_than_text_it_is_said(tmp_path: Path) -> None:
    config = {"model_type": "llava", "text_config": {}, "vision_config": {}, "quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(tmp_path)
    assert caught.value.details[0] == "config.json has vision_config: the model reads more than text"


def test_the_decoder_alone_does_not_take_a_folder_with_images(seeing: tuple[Path, Any, Any]) -> None:
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(seeing[0], model_file=find_architecture("gemma3_text").file.__file__)
    assert "model_type is 'gemma3', expected 'gemma3_text'" in str(caught.value)


@pytest.mark.parametrize("tokens", [5, 16])
def test_images_that_cannot_be_pooled_to_so_many_tokens_are_refused(tokens: int) -> None:
    given = {**SEEING[0].values[1], "mm_tokens_per_image": tokens}
    file = find_architecture("gemma3").file
    with pytest.raises(LoadError) as caught:
        file.build(file.Config.from_hf({"model_type": "gemma3", **given}))
    assert caught.value.what == (
        f"mm_tokens_per_image is {tokens}, expected a square whose side divides 6 patches"
    )


def test_keys_of_the_encoder_that_are_absent_mean_what_transformers_takes_them_for() -> None:
    absent, written = (
        find_architecture("gemma3").file.Config.from_hf({"model_type": "gemma3", **given})
        for given in ({}, {"vision_config": transformers.SiglipVisionConfig().to_dict()})
    )
    assert absent.vision == written.vision


def test_it_is_a_decoder_that_more_is_given_to() -> None:
    assert kind_of("gemma3") == "decoder"
