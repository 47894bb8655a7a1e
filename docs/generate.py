# SPDX-License-Identifier: Apache-2.0
"""Write the pages that are made of declarations and docstrings: `python docs/generate.py`. A test holds the pages to them."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import nnfront as nn
from nnfront import errors, op
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


def plain_signature(function: object, *, bound: bool = False) -> str:
    """The parameters of a function with defaults, without annotations; "" where Python knows none."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    # A function that is a default has an address in its text.
    return re.sub(r"<(?:function )?([\w.]+) at 0x\w+>", r"\1", str(inspect.Signature(parameters[bound:])))


def methods_of(owner: type) -> list[str]:
    """The public methods and properties that a class defines, each as an item of a list."""
    found = []
    for name, member in vars(owner).items():
        static = isinstance(member, (staticmethod, classmethod))
        function = getattr(owner, name) if static else member
        is_property = isinstance(function, (property, cached_property))
        doc = inspect.getdoc(function.fget if isinstance(function, property) else function)
        if name.startswith("_") or not doc or not (callable(function) or is_property):
            continue
        called = "" if is_property else plain_signature(function, bound=not static)
        words = " ".join(text_of(re.split(r"\n\n", doc)[0]).split())
        found.append(f"- `{name}{called}`: {words}")
    return found


def public_section(name: str) -> str:
    """One public name: how it is called, its docstring, and the methods of a class."""
    value = getattr(nn, name)
    if inspect.ismodule(value):
        names = getattr(value, "__all__", None) or [n for n, v in vars(value).items() if is_own(n, v, value)]
        return f"### {name}\n\n{text_of(value.__doc__ or '')}\n\nNames: {', '.join(f'`{n}`' for n in sorted(names))}."
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        of = type(value).__name__
        return f"### {name}\n\nA value of type `{of}`." if name != "op" else "### op\n\nThe [ops](ops.md)."
    parts = [f"### {name}", f"`nn.{name}{plain_signature(value)}`", text_of(inspect.getdoc(value) or "")]
    if inspect.isclass(value) and (methods := methods_of(value)):
        parts.append("\n".join(methods))
    return "\n\n".join(parts)


def is_own(name: str, value: object, module: object) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", "").startswith(module.__name__)  # type: ignore[attr-defined]


def api_page() -> str:
    """Every public name of the package, in the order of the alphabet."""
    parts = [
        "# Python",
        "All public names of `nnfront`, made from their docstrings by `python docs/generate.py`; `help(nn.NAME)` shows the same and types. "
        "Functions of `nnfront.op` are on [a page of their own](ops.md).",
        *(public_section(name) for name in nn.__all__),
    ]
    return "\n\n".join(parts) + "\n"


# Class -> when it comes, and what to do.
WHAT_TO_DO = {
    "NnfrontError": "Never raised itself. `except nn.errors.NnfrontError` takes all of them, and nothing that is a mistake of nnfront's.",
    "DimError": "Sizes are compared with `nn.dims.same` and its kin, not with `==`; a fact about a dim belongs into the spec ([dims](dims.md)).",
    "SpecError": "Compare the spec with the method's signature: each argument needs one entry, and each dim a name or a number ([spec](models.md#export-and-the-spec)).",
    "TraceError": "A method is run once, without data. Replace what looks at values by `op.cond`, `op.where` or `op.scan` ([control flow](models.md#control-flow)).",
    "UnknownName": "The help line says how what is asked for is written here, or which name is nearest; [all ops](ops.md).",
    "WrongUse": "A traced tensor has no value: keep to ops, or compute what Python needs before the export.",
    "InferError": "Compare the operands that it lists with the op's entry on [the page of ops](ops.md); often `astype` or `reshape` is missing.",
    "WrongCall": "`help(op.NAME)` shows the arguments; the message has the signature.",
    "VerifyError": "From a pass of yours or from IR that was changed: the message names [the rule](ir.md#rules). From the export of a model it is a mistake of nnfront's: please report it.",
    "ParseError": "The text was changed, cut, or written by another version: print the module anew with `str(ir)` ([the IR](ir.md)).",
    "PassError": "The message says what the pass needs before it: mostly another pass, or a method that is there ([passes](ir.md#passes)).",
    "LowerError": "Choose a target that this build has, or a dtype, device or attention that it can run ([running](running.md), [on a GPU](cuda.md)).",
    "LoadError": "`nnfront check DIR` lists every tensor that is missing, left over, or of another shape; `ignored=` and prefixes are on [the page of weights](weights.md).",
    "RunError": "Compare the arguments with the signature in the message; what does not fit a cache, a context or a device is refused before anything runs ([calls](running.md#calls)).",
    "Busy": "Ask again later, or start the server with a larger `--max-queued` ([serving](serving.md)). Over HTTP this is status 429.",
    "LostRank": "One of several processes ended: the first error among them says why ([several devices](devices.md)).",
    "AnswerFailed": "The engine could not end an answer that had begun; over HTTP it is an event with an `error`. The message says what went wrong.",
    "HungRank": "One of several processes does not answer: look what it waits for, or give it more time ([several devices](devices.md)).",
}


def error_classes() -> list[tuple[type[errors.NnfrontError], int]]:
    """The classes of errors that the package defines, each after its base, with its depth below NnfrontError."""

    def below(owner: type[errors.NnfrontError], depth: int) -> list[tuple[type[errors.NnfrontError], int]]:
        children = sorted(owner.__subclasses__(), key=lambda child: child.__name__)
        own = [child for child in children if child.__module__.startswith("nnfront.")]
        return [(owner, depth), *(pair for child in own for pair in below(child, depth + 1))]

    return below(errors.NnfrontError, 0)


def made_in() -> dict[str, set[str]]:
    """Name of a class -> the rooms whose files make one."""
    package = DOCS.parent / "nnfront"
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                found.setdefault(node.func.id, set()).add(room)
    return found


def errors_page() -> str:
    """Every class of error: what it means, where it comes from, and what to do."""
    for module in ("nnfront.ops.collective", "nnfront.serve.answers", "nnfront.distributed"):
        importlib.import_module(module)
    rooms = made_in()
    parts = [
        "# Errors",
        "All errors that a mistake of the user's can cause are classes of `nnfront.errors`, made here from their docstrings by `python docs/generate.py`. A message says what is wrong, "
        "what was got and expected, where (module path, method, `file:line` of your code) and what to do; the parts are the attributes `what`, `details`, `where` and `help`. "
        "Which kind of value comes when is on [a page of examples](models.md#what-an-error-says). An `AssertionError` out of nnfront is a mistake of nnfront's.",
        "A class is here under the class that it is derived from; `except` of that one takes it as well.",
    ]
    for owner, _ in error_classes():
        others = [base.__name__ for base in owner.__bases__ if base is not Exception]
        where = ", ".join(f"`{room}`" for room in sorted(rooms.get(owner.__name__, ())))
        parts += [f"## {owner.__name__}", text_of(inspect.getdoc(owner) or "")]
        parts += [f"Derived from {', '.join(f'`{name}`' for name in others)}."] if others else []
        parts += [f"Raised in {where}."] if where else []
        parts.append(f"What to do: {WHAT_TO_DO[owner.__name__]}")
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {"ops.md": ops_page, "api.md": api_page, "errors.md": errors_page}
"""File in this folder -> what it holds."""


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
