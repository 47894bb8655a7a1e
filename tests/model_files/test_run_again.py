# SPDX-License-Identifier: Apache-2.0
"""A model file that is run once and again in one process: what it declares, and what has changed of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_files import FOLDER, LLAMA, written

import nnfront as nn
from nnfront.errors import InferError, LowerError, RunError
from nnfront.ir import same_code

OWN = '''
from nnfront.ir import TensorType

FACTOR = 2.0


@nn.ir.op(name="test_files_scaled")
def scaled(x: TensorType, by: float = 1.0) -> TensorType:
    """x * by."""
    return x


@scaled.reference
def _(x, by):
    return x * by * FACTOR


def make(run):
    return lambda x: x * FACTOR


nn.register_kernel("test_files_scaled", "test_files_kernel", make)
nn.register_extern("test_files.extern", lambda x: x + FACTOR)
'''


@pytest.fixture
def own() -> Any:
    """Forgets what `OWN` declares."""
    yield
    nn.unregister_kernel("test_files_kernel")
    del nn.ir.OPS["test_files_scaled"]


@pytest.mark.usefixtures("own")
class TestAgain:
    def test_a_file_that_declares_an_op_and_a_kernel_loads_as_often_as_you_like(self, tmp_path: Path) -> None:
        file = written(tmp_path / "mine.py", LLAMA + OWN)
        ids = torch.tensor([[5, 6]])
        one, two = (nn.LLM.load(FOLDER, model_file=file).logits(ids) for _ in range(2))
        assert torch.equal(one, two)
        declared = nn.ir.OPS["test_files_scaled"]
        copy = written(tmp_path / "copy.py", "# elsewhere\n" + LLAMA + OWN)
        assert torch.equal(nn.LLM.load(FOLDER, model_file=copy).logits(ids), one)
        assert nn.ir.OPS["test_files_scaled"] is declared

    @pytest.mark.parametrize(
        ("before", "after", "error", "message"),
        [
            (
                "    return x\n\n\n@",
                "    return nn.ir.TensorType((), 'int8')\n\n\n@",
                InferError,
                "there is another op 'test_files_scaled' already",
            ),
            (
                '@nn.ir.op(name="test_files_scaled")',
                '@nn.ir.op(name="test_files_scaled", scratch=False)',
                InferError,
                "there is another op 'test_files_scaled' already",
            ),
            (
                '@nn.ir.op(name="test_files_scaled")',
                '@nn.ir.op(name="test_files_scaled", flops=lambda operands, results, attrs: 0)',
                InferError,
                "there is another op 'test_files_scaled' already",
            ),
            (
                "x * by * FACTOR",
                "x + by",
                InferError,
                "the op 'test_files_scaled' has another reference already",
            ),
            (
                "FACTOR = 2.0",
                "FACTOR = 3.0",
                InferError,
                "the op 'test_files_scaled' has another reference already",
            ),
            (
                "lambda x: x * FACTOR\n",
                "lambda x: x / FACTOR\n",
                LowerError,
                "there is a kernel 'test_files_kernel' already",
            ),
            (
                "lambda x: x + FACTOR",
                "lambda x: x - FACTOR",
                RunError,
                "the external function 'test_files.extern' is registered already",
            ),
        ],
        ids=[
            "fact",
            "flops",
            "rule",
            "reference",
            "a number that the reference reads",
            "kernel",
            "external function",
        ],
    )
    def test_another_declaration_under_a_taken_name_is_refused(
        self, before: str, after: str, error: Any, message: str, tmp_path: Path
    ) -> None:
        nn.export_folder(FOLDER, written(tmp_path / "mine.py", LLAMA + OWN))
        assert before in OWN
        other = written(tmp_path / "mine.py", LLAMA + OWN.replace(before, after))
        with pytest.raises(error) as caught:
            nn.export_folder(FOLDER, other)
        assert caught.value.what == message

    def test_the_error_says_where_both_are(self, tmp_path: Path) -> None:
        one = written(tmp_path / "one.py", LLAMA + OWN)
        two = written(tmp_path / "two.py", LLAMA + OWN.replace("x * by * FACTOR", "x + by"))
        nn.export_folder(FOLDER, one)
        with pytest.raises(InferError) as caught:
            nn.export_folder(FOLDER, two)
        line = next(i for i, text in enumerate((LLAMA + OWN).splitlines(), 1) if text == "@scaled.reference")
        assert str(caught.value) == (
            "the op 'test_files_scaled' has another reference already\n"
            f"  declared at {one}:{line}\n  and, otherwise, at {two}:{line}\n"
            "  help: choose another name, or start the process again"
        )

    def test_a_file_that_was_changed_is_read_again(self, tmp_path: Path) -> None:
        file = written(tmp_path / "mine.py", LLAMA + OWN)
        before = nn.export_folder(FOLDER, file)
        written(
            file,
            (LLAMA + OWN).replace("def export_spec", "def whole_spec")
            + '\n\ndef export_spec(config):\n    return {"logits": whole_spec(config)["logits"]}\n',
        )
        after = nn.export_folder(FOLDER, file)
        assert [f.name for f in before.methods] == ["logits", "prefill", "decode"]
        assert [f.name for f in after.methods] == ["logits"]


def adder(n: int) -> Any:
    return lambda x: x + n


def test_code_is_the_same_only_with_what_it_reads() -> None:
    assert same_code(adder(1), adder(1))
    assert not same_code(adder(1), adder(2))
    assert not same_code(lambda x: x, lambda x, y=1: x)
    assert not same_code([].append, [].append)
    assert not same_code(len, max)
