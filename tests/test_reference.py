# SPDX-License-Identifier: Apache-2.0
"""The reference says what the code says: pages that are made of declarations are as they would be made now, and `help` shows the same."""

import importlib.util
import inspect
import pydoc
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import nnfront as nn
from nnfront import errors, op
from nnfront.ir import OPS
from nnfront.nn.op_examples import EXAMPLES
from nnfront.nn.op_reference import entry, run_code

DOCS = Path(__file__).parents[1] / "docs"


def load(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


GENERATE = load(DOCS / "generate.py")


@pytest.mark.parametrize("page", GENERATE.PAGES)
def test_pages_are_as_they_are_made_of_the_declarations(page: str) -> None:
    made = GENERATE.PAGES[page]()
    assert (DOCS / page).read_text(encoding="utf-8") == made, "run python docs/generate.py"


def test_every_function_has_an_example_that_calls_it() -> None:
    assert set(EXAMPLES) == set(dir(op))
    written_by_the_trace = {"cache_split", "cache_join", "getitem", "within"}
    assert {name for name in EXAMPLES if f"op.{name}(" not in EXAMPLES[name]} <= written_by_the_trace


def test_help_shows_an_ops_arguments_dtypes_and_example() -> None:
    text = pydoc.plain(pydoc.render_doc(op.attention))
    assert "Attention of new tokens to themselves" in text
    assert "    q: a tensor (floats)\n" in text
    assert "window: an int or None, by default None" in text
    assert "Dtype of the result: that of q" in text
    assert "op.attention(q, k, k, window=3).shape" in text
    assert "the user's code" not in text
    assert list(inspect.signature(op.attention).parameters)[:4] == ["q", "k", "v", "cache"]
    assert inspect.signature(op.attention).parameters["window"].default is None


@pytest.mark.parametrize(
    ("name", "argument", "dtypes", "result"),
    [
        ("take", "indices", "integers", "that of x"),
        ("divide", "a", "bool, integers, floats", "that of a, float32 for bool, integers"),
        ("topk", "data", "integers, floats", "that of data; int32, or what dtype says"),
        ("unpack_int4", "x", "uint8", "int8"),
        ("dequantize", "q", "float8, uint8, int8", "that of scale, or what dtype says"),
    ],
)
def test_dtypes_are_those_that_the_rule_takes_and_gives(
    name: str, argument: str, dtypes: str, result: str
) -> None:
    described = entry(OPS[name])
    assert {a.name: a.dtypes for a in described.arguments}[argument] == dtypes
    assert described.result == result


def test_what_is_said_of_division_is_what_torch_does() -> None:
    for dtype in ("bool", "uint8", "int64", "bfloat16", "float64"):
        x = torch.ones(2, dtype=getattr(torch, dtype))
        stated = "float32" if dtype in ("bool", "uint8", "int64") else dtype
        assert (x / x).dtype == op.divide(x, x).dtype == getattr(torch, stated)


def test_to_ask_for_help_changes_no_random_numbers() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    run_code(EXAMPLES["attention"])
    assert torch.equal(torch.rand(2), expected)


def test_the_site_has_every_page_and_a_search_that_takes_no_network() -> None:
    settings = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"(\w+\.md)$", settings, re.MULTILINE)) == {page.name for page in DOCS.glob("*.md")}
    polyfill = re.search(r"polyfills: \[([\w/.-]+)\]", settings)
    assert polyfill
    assert (DOCS / polyfill[1]).is_file()
    assert "http" not in settings
    assert "font: false" in settings


def test_every_class_of_error_says_what_to_do_and_where_it_is_raised() -> None:
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    known = {
        name for name, value in vars(errors).items() if isinstance(value, type) and name in errors.__doc__
    }
    assert known <= set(sections)
    assert set(sections) == set(GENERATE.WHAT_TO_DO)
    for name, section in sections.items():
        assert "What to do: " in section, name
        assert name == "NnfrontError" or "Raised in `" in section, name


def test_the_page_of_the_python_interface_has_every_public_name() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == nn.__all__
    assert " at 0x" not in text
