# SPDX-License-Identifier: Apache-2.0
"""LLM and the command line on the shipped checkpoint and on folders that are wrong in every way."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from nnfront_models import llama

import nnfront as nn
from nnfront.artefact.manifest import TextModel
from nnfront.backends.cpu.backend import CPU
from nnfront.cli import main
from nnfront.errors import LoadError, NnfrontError, PassError, RunError
from nnfront.llm.tokenizer import until

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
PROMPT = "def main():\n"


@pytest.fixture(scope="module")
def llm() -> nn.LLM:
    return nn.LLM.load(FOLDER)


@pytest.fixture(scope="module")
def reference() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped checkpoint to spoil."""
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def test_text_is_the_decoded_continuation(llm: nn.LLM) -> None:
    ids = torch.tensor([llm.tokenizer.encode(PROMPT)])
    tokens = llm.generate_ids(ids, max_new_tokens=24)[0].tolist()
    assert llm.generate(PROMPT, max_new_tokens=24) == llm.tokenizer.decode(tokens)


def test_generated_text_parses_as_the_tokens_transformers_generates_in_float32() -> None:
    wide = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ours = nn.LLM.load(FOLDER, dtype="float32")
    ids = torch.tensor([ours.tokenizer.encode("class Stack:\n    def __init__(self):\n")])
    wide.generation_config.eos_token_id = None
    theirs = wide.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False, pad_token_id=0
    )
    assert ours.generate_ids(ids, max_new_tokens=48).tolist() == theirs[:, ids.shape[1] :].tolist()


def test_bits_per_byte_equal_those_of_transformers() -> None:
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")[:6000]
    llm = nn.LLM.load(FOLDER, dtype="float32")
    wide = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    ids = torch.tensor([llm.tokenizer.encode(text)])[:, : llm.context]

    def bits_per_byte(logits: torch.Tensor) -> float:
        loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="sum")
        return float(loss) / math.log(2) / len(llm.tokenizer.decode(ids[0, 1:].tolist()).encode())

    with torch.no_grad():
        expected = bits_per_byte(wide(ids).logits)
    got = bits_per_byte(llm.logits(ids))
    assert 0.5 < expected < 3
    assert got == pytest.approx(expected, abs=5e-5)


def test_streamed_pieces_make_the_same_text(llm: nn.LLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 32, "temperature": 0.8, "top_p": 0.9, "seed": 5}
    pieces = list(llm.generate(PROMPT, stream=True, **options))
    assert len(pieces) > 5
    assert "".join(pieces) == llm.generate(PROMPT, **options)


def test_text_ends_before_a_stop_string(llm: nn.LLM) -> None:
    whole = llm.generate(PROMPT, max_new_tokens=40)
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    assert llm.generate(PROMPT, max_new_tokens=40, stop=stop) == expected
    assert "".join(llm.generate(PROMPT, max_new_tokens=40, stop=["\0", stop], stream=True)) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_strings_are_found_across_pieces(size: int) -> None:
    text = "one two three two one"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert "".join(until(pieces, ["three"])) == "one two "
    assert "".join(until(pieces, ["two o", "zzz"])) == "one two three "
    assert "".join(until(pieces, ["onex"])) == text
    assert "".join(until(pieces, [])) == text


def test_a_sequence_ends_at_the_end_token_it_is_given(llm: nn.LLM) -> None:
    ids = torch.tensor([llm.tokenizer.encode(PROMPT)])
    free = llm.generate_ids(ids, max_new_tokens=16)[0].tolist()
    end = free[5]
    cut = free[: free.index(end) + 1]
    assert llm.generate_ids(ids, max_new_tokens=16, eos_token_id=end)[0].tolist() == cut
    assert llm.generate_ids([ids[0]], max_new_tokens=16, eos_token_id=[end])[0].tolist() == cut


def test_shapes_follow_the_prompt(llm: nn.LLM) -> None:
    ids = torch.randint(3, 100, (3, 5))
    assert llm.generate_ids(ids, max_new_tokens=4).shape == (3, 4)
    assert [t.shape for t in llm.generate_ids(list(ids), max_new_tokens=4)] == [(4,)] * 3
    logits = llm.logits(ids)
    assert logits.shape == (3, 5, llm.config.vocab_size)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(""), "the prompt is empty"),
        (lambda m: m.generate_ids(torch.zeros((1, 0), dtype=torch.int64)), "the prompt is empty"),
        (lambda m: m.generate_ids([]), "there is no prompt"),
        (lambda m: m.generate("x " * 5000), r"(?s)the prompt does not fit.*the context holds"),
        (lambda m: m.generate(PROMPT, max_new_tokens=10**6), "the prompt does not fit"),
        (lambda m: m.generate(PROMPT, max_new_tokens=0), "max_new_tokens is 0, expected an int >= 1"),
        (lambda m: m.generate(PROMPT, temperature=math.nan), "temperature is nan"),
        (lambda m: m.generate(PROMPT, stop=""), "stop is ''"),
        (lambda m: m.generate([1, 2]), "the prompt is a list, expected a text"),
        (lambda m: m.generate_ids(torch.tensor([[10**6]])), "outside the vocabulary"),
        (
            lambda m: m.generate_ids([torch.tensor([1]), torch.tensor([[1]])]),
            "prompt 1 is not a 1-D integer tensor",
        ),
        (lambda m: m.generate_ids(torch.tensor([[0.5]])), "the prompt is not a 1-D integer tensor"),
    ],
)
def test_requests_that_cannot_be_met_are_refused_before_anything_runs(
    llm: nn.LLM, call: Any, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        call(llm)


def spoil_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(config))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def lie_about_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


