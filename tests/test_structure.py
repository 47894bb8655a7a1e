# SPDX-License-Identifier: Apache-2.0
"""The house stays as drawn: imports point down, files stay short, the README's example runs, heavy packages stay at the edge."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import nnfront as nn

ROOT = Path(nn.__file__).parent
PROJECT = Path(__file__).parents[1]
BASE = {"errors", "dims", "dtypes", "quant_format", "files", "holding", "packages"}
CORE = BASE | {"ir", "lower", "memory", "backends"}
RUN = CORE | {"state", "runtime"}
BELOW_SESSION = RUN | {"transform", "weights", "artefact"}
ALL = BELOW_SESSION | {"ops", "cases", "nn", "passes", "quantized", "session", "compiler"}

# A room, or a part of one that stands above it, and what it may import; each may import itself.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "holding": set(),
    "dims": {"errors", "holding"},
    "dtypes": {"errors"},
    "quant_format": set(),
    "files": {"errors"},
    "packages": {"errors"},
    "ir": BASE,
    "ops": BASE | {"ir"},
    "cases": BASE | {"ir", "ops"},
    "quantized": BASE | {"ir", "ops"},
    "nn": BASE | {"ir", "ops", "cases"},
    "compat": BASE | {"ir", "ops", "cases", "nn"},
    "passes": BASE | {"ir", "ops", "cases"},
    "lower": BASE | {"ir", "ops"},
    "memory": BASE | {"ir", "lower"},
    "backends": BASE | {"ir", "lower", "memory"},
    "state": CORE,
    "runtime": CORE | {"cases", "state"},
    "transform": RUN,
    "backends.cpu": RUN | {"passes"},
    "backends.cuda": RUN | {"passes", "backends.cpu"},
    "weights": RUN | {"transform"},
    "artefact": BELOW_SESSION | {"backends.cuda"},
    "session": BELOW_SESSION | {"backends.cuda"},
    "compiler": BELOW_SESSION | {"passes", "session"},
    "artefact.loader": ALL | {"backends.cuda"},
    "distributed": CORE | {"ops"},
    "llm.timings": set(),
    "llm.find_model": BASE,
    "llm.folder_files": BASE,
    "llm.calibration": BASE | {"ir", "passes", "weights"},
    "llm.parts": BASE | {"ir", "nn", "passes", "llm.methods"},
    "llm.model_files": BASE
    | {"ir", "nn", "passes", "quantized", "llm.folder_files", "llm.methods", "llm.parts"},
    "llm.gguf_tokenizer": BASE,
    "llm.gguf_folder": BASE | {"quantized", "weights", "llm.folder_files", "llm.gguf_tokenizer"},
    "llm.methods": BASE | {"ir"},
    "llm.lora_config": BASE | {"quantized", "llm.folder_files"},
    "llm.lora": BASE | {"ir", "ops", "quantized", "weights", "llm.lora_config"},
    "llm.unmerged": BASE | {"ir", "ops", "passes", "quantized", "weights", "llm.lora"},
    "llm.hf_folder": ALL
    | {
        "llm.calibration",
        "llm.timings",
        "llm.methods",
        "llm.folder_files",
        "llm.model_files",
        "llm.gguf_folder",
        "llm.lora",
        "llm.unmerged",
        "llm.parts",
    },
    "llm.divided": ALL | {"distributed", "llm.hf_folder"},
    "artefact.exporter": ALL | {"llm.methods", "llm.timings", "llm.hf_folder", "llm.lora"},
    "engine": BASE | {"backends", "backends.cuda", "distributed", "state", "session", "llm.methods"},
    "llm.sampling": BASE | {"backends.cuda", "engine", "llm.folder_files"},
    "llm": ALL
    | {
        "llm.calibration",
        "backends.cuda",
        "distributed",
        "artefact.loader",
        "llm.divided",
        "llm.find_model",
        "llm.timings",
        "llm.folder_files",
        "llm.methods",
        "llm.model_files",
        "llm.hf_folder",
        "llm.lora",
        "llm.unmerged",
        "llm.sampling",
        "engine",
    },
    "inspection": ALL
    | {"backends.cuda", "llm.methods", "llm.find_model", "llm.folder_files", "llm.hf_folder"},
    "plugins": CORE,
    "verify_special_cases": ALL,
    "serve": BASE | {"state", "session", "distributed", "engine", "llm", "llm.folder_files"},
    "vllm": BASE | {"compiler", "ir", "passes", "weights", "llm.find_model", "llm.hf_folder", "llm.methods"},
    "cli": BASE | {"backends", "distributed", "engine", "serve"},
    "__main__": {"cli"},
}
READ = [
    "ir",
    "ops",
    "cases",
    "nn",
    "compat",
    "passes",
    "quantized",
    "lower",
    "memory",
    "backends",
    "state",
    "transform",
    "runtime",
    "weights",
    "artefact",
    "distributed",
    "llm",
    "serve",
    "vllm",
    "inspection",
    "cli",
]


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """(line, name) of each import of this package in a file, those inside functions too; `from a import b` is a.b."""
    package = ("nnfront", *path.relative_to(ROOT).parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            head = list(package[: len(package) - node.level + 1]) if node.level else []
            head += [node.module] if node.module else []
            names = [".".join([*head, alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == "nnfront" and rest:
                found.append((node.lineno, rest))
    return found


def sources(folder: Path = ROOT) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def room_of(name: str) -> str:
    """The longest beginning of a module's name that has a rule of its own."""
    parts = name.split(".")
    heads = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((head for head in heads if head in MAY_IMPORT), heads[-1])


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_imports_only_point_down() -> None:
    wrong = []
    for path in sources():
        room = room_of(module_of(path))
        if room == "__init__":
            continue
        for line, name in imports(path):
            target = room_of(name)
            if target != room and target not in MAY_IMPORT[room]:
                wrong.append(f"{path.relative_to(PROJECT)}:{line}: {room} may not import {target}")
    assert not wrong, "\n".join(wrong)


