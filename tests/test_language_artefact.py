# SPDX-License-Identifier: Apache-2.0
"""A language model shipped as an artefact: it runs where nobody has its model file, and the command line takes it for a folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nnfront_kernels import common

import nnfront as nn
from nnfront.backends.cuda.backend import CudaBackend
from nnfront.cli import main
from nnfront.engine.params import Sampling
from nnfront.errors import LoadError, RunError
from nnfront.llm.sampling import Sampler

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
PROMPT = "def main():\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: Any) -> Path:
    place = Path(tmp_path_factory.mktemp("exported")) / "pylib"
    assert main(["export", str(FOLDER), "-o", str(place)]) == 0
    return place


@pytest.fixture(scope="module")
def original() -> nn.LLM:
    return nn.LLM.load(FOLDER)


WITHOUT = """
import json, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "nnfront_models") or name == "nnfront.nn.trace":
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refuse())
import torch
import nnfront
torch.set_num_threads(1)
llm = nnfront.LLM.load(sys.argv[1])
ids = torch.tensor(llm.tokenizer.encode(sys.argv[2]))
tokens = llm.generate_ids(ids[None], max_new_tokens=24)[0].tolist()
try:
    nnfront.Module
except ImportError as error:
    print(json.dumps([tokens, llm.generate(sys.argv[2], max_new_tokens=24), str(error)]))