SPOILED: dict[str, tuple[Any, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config\.json does not exist"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "does not hold a JSON object"),
    "unknown architecture": (
        lambda f: spoil_config(f, model_type="lama"),
        r"(?s)unknown architecture 'lama'.*known: .*llama.*--model FILE",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "truncated weights": (truncate, r"model\.safetensors"),
    "lying header": (lie_about_the_header, r"model\.safetensors"),
    "another width": (
        lambda f: spoil_config(f, intermediate_size=80),
        r"(?s)does not fit the model.*expected",
    ),
    "another depth": (lambda f: spoil_config(f, num_hidden_layers=99), r"(?s)missing.*layers\."),
    "unknown activation": (lambda f: spoil_config(f, hidden_act="swosh"), "hidden_act is 'swosh'"),
    "unknown rope": (
        lambda f: spoil_config(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1.0}),
        "unknown rope_type 'spiral'",
    ),
    "incomplete rope": (
        lambda f: spoil_config(f, rope_parameters={"rope_type": "linear", "rope_theta": 1.0}),
        "rope_type 'linear' needs 'factor'",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_folder_is_one_clear_error_and_exit_code_1(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, message = SPOILED[name]
    spoil(folder)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(NnfrontError, match=message):
        nn.LLM.load(folder)
    assert main(["run", str(folder), "-p", PROMPT]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert sorted(p.name for p in folder.iterdir()) == before


def test_text_without_a_tokenizer_is_refused_and_ids_still_work(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    llm = nn.LLM.load(folder)
    with pytest.raises(LoadError, match=r"(?s)has no tokenizer\.json.*use generate_ids"):
        llm.generate(PROMPT)
    assert llm.generate_ids(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 2)


def test_a_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="is not a tokenizer"):
        nn.LLM.load(folder).generate(PROMPT)


def test_an_unknown_quantisation_or_device_is_refused() -> None:
    with pytest.raises(PassError, match="there is no format 'int3' to quantise weights to"):
        nn.LLM.load(FOLDER, quant="int3")
    with pytest.raises(NnfrontError, match="target 'tpu'"):
        nn.LLM.load(FOLDER, device="tpu")


def test_a_model_file_outside_the_tree_is_used(folder: Path, tmp_path: Path, llm: nn.LLM) -> None:
    spoil_config(folder, model_type="mine")
    file = tmp_path / "mine.py"
    file.write_text(Path(llama.__file__).read_text())
    ids = torch.tensor([[7, 8, 9]])
    torch.testing.assert_close(nn.LLM.load(folder, model_file=file).logits(ids), llm.logits(ids))
    with pytest.raises(LoadError, match="there is no model file"):
        nn.LLM.load(folder, model_file=tmp_path / "other.py")
    file.write_text("Config = 1\n")
    with pytest.raises(LoadError, match="lacks build, export_spec"):
        nn.LLM.load(folder, model_file=file)


def test_a_repetition_penalty_counts_prompt_and_generated_tokens(llm: nn.LLM) -> None:
    prompts = [torch.tensor([7, 8, 9, 300]), torch.tensor([7, 8])]
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.8)
    expected = []
    for ids in prompts:
        for _ in range(6):
            scores = theirs(ids[None], llm.logits(ids[None])[:, -1])
            ids = torch.cat([ids, scores.argmax(-1)])
        expected.append(ids[-6:].tolist())
    got = llm.generate_ids(prompts, 6, repetition_penalty=1.8)
    assert [row.tolist() for row in got] == expected
    assert [row.tolist() for row in llm.generate_ids(prompts, 6)] != expected


def test_run_prints_prompt_and_text_and_then_a_table_of_times(
    capsys: pytest.CaptureFixture[str], llm: nn.LLM
) -> None:
    options = [
        "-n",
        "12",
        "--temperature",
        "0.8",
        "--top-k",
        "40",
        "--top-p",
        "0.9",
        "--min-p",
        "0.01",
        "--seed",
        "1",
        "--repetition-penalty",
        "1.2",
    ]
    assert main(["run", str(FOLDER), "-p", PROMPT, *options]) == 0
    out, err = capsys.readouterr()
    limits = {"top_k": 40, "top_p": 0.9, "min_p": 0.01}
    expected = llm.generate(PROMPT, 12, temperature=0.8, **limits, seed=1, repetition_penalty=1.2)
    assert out == PROMPT + expected + "\n"
    for phase in ("export", "lift", "load", "prefill", "decode", "total"):
        assert phase in err


def test_wrong_arguments_are_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(FOLDER)])
    with pytest.raises(SystemExit, match="2"):
        main(["walk", str(FOLDER)])
    assert main(["run", str(FOLDER), "-p", PROMPT, "--temperature", "nan"]) == 1
    assert "temperature is nan" in capsys.readouterr().err


def test_show_prints_the_summary_or_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(FOLDER)]) == 0
    assert "decode" in capsys.readouterr().out
    assert main(["show", str(FOLDER), "--method", "decode"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("def decode[")
    assert main(["show", str(FOLDER), "--method", "transform_params", "--lifted"]) == 0
    assert "concat(" in capsys.readouterr().out
    assert main(["show", str(FOLDER), "--method", "nothing"]) == 1
    assert "there is no method 'nothing'" in capsys.readouterr().err


def test_check_reports_sources_formulas_and_uses_from_headers_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "model.safetensors"
    size = int.from_bytes(path.read_bytes()[:8], "little")
    path.write_bytes(path.read_bytes()[: 8 + size])  # the data part is absent
    assert main(["check", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "concat(" in text
    assert "fits: every weight has its tensor" in text
    assert main(["check", str(folder), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    use = report["tensors"]["model.layers.0.self_attn.q_proj.weight"]["uses"][0]
    assert use["name"] == "model.layers.0.self_attn.qkv.weight"
    assert set(use["methods"]) == {"logits", "prefill", "decode"}


def test_check_names_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil_config(folder, intermediate_size=80)
    assert main(["check", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "does not fit:" in text
    assert "gate_proj.weight" in text


class ElsewhereSession(dict[str, Any]):
    """A session on another device than the CPU."""

    device = torch.device("meta")
    kernels = None
    backend = CPU

    def __init__(self, like: nn.Session, **methods: Any) -> None:
        super().__init__(**methods)
        self.program, self.make_cache = like.program, like.make_cache


def test_prompts_are_moved_to_the_device_of_the_session(llm: nn.LLM) -> None:
    seen: list[str] = []

    def method(ids: torch.Tensor, cache: None = None) -> torch.Tensor:
        seen.append(ids.device.type)
        return torch.zeros(*ids.shape, 4)

    session: Any = ElsewhereSession(llm.session, prefill=method, decode=method, logits=method)
    elsewhere = nn.LLM(session, TextModel("llama", 8, 4), llm.config, llm.path)
    elsewhere.generate_ids(torch.tensor([[1, 2]]), 1)
    elsewhere.logits(torch.tensor([[1, 2]]))
    assert seen == ["meta", "meta"]


def test_keys_and_values_are_kept_in_8_bits_if_asked(llm: nn.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    coded = nn.LLM.load(FOLDER, kv_quant="fp8")
    made: list[Any] = []
    make_cache = coded.session.make_cache

    def remembering(*name: str, **sizes: Any) -> Any:
        made.append(make_cache(*name, **sizes))
        return made[-1]

    monkeypatch.setattr(coded.session, "make_cache", remembering)
    assert coded.generate_ids(torch.tensor([[5, 6, 7]]), max_new_tokens=3).shape == (1, 3)
    plain = llm.session.make_cache(batch=made[0].batch, max_seq=made[0].max_seq)
    size = llm.config.head_size
    assert made[0].nbytes * 2 * size == plain.nbytes * (size + 4)


def test_another_way_to_keep_keys_and_values_is_refused() -> None:
    with pytest.raises(LoadError) as error:
        nn.LLM.load(FOLDER, kv_quant="int3")
    assert str(error.value) == "kv_quant is 'int3', expected 'fp8', or nothing"


def test_the_command_line_keeps_keys_and_values_in_8_bits_and_names_the_device(capsys: Any) -> None:
    arguments = ["run", str(FOLDER), "-p", PROMPT, "-n", "4", "--kv-quant", "fp8", "--device"]
    assert main([*arguments, "cpu"]) == 0
    assert capsys.readouterr().out
    assert main([*arguments, "abacus"]) == 1
    assert "unknown target 'abacus'" in capsys.readouterr().err
