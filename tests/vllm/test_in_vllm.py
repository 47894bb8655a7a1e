# SPDX-License-Identifier: Apache-2.0
"""vLLM itself, with its attention, its cache and its scheduler, writes with a model of ours what transformers writes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import MODELS, greedy, written

import nnfront as nn
from nnfront.errors import LoadError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
OURS = {"architectures": ["NnfrontForCausalLM"]}
PROMPTS = [[5, 6, 7], list(range(10, 50)), [9] * 17, [1]]
TOKENS = 24
IN_A_STEP = 32
"""Tokens at most: the longest prompt comes in two steps."""
PYLIB = Path(nn.__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """vLLM over a folder, in this process."""
    import vllm

    given = {
        "hf_overrides": OURS,
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_batched_tokens": IN_A_STEP,
        "max_num_seqs": 4,
        "block_size": 32,
    }
    made = vllm.LLM(model=str(folder), **{**given, **options})
    try:
        yield made
    finally:
        del made
        gc.collect()


def texts(made: Any, prompts: list[Any], tokens: int = TOKENS) -> tuple[list[list[int]], list[int]]:
    """What vLLM writes after each prompt, and of how many tokens it knew keys and values before."""
    import vllm

    greedily = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    done = made.generate(prompts, greedily, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in done], [each.num_cached_tokens for each in done]


def ids(prompts: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_batch_of_several_lengths_in_steps_and_from_remembered_pages(name: str, tmp_path: Path) -> None:
    model = written(tmp_path, name)
    expected = [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
    assert max(len(set(text)) for text in expected) >= 9
    with engine(tmp_path) as made:
        assert texts(made, ids(PROMPTS)) == (expected, [0, 0, 0, 0])
        again, known = texts(made, ids(PROMPTS))
        assert again == expected
        assert known == [0, IN_A_STEP, 0, 0]


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_the_texts_tell_windows_and_soft_caps(name: str, tmp_path: Path) -> None:
    """So that equal texts say that they are what they should be."""
    (tmp_path / "own").mkdir()
    model = written(tmp_path / "own", name)
    changed = {"sliding_window": 100, "attn_logit_softcapping": None}
    for key, value in changed.items():
        if key in model.config.to_dict():
            other = type(model)(
                type(model.config)(**{**model.config.to_dict(), key: value}, attn_implementation="eager")
            ).eval()
            other.load_state_dict(model.state_dict())
            assert greedy(other, PROMPTS[1], TOKENS) != greedy(model, PROMPTS[1], TOKENS), key


def test_quantised_by_our_transform(tmp_path: Path) -> None:
    written(tmp_path, "llama")
    alone = nn.LLM.load(tmp_path, quant="int8")
    expected = [alone.generate_ids(torch.tensor([p]), max_new_tokens=TOKENS)[0].tolist() for p in PROMPTS]
    with engine(tmp_path, additional_config={"nnfront": {"quant": "int8"}}) as made:
        assert texts(made, ids(PROMPTS))[0] == expected


def test_vectors_in_the_place_of_tokens(tmp_path: Path) -> None:
    model = written(tmp_path, "llama")
    table = model.get_input_embeddings().weight.detach()
    given = [{"prompt_embeds": table[torch.tensor(prompt)]} for prompt in PROMPTS]
    with engine(tmp_path, enable_prompt_embeds=True) as made:
        assert texts(made, given)[0] == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]


def test_a_head_that_vllm_does_not_compute_names_the_layer(tmp_path: Path) -> None:
    written(tmp_path, "llama", head_dim=16)
    with (
        pytest.raises(
            LoadError,
            match=r"(?s)does not compute the attention of model\.layers\.0\.self_attn\n.*got heads of 16\n.*of 32, 64",
        ),
        engine(tmp_path),
    ):
        pass


def test_in_processes_of_its_own_it_writes_the_text_that_we_write() -> None:
    prompts = ["def main():\n", "import os\n\n", "class Path:\n    def "]
    script = (
        "import vllm\nif __name__ == '__main__':\n"
        f"    llm = vllm.LLM({str(PYLIB)!r}, hf_overrides={OURS}, dtype='float32', max_model_len=256)\n"
        "    done = llm.generate("
        f"{prompts}, vllm.SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))\n"
        "    print('TEXTS', [each.outputs[0].text for each in done])\n"
    )
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = next(line for line in done.stdout.splitlines() if line.startswith("TEXTS"))
    alone = nn.LLM.load(PYLIB, dtype="float32")
    assert found == f"TEXTS {[alone.generate(p, max_new_tokens=40, temperature=0.0) for p in prompts]}"


def test_what_vllm_guesses_is_checked(tmp_path: Path) -> None:
    """Last of all: what vLLM loads for guessing keeps it from starting again in this process."""
    model = written(tmp_path, "qwen3")
    guessing = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with engine(tmp_path, speculative_config=guessing) as made:
        assert texts(made, ids(PROMPTS))[0] == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
