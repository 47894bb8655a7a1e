# SPDX-License-Identifier: Apache-2.0
"""Models whose layers keep all kinds of state, as language models: from a folder, as artefacts, in ragged batches."""

import json
from pathlib import Path

import pytest
import state_models
import torch
from safetensors.torch import save_file

import nnfront as nn

FILE = Path(state_models.__file__)
KINDS = ["mm", "rr", "kwsr", "rmw", "ks"]


def folder(path: Path, kinds: str) -> Path:
    torch.manual_seed(0)
    config = state_models.Config(kinds=kinds)
    model = state_models.build(config)
    weights = {name: torch.randn([int(n) for n in p.shape]) * 0.3 for name, p in model.named_parameters()}
    save_file(weights, path / "model.safetensors")
    fields = {"model_type": "states", "kinds": kinds, "vocab_size": 61, "hidden_size": 32}
    (path / "config.json").write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module", params=KINDS)
def llm(request, tmp_path_factory):
    return nn.LLM.load(folder(tmp_path_factory.mktemp(request.param), request.param), model_file=FILE)


def by_logits(llm, prompt, count):
    """Greedy tokens by the logits of the whole text, each time anew: no cache."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, llm.logits(ids[None])[0, -1:].argmax(-1)])
    return ids[len(prompt) :]


def test_prompts_of_different_lengths_go_on_as_without_a_cache(llm):
    prompts = [torch.randint(0, 61, (n,)) for n in (3, 11, 11, 1)]
    got = llm.generate_ids(prompts, 9)
    for prompt, ids in zip(prompts, got, strict=True):
        assert ids.tolist() == by_logits(llm, prompt, 9).tolist()


@pytest.mark.parametrize("page_size", [None, 4])
def test_decoding_has_the_logits_of_the_whole_text(llm, page_size):
    ids = torch.randint(0, 61, (2, 20))
    cache = llm.session.make_cache(batch=2, max_seq=32, page_size=page_size)
    got = [llm.session["prefill"](ids[:, :7], cache)]
    got += [llm.session["decode"](ids[:, i : i + 1], cache) for i in range(7, 20)]
    torch.testing.assert_close(torch.cat(got, 1), llm.logits(ids)[:, 6:], rtol=1e-4, atol=1e-4)


def test_an_artefact_goes_on_as_the_folder_does(llm, tmp_path):
    llm.save(tmp_path / "artefact")
    prompts = [torch.randint(0, 61, (n,)) for n in (5, 2)]
    loaded = nn.LLM.load(tmp_path / "artefact")
    for a, b in zip(llm.generate_ids(prompts, 6), loaded.generate_ids(prompts, 6), strict=True):
        assert a.tolist() == b.tolist()


def test_a_latent_is_stored_once_and_memory_says_so(tmp_path):
    llm = nn.LLM.load(folder(tmp_path, "mr"), model_file=FILE)
    size = state_models.LATENT + state_models.ROPE
    assert llm.session.make_cache(batch=2, max_seq=10).nbytes == 2 * 10 * size * 4 + 2 * 32 * 4 * 4
    report = str(llm.session.memory(batch=2, max_seq=10, seq=4))
    assert "caches keep 64 B a token: latent 64 B\n" in report
    assert "caches keep 512 B a sequence: conv 384 B, ssm 128 B\n" in report
