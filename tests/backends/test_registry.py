# SPDX-License-Identifier: Apache-2.0
"""Back ends that others bring: one that lies outside the tree runs a language model, and those that cannot be had are said to be so."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import nnfront as nn
from nnfront.backends import registry
from nnfront.errors import LowerError, NnfrontError

ROOT = Path(nn.__file__).parent
CHECKPOINT = ROOT.parent / "examples" / "checkpoints" / "pylib-3m"

TOY = """
import torch
import nnfront as nn

calls = []

def bind(run):
    def linear(x, weight, bias):
        calls.append(tuple(weight.shape))
        y = x @ weight.T
        return y if bias is None else y + bias
    return linear

def accepts(run, context):
    return "it has attributes" if run.attrs else ""

class Toy(nn.Backend):
    name = "toy"
    kernels = (nn.Kernel("toy_linear", "linear", bind, "plain", accepts),)

TOY = Toy()
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Lay a package with an entry point where Python finds what is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._load.cache_clear()

    def lay(source: str, point: str = "toy = toy_backend:TOY") -> None:
        (tmp_path / "toy_backend.py").write_text(source)
        info = tmp_path / "toy-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{point}\n")
        importlib.invalidate_caches()

    yield lay
    registry._load.cache_clear()
    sys.modules.pop("toy_backend", None)


def refusal(target: str) -> str:
    with pytest.raises(LowerError) as caught:
        nn.compile(nn.ir.parse("def main[n](x: input float32[n]) -> float32[n] { return x }"), target)
    return str(caught.value)


def test_a_back_end_from_outside_the_tree_runs_the_shipped_checkpoint(install: Install) -> None:
    install(TOY)
    ours = nn.LLM.load(CHECKPOINT, dtype="float32")
    theirs = nn.LLM.load(CHECKPOINT, device="toy", dtype="float32")
    ids = torch.tensor([[1, 2, 3, 4]])
    toy = importlib.import_module("toy_backend")
    toy.calls.clear()
    torch.testing.assert_close(theirs.logits(ids), ours.logits(ids), atol=1e-4, rtol=1e-4)
    assert len(toy.calls) > 10
    torch.testing.assert_close(
        theirs.generate_ids(ids, max_new_tokens=8), ours.generate_ids(ids, max_new_tokens=8)
    )
    kernels = {
        run.kernel for run in theirs.session.program.methods["decode"].body.walk() if hasattr(run, "kernel")
    }
    assert "toy_linear" in kernels
    assert "attention" in kernels  # the op's own reference


def test_its_artefact_is_loaded_where_it_is_installed(install: Install, tmp_path: Path) -> None:
    install(TOY)
    x = torch.randn(3, 4)
    ir = nn.Linear(4, 2).export({"forward": {"x": nn.spec.Tensor(["n", 4], "float32")}})
    weights = {"weight": torch.randn(2, 4), "bias": torch.randn(2)}
    nn.compile(ir, "toy").load(weights).save(tmp_path / "artefact")
    expected = torch.nn.functional.linear(x, weights["weight"], weights["bias"])
    torch.testing.assert_close(nn.load(tmp_path / "artefact")["forward"](x), expected)
    for file in (*tmp_path.glob("toy*.dist-info/*"), tmp_path / "toy_backend.py"):
        file.unlink()
    next(tmp_path.glob("toy*.dist-info")).rmdir()
    registry._load.cache_clear()
    importlib.invalidate_caches()
    with pytest.raises(NnfrontError, match="was made for the target 'toy'"):
        nn.load(tmp_path / "artefact")


def test_a_kernel_registered_for_it_is_asked_first(install: Install) -> None:
    install(TOY)
    nn.register_kernel(
        "relu", "test_toy_relu", lambda run: lambda x: x.clamp(min=0), target="toy", why="mine"
    )
    try:
        ir = nn.ir.parse(
            "def main[n](x: input float32[n]) -> float32[n] { y: float32[n] = relu(x) return y }"
        )
        assert "test_toy_relu" in nn.compile(ir, "toy").explain(n=4)
        assert "test_toy_relu" not in nn.compile(ir, "cpu").explain(n=4)
    finally:
        nn.unregister_kernel("test_toy_relu", target="toy")


def test_one_that_is_not_installed_names_those_that_are(install: Install) -> None:
    install(TOY)
    text = refusal("tpu")
    assert text.startswith("unknown target 'tpu'")
    assert (
        "targets are 'cpu', 'cuda', 'cuda:sm_80', 'cuda:sm_86', 'cuda:sm_89', 'cuda:sm_90', 'cuda:sm_100', 'cuda:sm_103', 'cuda:sm_120', 'toy'"
        in text
    )
    assert "'nnfront.backends'" in text


def test_one_that_cannot_be_imported_says_which_package_brings_it_and_why(install: Install) -> None:
    install("import there_is_no_such_module")
    text = refusal("toy")
    assert text.startswith("the back end 'toy' cannot be imported")
    assert "toy_backend:TOY of toy 1.2" in text
    assert "ModuleNotFoundError: No module named 'there_is_no_such_module'" in text


@pytest.mark.parametrize(
    ("source", "got"),
    [("TOY = 3", "got 3"), (TOY.replace('name = "toy"', 'name = "tidy"'), "got a back end called 'tidy'")],
)
def test_an_entry_point_that_is_no_back_end_of_its_name_is_refused(
    install: Install, source: str, got: str
) -> None:
    install(source)
    text = refusal("toy")
    assert text.startswith("the entry point of the back end 'toy' is not one")
    assert got in text
    assert "expected an instance of nnfront.backends.backend.Backend" in text


def test_an_architecture_that_it_does_not_have_names_those_that_it_has(install: Install) -> None:
    install(TOY)
    assert "unknown target 'toy:v2'" in refusal("toy:v2")
    assert "targets are 'toy'" in refusal("toy:v2")
    assert "'cuda:sm_90'" in refusal("cuda:sm_70")


def test_a_kernel_that_refuses_everything_says_why_beside_what_runs(install: Install) -> None:
    install(TOY.replace('return "it has attributes" if run.attrs else ""', 'return "never on a Sunday"'))
    ir = nn.Linear(4, 2).export({"forward": {"x": nn.spec.Tensor(["n", 4], "float32")}})
    text = nn.compile(ir, "toy").explain(n=3)
    assert "not toy_linear: never on a Sunday" in text
    assert "reference" in text


def test_no_other_room_compares_the_name_of_a_back_end() -> None:
    """`device.type == "cuda"` asks torch about a device; anything else would be a question that the back end should answer, what a name begins with too."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        if path.is_relative_to(ROOT / "backends"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                asked = {a.value for a in node.args if isinstance(a, ast.Constant)} & set(registry.OWN)
                if asked and node.func.attr in ("startswith", "endswith", "removeprefix"):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            names = {side.value for side in sides if isinstance(side, ast.Constant)} & set(registry.OWN)
            if names and not any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong
