# SPDX-License-Identifier: Apache-2.0
"""Tensors that a checkpoint holds besides the model's: refused unless the model file or the user names them."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from own_files import FOLDER, LLAMA, written

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError


@pytest.fixture
def with_more(folder: Path) -> Path:
    """A folder whose checkpoint holds two tensors beside the model's."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    tensors["extra.bias"] = torch.ones(2)
    safetensors.torch.save_file(tensors, path)
    return folder


class TestIgnored:
    def test_what_is_left_over_is_refused_unless_named(self, with_more: Path) -> None:
        with pytest.raises(LoadError, match=r"(?s)1 unexpected.*'extra\.bias'"):
            nn.LLM.load(with_more)
        ids = torch.tensor([[5, 6]])
        expected = nn.LLM.load(FOLDER).logits(ids)
        assert torch.equal(nn.LLM.load(with_more, ignored=["extra.*"]).logits(ids), expected)

    def test_the_command_line_takes_names_everywhere_that_weights_are_read(
        self, with_more: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        commands = (
            ["run", str(with_more), "-p", "x", "-n", "1"],
            ["export", str(with_more), "-o", str(tmp_path / "out")],
            ["check", str(with_more)],
        )
        assert [main(command) for command in commands] == [1, 1, 1]
        assert [main([*command, "--ignore", "extra.bias"]) for command in commands] == [0, 0, 0]
        assert nn.LLM.load(tmp_path / "out").logits(torch.tensor([[5]])).shape == (1, 1, 4096)
        with pytest.raises(SystemExit):
            main(["show", str(with_more), "--ignore", "x"])

    def test_a_model_file_names_what_its_checkpoints_hold_besides(
        self, with_more: Path, tmp_path: Path
    ) -> None:
        text = LLAMA.replace("IGNORED = (", 'IGNORED = ("extra.bias", ')
        file = written(tmp_path / "mine.py", text)
        assert nn.LLM.load(with_more, model_file=file).logits(torch.tensor([[5]])).shape == (1, 1, 4096)
        ir = nn.export_folder(with_more, file)
        assert ir.attrs["ignored"] == ("extra.bias", "*.rotary_emb.inv_freq")
        assert nn.ir.first_difference(nn.ir.parse(str(ir)), ir) is None

    def test_one_name_in_the_place_of_several_is_refused(self, with_more: Path, tmp_path: Path) -> None:
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(with_more, ignored="extra.*")
        assert str(caught.value) == "ignored is 'extra.*', expected a list of names and patterns"
        file = written(
            tmp_path / "mine.py", LLAMA.replace('("*.rotary_emb.inv_freq",)', '("*.rotary_emb.inv_freq")')
        )
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(with_more, model_file=file)
        assert str(caught.value) == (
            f"IGNORED of the model file {file} is '*.rotary_emb.inv_freq', expected a tuple of names and patterns\n  file: {file}"
        )

    def test_a_model_file_names_prefixes_under_which_checkpoints_hold_its_weights(
        self, folder: Path, tmp_path: Path
    ) -> None:
        path = folder / "model.safetensors"
        expected = nn.LLM.load(folder).logits(torch.tensor([[5, 6]]))
        tensors = safetensors.torch.load_file(path)
        safetensors.torch.save_file({n.removeprefix("model."): t for n, t in tensors.items()}, path)
        with pytest.raises(LoadError, match=r"embed_tokens\.weight"):
            nn.LLM.load(folder)
        file = written(tmp_path / "mine.py", LLAMA + '\nPREFIXES = {"": "model."}\n')
        assert torch.equal(nn.LLM.load(folder, model_file=file).logits(torch.tensor([[5, 6]])), expected)
        assert torch.equal(nn.LLM.load(FOLDER, model_file=file).logits(torch.tensor([[5, 6]])), expected)
        written(file, LLAMA + '\nPREFIXES = "model."\n')
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(folder, model_file=file)
        assert str(caught.value) == (
            f"PREFIXES of the model file {file} is 'model.', expected a dict from a checkpoint's prefixes to the model's\n"
            f"  file: {file}"
        )

    def test_an_artefact_has_nothing_left_over(self, tmp_path: Path) -> None:
        nn.LLM.load(FOLDER).save(tmp_path / "out")
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(tmp_path / "out", ignored=["x"])
        assert (
            str(caught.value)
            == f"{tmp_path / 'out'} is an artefact: its weights are made already\n  help: leave ignored out"
        )

    @pytest.mark.parametrize("stored", ["head.weight", "tied.weight"])
    def test_a_parameter_that_no_method_reads_may_be_there_under_any_of_its_names(self, stored: str) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                self.used = nn.Linear(2, 2, bias=False)
                self.head = nn.Linear(2, 2, bias=False)
                self.tied = nn.Linear(2, 2, bias=False)
                self.tied.weight = self.head.weight

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                return self.used(x)

        ir = Model().export({"forward": {"x": nn.spec.Tensor(["n", 2])}})
        weights = {"used.weight": torch.eye(2), stored: torch.ones(2, 2)}
        assert torch.equal(nn.compile(ir).load(weights)["forward"](torch.ones(1, 2)), torch.ones(1, 2))