"""


def test_it_runs_without_model_file_transformers_and_tracing(exported: Path, original: nn.LLM) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, exported, PROMPT], capture_output=True, text=True, check=True
    )
    tokens, text, refused = json.loads(done.stdout)
    ids = torch.tensor(original.tokenizer.encode(PROMPT))
    assert tokens == original.generate_ids(ids[None], max_new_tokens=24)[0].tolist()
    assert text == original.generate(PROMPT, max_new_tokens=24)
    assert refused == "nnfront.nn.trace is not to be imported"  # the guard was there


def test_tokens_are_drawn_where_kernels_are_launched_as_the_artefact_has_them(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = nn.LLM.load(exported)
    monkeypatch.setattr(llm.session, "kernels", lambda plan: None)
    monkeypatch.setattr(type(llm.session.backend), "launching", CudaBackend.launching)
    launchers: list[object] = []

    class Noting(Sampler):
        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            launchers.append(common._LAUNCHER.get())
            return super().__call__(logits)

    assert len(list(llm._steps([torch.tensor([1, 2])], 3, Noting(Sampling())))) == 3
    assert launchers == [llm.session.kernels] * 3


def test_logits_are_the_same_bits(exported: Path, original: nn.LLM) -> None:
    ids = torch.randint(0, 4096, (2, 17))
    assert torch.equal(nn.LLM.load(exported).logits(ids), original.logits(ids))


def test_methods_share_the_weights_and_nothing_else_is_large(exported: Path) -> None:
    sizes = {file.name: file.stat().st_size for file in exported.iterdir()}
    copied = sum(size for name, size in sizes.items() if (FOLDER / name).exists())
    checkpoint = nn.Checkpoint(FOLDER).size_bytes
    assert sum(size for name, size in sizes.items() if name.endswith(".safetensors")) <= 1.002 * checkpoint
    assert sum(sizes.values()) - copied <= 1.02 * checkpoint


def test_nothing_in_it_is_code(exported: Path) -> None:
    endings = {file.name.rpartition(".")[2] for file in exported.iterdir()}
    assert endings == {"json", "nnir", "safetensors"}
    assert not (exported / "model.safetensors").exists()


def test_what_an_artefact_knows_of_text(exported: Path, original: nn.LLM) -> None:
    llm = nn.LLM.load(exported)
    assert (llm.context, llm.config.vocab_size) == (original.context, original.config.vocab_size)
    assert llm.eos_token_ids == original.eos_token_ids
    with pytest.raises(RunError, match="the context holds 512"):
        llm.generate(PROMPT, max_new_tokens=1000)


def test_saving_a_loaded_model_keeps_the_tokenizer(exported: Path, tmp_path: Path) -> None:
    nn.LLM.load(exported).save(tmp_path / "again")
    again = nn.LLM.load(tmp_path / "again")
    assert again.generate(PROMPT, max_new_tokens=8) == nn.LLM.load(exported).generate(
        PROMPT, max_new_tokens=8
    )
    assert sorted(f.name for f in exported.iterdir()) == sorted(
        f.name for f in (tmp_path / "again").iterdir()
    )


def test_a_saved_folder_is_the_exported_one(exported: Path, tmp_path: Path) -> None:
    nn.LLM.load(FOLDER, extends=True).session.save(tmp_path / "saved")
    for file in exported.iterdir():
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes(), file.name


def test_another_dtype_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(FOLDER), "-o", str(tmp_path / "wide"), "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = nn.LLM.load(FOLDER, dtype="float32").logits(ids)
    assert torch.equal(nn.LLM.load(tmp_path / "wide").logits(ids), expected)
    plan, *_ = out.splitlines()
    assert plan.startswith("checkpoint 6.8 MB; making its weights takes at most ")
    assert [line.split()[0] for line in out.splitlines()[3:]] == [
        "phase",
        "read",
        "export",
        "lift",
        "compile",
        "write",
        "hash",
        "place",
        "total",
    ]


def test_a_model_file_of_the_users_is_exported(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "hf"))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"model_type": "mine"}))
    model_file = tmp_path / "mine.py"
    model_file.write_text("from nnfront_models.llama import Config, build, export_spec\n")
    args = ["export", str(folder), "-o", str(tmp_path / "out"), "--model", str(model_file)]
    assert main(args) == 0
    model_file.unlink()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(nn.LLM.load(tmp_path / "out").logits(ids), nn.LLM.load(FOLDER).logits(ids))


def test_run_continues_a_prompt(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(exported), "-p", PROMPT, "-n", "8"]) == 0
    shown = capsys.readouterr().out
    assert main(["run", str(FOLDER), "-p", PROMPT, "-n", "8"]) == 0
    assert capsys.readouterr().out == shown


def test_show_prints_the_lifted_methods(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--method", "decode"]):
        assert main(["show", str(exported), *options]) == 0
        shown = capsys.readouterr().out
        assert main(["show", str(FOLDER), "--lifted", *options]) == 0
        assert capsys.readouterr().out == shown
        assert "decode" in shown


def test_check_says_whether_it_is_whole(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(exported)]) == 0
    assert (
        capsys.readouterr().out == f"{exported} is the artefact that was written, byte for byte, and loads\n"
    )
    broken = Path(shutil.copytree(exported, tmp_path / "broken"))
    (broken / "tokenizer.json").unlink()
    assert main(["check", str(broken)]) == 1
    expected = f"{broken} is not the artefact that was written\n  tokenizer.json: the file is missing\n"
    assert capsys.readouterr().out == expected
    assert main(["check", str(broken), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"problems": ["tokenizer.json: the file is missing"]}


REFUSED = {
    "a dtype for an artefact": (
        ["run", "ARTEFACT", "-p", "x", "--dtype", "float32"],
        "error: ARTEFACT is an artefact: its dtype, its model and how its weights are stored are part of it\n"
        "  help: export the folder again with them: nnfront export DIR -o OUT --dtype D --model FILE --quant Q\n",
    ),
    "an artefact of an artefact": (
        ["export", "ARTEFACT", "-o", "OUT"],
        "error: ARTEFACT is an artefact already\n  help: give the Hugging Face folder that it was made of\n",
    ),
    "a place that holds something else": (
        ["export", str(FOLDER), "-o", str(FOLDER)],
        f"error: {FOLDER} is there already and is not an artefact of this nnfront\n"
        f"  {FOLDER} is not an nnfront artefact: it has no nnfront.json\n"
        "  help: choose another place, or remove it first\n",
    ),
}


@pytest.mark.parametrize(("args", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_the_command_line_refuses(
    exported: Path, args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arg.replace("ARTEFACT", str(exported)) for arg in args]) == 1
    assert capsys.readouterr().err == expected.replace("ARTEFACT", str(exported))


def test_an_artefact_of_no_language_model_is_said(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1.0

    ir = Plain().export({"forward": {"x": nn.spec.Tensor(["n"])}})
    nn.compile(ir).load({}).save(tmp_path / "a")
    with pytest.raises(LoadError) as error:
        nn.LLM.load(tmp_path / "a")
    assert str(error.value) == (
        f"{tmp_path / 'a'} is an artefact, but of no language model\n  help: nnfront.load(DIR) loads it"
    )


def test_another_target_than_the_artefacts_is_said(exported: Path) -> None:
    with pytest.raises(LoadError) as error:
        nn.LLM.load(exported, device="cuda")
    assert str(error.value) == (
        f"{exported} was made for the target 'cpu', not for 'cuda'\n"
        "  help: load(..., device='cpu'), or export the model again for 'cuda'"
    )


def test_a_tokenizer_without_a_token_for_a_text_says_so(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER, tmp_path / "hf"))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[unk]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(RunError) as error:
        nn.LLM.load(folder).generate("b")
    assert str(error.value) == (
        "the tokenizer cannot encode this text\n  WordLevel error: Missing [UNK] token from the vocabulary"
    )
