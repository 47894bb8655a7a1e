# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a model file is one message with its own lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_files import FOLDER, LLAMA, written

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import InferError, LoadError

BROKEN: dict[str, tuple[str, str, list[str]]] = {
    "import": (
        "import nnfront as nn\nimport no_such_package\n",
        "ModuleNotFoundError: No module named 'no_such_package'",
        ["line 2, in module: import no_such_package"],
    ),
    "syntax": ("def build(:\n", "SyntaxError: invalid syntax", ["line 1, in the file: def build(:"]),
    "build": (
        LLAMA
        + "\n\ndef build(config):\n    return inner(config)\n\n\ndef inner(config):\n    return config.no_such_key\n",
        "AttributeError: 'Config' object has no attribute 'no_such_key'",
        ["in build: return inner(config)", "in inner: return config.no_such_key"],
    ),
    "spec": (
        LLAMA + "\n\ndef export_spec(config):\n    return {}[config.dtype]\n",
        "KeyError: 'bfloat16'",
        ["in export_spec: return {}[config.dtype]"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_goes_wrong_in_a_model_file_is_one_message_with_its_own_lines(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message, lines = BROKEN[name]
    file = written(tmp_path / "mine.py", text)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(FOLDER, model_file=file)
    error = caught.value
    assert error.what == f"the model file failed with {message}"
    assert len(error.details) == len(lines)
    for line, expected in zip(error.details, lines, strict=True):
        assert expected in line
    number = error.details[-1].split(",")[0].removeprefix("line ")
    assert error.where == f"{file}:{number}"
    assert error.__cause__ is not None  # in Python the traceback is there as well
    assert main(["run", str(FOLDER), "-p", "x", "--model", str(file)]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_what_goes_wrong_while_a_method_is_traced_is_one_message_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LLAMA.replace("rope = self.rotary_emb(op.positions(tokens_BS, cache))", "cos, sin = 1")
    file = written(tmp_path / "mine.py", text)
    line = text.splitlines().index("        cos, sin = 1") + 1
    assert main(["run", str(FOLDER), "-p", "x", "--model", str(file)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert f"{file}:{line}" in message
    assert "Traceback" not in message


def test_an_error_of_ours_in_a_model_file_stays_as_it_is(tmp_path: Path) -> None:
    file = written(
        tmp_path / "mine.py",
        LLAMA.replace("nn.RMSNorm(config.hidden_size, -1", "nn.RMSNorm(config.hidden_size + 1, -1"),
    )
    with pytest.raises(
        InferError, match=rf"(?s)rms_norm.*at model\.norm in method 'logits' \(.*{file.name}:\d+\)"
    ):
        nn.LLM.load(FOLDER, model_file=file)
