# SPDX-License-Identifier: Apache-2.0
"""Real ranks over gloo: they compute what one process and transformers do, hold and read their share, and refuse together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from configurations import assert_near
from divided_models import MODELS
from rank_worker import TOKENS
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import nnfront as nn

Ran = list[dict[str, Any]]


def test_logits_are_those_of_transformers_on_every_rank(ran: Ran, folders: dict[str, Path]) -> None:
    for name in ran[0]["models"].keys() & MODELS.keys():
        theirs = AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager").eval()
        ids = torch.load(folders[name] / "ids.pt")
        with torch.no_grad():
            expected = theirs(ids, use_cache=False).logits
        for rank in ran:
            assert_near(rank["models"][name]["logits"], expected)


def test_greedy_tokens_are_those_of_one_process(ran: Ran, folders: dict[str, Path]) -> None:
    for name, first in ran[0]["models"].items():
        folder, _, quant = name.partition(" ")
        alone = nn.LLM.load(folders[folder], quant=quant or None)
        expected = alone.generate_ids(torch.load(folders[folder] / "ids.pt"), max_new_tokens=TOKENS)
        for rank in ran:
            assert rank["models"][name]["tokens"].tolist() == expected.tolist(), name
            assert rank["models"][name]["drawn"].tolist() == first["drawn"].tolist(), name
            if found := rank["artefacts"].get(name):
                assert found["tokens"].tolist() == expected.tolist(), name


def test_a_rank_holds_and_reads_its_share_and_what_is_replicated(ran: Ran, folders: dict[str, Path]) -> None:
    world = len(ran)
    ends = (
        "norm.weight",
        "layernorm.weight",
        "gate.weight",
        "a_proj.weight",
        "mqa.weight",
        "correction_bias",
    )
    for name in ran[0]["models"].keys() & MODELS.keys():
        with safe_open(folders[name] / "model.safetensors", "pt") as file:
            sizes = {key: file.get_tensor(key).nbytes for key in file.keys()}
        shared = sum(size for key, size in sizes.items() if key.endswith(ends))
        vectors = sum(size for key, size in sizes.items() if key.endswith(("norm.weight", "correction_bias")))
        kv = sum(size for key, size in sizes.items() if key.endswith(("k_proj.weight", "v_proj.weight")))
        repeated = kv * max(world // MODELS[name]["num_key_value_heads"] - 1, 0) // world
        padding = 4 * 2 * 64 * 4  # of the vocabulary, in rows of the embedding and of the head
        share = (sum(sizes.values()) - shared) / world + shared + repeated + padding
        header = (folders[name] / "model.safetensors").stat().st_size - sum(sizes.values())
        for rank in ran:
            found = rank["models"][name]
            assert found["weights"] <= share * 1.01, name
            assert found["planned"] <= share * 1.01, name
            # Weights once, norms a second time to compare them with those of others, and the header.
            assert found["read"] <= found["planned"] + 2 * header + vectors, name


def test_texts_with_guesses_are_those_of_one_process_without(ran: Ran, folders: dict[str, Path]) -> None:
    prompts = torch.tensor([[5, 6, 7, 8] * 4, [9] * 16])
    expected = nn.LLM.load(folders["llama"]).generate_ids(prompts, max_new_tokens=32)
    for rank in ran:
        assert rank["guessed"]["extended"] == ran[0]["guessed"]["extended"] > 0
        for text in rank["guessed"]["texts"].values():
            assert text.tolist() == expected.tolist()


def test_collectives_do_what_torch_says_of_them(ran: Ran) -> None:
    world = len(ran)
    given = [torch.arange(2.0 * world).reshape(world, 2) + 100 * rank for rank in range(world)]
    for rank, found in enumerate(ran):
        assert torch.equal(found["collectives"]["all_reduce"], torch.stack(given).sum(0))
        assert torch.equal(found["collectives"]["all_gather"], torch.cat(given, 1))
        assert torch.equal(found["collectives"]["all_to_all"], torch.stack([x[rank] for x in given]))
        assert found["collectives"]["half"].dtype == torch.bfloat16


def test_ranks_export_the_checkpoint_that_they_were_made_of(ran: Ran, folders: dict[str, Path]) -> None:
    given = load_file(folders["qwen3_moe"] / "model.safetensors")
    back = load_file(Path(ran[0]["exported"]) / "model.safetensors")
    assert back.keys() == given.keys()
    assert all(torch.equal(back[name], value) for name, value in given.items())


def test_an_update_reaches_each_rank_s_part(ran: Ran, folders: dict[str, Path]) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folders["llama"], attn_implementation="eager").eval()
    theirs.load_state_dict(torch.load(Path(ran[0]["exported"]).parent / "new.pt"), strict=False)
    with torch.no_grad():
        expected = theirs(torch.arange(12)[None], use_cache=False).logits
    for rank in ran:
        assert_near(rank["updated"], expected)


def test_ranks_that_are_not_alike_say_so_on_every_rank(ran: Ran) -> None:
    last = len(ran) - 1
    for rank in ran:
        said = rank["refusals"]
        assert said["versions"].startswith(
            "the ranks do not run the same\n  nnfront: rank 0 has 0.0, rank 1 has 0.1"
        )
        assert "torch" not in said["versions"]
        assert said["weights"].startswith("the ranks do not run the same\n  the checkpoint: rank 0 has ")
        assert said["disk"] == f"rank {last}: [Errno 28] No space left on device"
        assert re.match(
            rf"rank {last}: .*can't allocate memory: you tried to allocate \d+ bytes", said["memory"]
        )
        assert said["all"].endswith(
            "-none is not a folder\n  help: give the path of a Hugging Face folder, with config.json and safetensors, of a GGUF file, or of an artefact"
        )