def test_the_allowed_imports_have_no_cycle() -> None:
    order: list[str] = []
    pending = dict(MAY_IMPORT)
    while pending:
        ready = [room for room, below in pending.items() if below - {room} <= set(order)]
        assert ready, f"a cycle among {sorted(pending)}"
        order += ready
        for room in ready:
            del pending[room]


def test_no_file_imports_itself_through_others() -> None:
    """Imports for annotations count, too."""
    files = {module_of(path).removesuffix(".__init__"): path for path in sources()}

    def file_of(name: str) -> str:
        return name if name in files else name.rpartition(".")[0]

    pending = {name: {file_of(n) for _, n in imports(path)} - {name} for name, path in files.items()}
    while pending:
        lowest = [name for name, targets in pending.items() if not targets & pending.keys()]
        assert lowest, f"a circle among {sorted(pending)}"
        for name in lowest:
            del pending[name]


def test_every_room_is_in_the_rule() -> None:
    assert {room_of(module_of(path)) for path in sources()} - {"__init__"} == set(MAY_IMPORT)


def test_kernels_and_models_know_nothing_above_them() -> None:
    for path in sources(PROJECT / "kernels"):
        assert "nnfront." not in re.sub(r"nnfront_kernels", "", path.read_text()).replace(
            "import nnfront ", "import nnfront."
        ), path
    for path in sources(PROJECT / "examples" / "models"):
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
        decoder = (
            f"from nnfront_models import {path.stem}_text\n"  # what a model of images and texts has in it
        )
        assert "nnfront_models" not in code.replace(decoder, ""), path


def test_files_stay_short() -> None:
    lengths = {
        path: len(path.read_text().splitlines()) for path in [*sources(), *sources(PROJECT / "kernels")]
    }
    long = {str(path.relative_to(PROJECT)): n for path, n in lengths.items() if n > 400}
    assert not long, long
    assert statistics.median(lengths.values()) < 200


def test_every_source_file_says_its_licence_and_what_it_is() -> None:
    for path in [
        *sources(),
        *sources(PROJECT / "kernels"),
        *sources(PROJECT / "tests"),
        *sources(PROJECT / "bench"),
    ]:
        assert re.match(r'# SPDX-License-Identifier: Apache-2\.0\n(#.*\n|\n)*r?"""\S', path.read_text()), path


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def test_the_examples_of_the_readme_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(PROJECT)
    blocks = python_blocks(PROJECT / "README.md")
    assert len(blocks) == 2
    scope: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    out = capsys.readouterr().out
    assert "def forward[batch](" in out
    assert "torch.Size([3, 64])" in out


def test_the_readme_names_every_room() -> None:
    text = (PROJECT / "README.md").read_text()
    for room in READ:
        assert f"`nnfront/{room}/`" in text, room


def test_public_names_resolve() -> None:
    for name in nn.__all__:
        assert getattr(nn, name) is not None, name
    with pytest.raises(AttributeError, match="has no attribute 'Linnear'"):
        nn.Linnear  # noqa: B018


def test_help_loads_no_heavy_package() -> None:
    script = (
        "import sys\nfrom nnfront.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'triton', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("[]")
    assert "run" in done.stdout


def test_an_artefact_runs_without_what_makes_one() -> None:
    script = (
        "import sys\nfrom nnfront.cli import main\n"
        "main(['run', sys.argv[1], '-p', 'def main():', '-n', '1'])\n"
        "print(sorted(m for m in sys.modules if m.startswith(('nnfront.quantized', 'nnfront.nn', 'nnfront.llm.lora', 'nnfront.llm.hf', 'nnfront.backends.cuda.backend'))))"
    )
    golden = PROJECT / "tests" / "weights" / "golden" / "llama-1"
    done = subprocess.run([sys.executable, "-c", script, golden], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_project_speaks_of_itself_alone() -> None:
    here = str(PROJECT)
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=PROJECT, capture_output=True, text=True, check=False
    ).stdout.split("\n")
    for name in filter(None, tracked):
        path = PROJECT / name
        if (
            path.suffix in (".py", ".md", ".toml", ".txt", ".yml", "")
            and path.is_file()
            and path != Path(__file__)
        ):
            text = path.read_text(errors="ignore")
            assert here not in text or here == "/", name


def test_files_of_tests_have_names_of_their_own() -> None:
    """Without packages in `tests/` pytest imports them by their file's name alone."""
    names = Counter(path.name for path in (PROJECT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
