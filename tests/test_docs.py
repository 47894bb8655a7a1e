# SPDX-License-Identifier: Apache-2.0
"""What docs/ shows is so: every example runs and prints what stands under it, and every IR text is one that the printer writes.

A ```python block runs in the scope of its page, in order. The block behind it says what comes of it: ```text or ```nnir what it prints,
```error the error that it raises. A line `$ nnfront ...` of a ```console block exits with 0, or with the code in its comment.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import nnfront as nn
from nnfront import op  # declares the ops, which are then known before a page adds some
from nnfront.cli import main
from nnfront.ir import OPS

PROJECT = Path(__file__).parents[1]
PAGES = sorted((PROJECT / "docs").glob("*.md"))
EXPECTATIONS = ("text", "error")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, and whether only white space is between it and the block before."""

    language: str
    text: str
    follows: bool


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    end = -1
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append(Block(match[1], match[2], end >= 0 and not text[end : match.start()].strip()))
        end = match.end()
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def run(block: Block, scope: dict[str, object], file: str) -> tuple[str, str]:
    """What a block prints, and the error that it raises."""
    out, raised = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(block.text, file, "exec"), scope)
        except nn.errors.NnfrontError as error:
            raised = f"{type(error).__name__}: {error}\n"
    return out.getvalue(), raised


@pytest.fixture
def registries() -> Iterator[None]:
    """Ops that a page declares are gone after it."""
    assert op.relu
    known = set(OPS)
    yield
    for name in OPS.keys() - known:
        del OPS[name]


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_run_and_give_what_the_page_shows(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROJECT)
    scope: dict[str, object] = {"__name__": "docs"}
    found = blocks(page)
    for block, behind in zip(found, [*found[1:], Block("", "", False)], strict=False):
        if block.language != "python":
            continue
        printed, raised = run(block, scope, f"{page.stem}.py")
        shown = behind.language if behind.follows else ""
        assert raised == (behind.text if shown == "error" else ""), block.text
        if shown in ("text", "nnir"):
            assert printed == behind.text, block.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_block_goes_untested(page: Path) -> None:
    found = blocks(page)
    assert len(re.findall(r"^```", page.read_text(encoding="utf-8"), re.MULTILINE)) == 2 * len(found)
    assert {block.language for block in found} <= {"python", "nnir", "console", *EXPECTATIONS}
    for before, block in zip([Block("", "", False), *found], found, strict=False):
        if block.language in EXPECTATIONS:
            assert block.follows, block.text
            assert before.language == "python", block.text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_ir_texts_are_what_the_printer_writes(page: Path) -> None:
    for block in blocks(page):
        if block.language == "nnir":
            module = nn.ir.parse(block.text)
            nn.ir.verify(module)
            plain = "\n".join(line.partition("  #")[0] for line in block.text.split("\n"))
            assert str(module) == plain.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exit_as_the_page_says(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT)
    for block in blocks(page):
        if block.language != "console":
            continue
        for line in block.text.splitlines():
            command = re.fullmatch(r"\$ nnfront (.*?)(?:  # exits with (\d+))?", line)
            assert command, line
            assert main(shlex.split(command[1])) == int(command[2] or 0), (line, capsys.readouterr())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = prose(page)
    for target, section in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", text):
        assert (page.parent / target).exists(), target
        titles = re.findall(r"^#+ (.*)$", prose(page.parent / target), re.MULTILINE)
        assert not section or section in [title.lower().replace(" ", "-") for title in titles], section
    for path in re.findall(r"`((?:nnfront|examples|kernels|tests)/[\w/.-]*)`", text):
        assert (PROJECT / path).exists(), path


def test_the_table_of_rules_is_the_verifiers() -> None:
    table = re.findall(r"^\| V(\d+) \| (.*?) \|$", (PROJECT / "docs" / "ir.md").read_text(), re.MULTILINE)
    # The function of this name hides the module.
    verify = importlib.import_module("nnfront.ir.verify")
    own = [rule for name, rule in vars(verify).items() if re.match(r"v\d+_", name)]
    names = {rule.__name__: rule for rule in (*own, *verify.FORM, *verify.MEANING)}
    expected = sorted(
        (int(name.split("_")[0][1:]), " ".join(rule.__doc__.split())) for name, rule in names.items()
    )
    assert [(int(number), words) for number, words in table] == expected


def test_the_readme_links_every_page() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"](docs/{page.name})" in text, page.name


def test_ops_without_a_counterpart_are_those_that_the_page_names() -> None:
    text = (PROJECT / "docs" / "tvm.md").read_text(encoding="utf-8")
    line = re.search(r"^Ops that are not here: (.*)\.$", text, re.MULTILINE)
    assert line
    named = re.findall(r"`(\w+)`", line[1])
    assert named
    for name in named:
        assert not hasattr(nn.op, name), name


def test_the_trips_through_the_code_name_files_that_exist() -> None:
    text = (PROJECT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:nnfront|tests)/[\w/]+\.py)`", text)
    assert len(named) > 30
    assert [name for name in named if not (PROJECT / name).is_file()] == []
