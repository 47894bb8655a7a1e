# SPDX-License-Identifier: Apache-2.0
"""Write the pages that are made of declarations and docstrings: `python docs/generate.py`. A test holds the pages to them."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Callable
from pathlib import Path

from nnfront import op
from nnfront.ir import OPS
from nnfront.nn.op_examples import EXAMPLES
from nnfront.nn.op_reference import FAMILIES, IMPORTS, entry, run_code

DOCS = Path(__file__).parent
ELSEWHERE = "Functions that are more than one op"


def text_of(doc: str) -> str:
    """A docstring as Markdown: its words as they are, code as code."""
    found, code = [], False
    for block in re.split(r"\n\n+", doc.strip()):
        lines = block.splitlines()
        code = all(line.startswith("    ") for line in lines)
        if code:
            found.append("\n".join(lines))
        else:
            parts = re.split(r"(`[^`]*`)", block)
            found.append(
                "".join(p if p.startswith("`") else re.sub(r"([*<\[\]|#])", r"\\\1", p) for p in parts)
            )
    return "\n\n".join(found)


def row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def example(name: str) -> str:
    """The example of a function with what it gives, as two blocks."""
    *before, last = EXAMPLES[name].rstrip().splitlines()
    shown = "\n".join([*before, f"print({last})"])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_code(shown)
    return f"```python\n{shown}\n```\n\n```text\n{out.getvalue()}```"


def op_section(name: str) -> str:
    """One op: what it does, its arguments and the dtypes of what it gives, and its example."""
    declared = OPS[name]
    described = entry(declared)
    parts = [f"### {name}", f"`{described.signature}`", text_of(declared.doc)]
    if described.arguments:
        rows = [
            row(f"`{a.name}`", a.what, a.dtypes, f"`{a.default}`" if a.default else "")
            for a in described.arguments
        ]
        parts.append("\n".join(["| argument | what it is | dtypes | default |", "|---|---|---|---|", *rows]))
    if described.result:
        parts.append(f"Dtype of the result: {described.result}.")
    return "\n\n".join([*parts, example(name)])


def function_section(name: str) -> str:
    """A function that is written out, or another name of an op."""
    function = getattr(op, name)
    if getattr(function, "op", None) is not None:
        return f"### {name}\n\nAnother name of [{function.op.name}](#{function.op.name}).\n\n{example(name)}"
    signature = re.sub(r": Any\b|: '[^']*'| -> '?\w+'?$", "", str(inspect.signature(function)))
    return f"### {name}\n\n`op.{name}{signature}`\n\n{text_of(inspect.getdoc(function) or '')}\n\n{example(name)}"


def ops_page() -> str:
    """Every function of `nnfront.op`, by the file of its declaration."""
    written_out = {name for name in dir(op) if not hasattr(getattr(op, name), "op")}
    sections: dict[str, list[str]] = {}
    for name in dir(op):
        declared = name in OPS and name not in written_out
        module = OPS[name].infer.__module__ if declared else ""
        made: Callable[[str], str] = op_section if declared else function_section
        sections.setdefault(module, []).append(made(name))
    parts = [
        "# Ops",
        "All of `nnfront.op`, made from the declarations in `nnfront/ops/` by `python docs/generate.py`. `help(op.NAME)` shows the same.",
        "The functions take `nnfront.Tensor`s in a method, and torch tensors anywhere else. Sizes in brackets are shapes: `[batch, seq]` has two axes. Which dtypes an argument may have,\n"
        "and which come out, is what the op's type rule says to the operands of the example; other operands may allow others. In the tables\n"
        + ", ".join(
            f"*{word}* are {', '.join(f'`{m}`' for m in members)}"
            for word, members in FAMILIES.items()
            if len(members) > 1
        )
        + ".",
        "```python\n" + IMPORTS + "```",
    ]
    for module in sorted(sections, key=lambda module: (not module, module)):
        title = importlib.import_module(module).__doc__ if module else ELSEWHERE
        assert title is not None
        parts += [f"## {re.split(r'[.:] |[.]$', title.strip().splitlines()[0])[0]}", *sections[module]]
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {"ops.md": ops_page}
"""File in this folder -> what it holds."""


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
