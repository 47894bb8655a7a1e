# SPDX-License-Identifier: Apache-2.0
"""Find the model file for a Hugging Face folder: by `model_type` among the shipped ones, or any file of the user's."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from math import prod
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Never

from nnfront.dims import Dim
from nnfront.errors import LoadError, NnfrontError, SpecError
from nnfront.files import Folder, shown
from nnfront.ir import IRModule
from nnfront.llm.folder_files import CONFIG, read_json
from nnfront.llm.methods import DRAFT, EXTEND, STEP, Methods
from nnfront.llm.parts import export_parts
from nnfront.quantized import KEYS
from nnfront.quantized.stored import StoredTensor

if TYPE_CHECKING:
    from nnfront.nn.module import Module
    from nnfront.nn.multi_token import MultiTokenLM
    from nnfront.nn.ranks import Plan


MEDIA = ("audio", "image", "speech", "video", "vision")
"""What the configurations of a model's parts are called after that read something else than text."""


@dataclass(frozen=True)
class Architecture:
    """A model file: `Config` with `from_hf`, `build`, `export_spec`; `name` is what messages call it."""

    name: str
    file: ModuleType

    def config(self, hf_config: dict[str, Any]) -> Any:
        """Read config.json into the file's Config. Raises LoadError for what it refuses."""
        with _speaking_of(self.file.__file__):
            return self.file.Config.from_hf(hf_config)

    def methods(self, config: Any) -> tuple[str, ...]:
        """Names of the methods that the model has. Raises LoadError for what goes wrong in the file."""
        with _speaking_of(self.file.__file__):
            return tuple(self.file.export_spec(config))

    def export(
        self,
        config: Any,
        stored: Mapping[str, StoredTensor] | None = None,
        ranks: int = 1,
        methods: Methods = Methods.SPEC,
    ) -> IRModule:
        """Export the model's methods.
        `stored` are the tensors that there are for it: a model of many times more is not built to its end.

        With `ranks` it is divided among as many: what each of them computes, over parts of the checkpoint's weights.
        Raises LoadError, or another error of ours, with a line of the file for what goes wrong in it.
        """
        from nnfront.passes.shard_weights import shard_weights
        from nnfront.passes.taken_apart import taken_apart

        if ranks == 1:
            with self._building(stored):
                model = self._built(config, stored, methods)
            ir = self._exported(model, config, methods)
        else:
            model, plan = self.divided(config, ranks, stored, methods)
            shards = {
                name: (planned.axis, int(planned.whole.shape[planned.axis]), planned.blocks)
                for name, planned in plan.weights.items()
                if planned.axis is not None
            }
            exported = self._exported(model, config.of_ranks(ranks), methods)
            whole = {name for name, (axis, _, blocks) in shards.items() if axis == 0 and blocks is None}
            for name, binding in taken_apart(exported, whole):
                raise SpecError(
                    f"{name} holds several matrices one after the other, and ranks would cut it as one",
                    details=["what is computed of it is taken apart along its features"],
                    where=str(binding.provenance or ""),
                    help="say what it holds: nnfront.joined(sizes, weight)",
                )
            ir = shard_weights(exported, shards, ranks)
        attrs = dict(ir.attrs)
        if ignored := getattr(self.file, "IGNORED", ()):
            attrs["ignored"] = tuple(ignored)
        if renamed := _renamed(getattr(self.file, "PREFIXES", {}), ir):
            attrs["aliases"] = {**ir.aliases, **renamed}
        return IRModule(ir.functions, attrs)

    def _built(self, config: Any, stored: Mapping[str, StoredTensor] | None, methods: Methods) -> Module:
        model: Module = self._with_mtp(config, stored) if methods.guesses else self.file.build(config)
        return model

    def _with_mtp(self, config: Any, stored: Mapping[str, StoredTensor] | None) -> Module:
        """The model with its head that guesses further tokens. Raises LoadError if there is none, in the file or among the tensors."""
        if not hasattr(self.file, "build_mtp"):
            raise LoadError(
                f"there is no head of {self.name} that guesses further tokens",
                details=[f"file: {self.file.__file__}, which has no 'build_mtp'"],
                help="guess in another way: --spec ngram, or --spec draft:DIR",
            )
        model: MultiTokenLM = self.file.build_mtp(config)
        head = model.mtp_head()
        (path,) = (name for name, module in model.named_modules() if module is head)
        if stored is not None and not any(name.startswith(f"{path}.") for name in stored):
            raise LoadError(
                "the checkpoint has no head that guesses further tokens",
                details=[f"none of its {len(stored)} tensors begins with {path + '.'!r}"],
                help="guess in another way: --spec ngram, or --spec draft:DIR",
            )
        return model

    def divided(
        self,
        config: Any,
        ranks: int,
        stored: Mapping[str, StoredTensor] | None = None,
        methods: Methods = Methods.SPEC,
    ) -> tuple[Module, Plan]:
        """Return what each of so many ranks computes of the model, and what becomes of each weight. Raises LoadError where it does not divide."""
        from nnfront.nn.ranks import divide

        with self._building(stored):
            part, whole = (self._built(each, stored, methods) for each in (config.of_ranks(ranks), config))
            return divide(part, whole, ranks)

    @contextmanager
    def _building(self, stored: Mapping[str, StoredTensor] | None) -> Iterator[None]:
        """Within it, a model is built, of not many times more tensors than there are."""
        # Here: an artefact loads without what authors need.
        from nnfront.nn.parameter import declaring_at_most

        sizes = [prod(tensor.shape) for tensor in (stored or {}).values()]
        parameters = 1000 + 4 * len(sizes) if sizes else 250_000
        elements = 2**24 + 64 * sum(sizes) if sizes else 2**44
        with _speaking_of(self.file.__file__), declaring_at_most(parameters, elements):
            yield

    def _exported(self, model: Module, config: Any, methods: Methods) -> IRModule:
        with _speaking_of(self.file.__file__):
            spec = self.file.export_spec(config)
            if methods is Methods.PARTS:
                return export_parts(model, spec)
            if methods.extends and hasattr(model, EXTEND) and "prefill" in spec:
                from nnfront.nn.spec import Tensor  # an artefact loads without it

                wanted = Tensor([Dim("wanted", min=1)], "int64")
                spec = {**spec, EXTEND: spec["prefill"], STEP: {**spec["decode"], "wanted": wanted}}
            if hasattr(model, DRAFT):
                spec = {**spec, **model.spec(spec)}
            return model.export(spec)


def _renamed(prefixes: Mapping[str, str], ir: IRModule) -> dict[str, str]:
    """Further names of a model's parameters: those that begin with another prefix, of aliases too."""
    own = [p.name for f in ir.methods for p in f.params if p.role == "weight"]
    names = {name: name for name in sorted({*own, *ir.attrs.get("unread", ())})} | dict(ir.aliases)
    return {
        other + name.removeprefix(prefix): target
        for other, prefix in prefixes.items()
        for name, target in names.items()
        if name.startswith(prefix) and other + name.removeprefix(prefix) not in names
    }


def known_architectures() -> dict[str, str]:
    """Return the model types that shipped model files compute, in order, each with the name of its file."""
    package = importlib.import_module("nnfront_models")
    found = {path.stem for folder in package.__path__ for path in Path(folder).glob("*.py")}
    return dict(sorted([*package.FILES.items(), *((name, name) for name in found - {"__init__"})]))


def find_architecture(
    model_type: str, model_file: str | Path | None = None, parts: Sequence[str] = ()
) -> Architecture:
    """Return the model file for `model_type`, or the one at the path `model_file`. `parts`: configurations of parts that its config.json has, such as `vision_config`.

    Raises LoadError if there is none, or if the file lacks what a model file has.
    """
    if model_file is not None:
        return _checked(str(model_file), _load_file(Path(model_file)))
    known = known_architectures()
    if model_type not in known:
        raise LoadError(
            f"unknown architecture {shown(model_type)}",
            details=[
                *(f"config.json has {', '.join(parts)}: the model reads more than text" for _ in parts[:1]),
                f"known: {', '.join(known)}",
            ],
            help="write a model file for it and name it with --model FILE (model_file= in Python)",
        )
    return _checked(model_type, importlib.import_module(f"nnfront_models.{known[model_type]}"))


class _SourceLoader(SourceFileLoader):
    """Runs a file's source, never bytecode kept of it: that is told from other bytecode by size and second, and a file may change within one."""

    def path_stats(self, path: str) -> Never:
        raise OSError


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise LoadError(f"there is no model file {path}")
    # A file that has not changed is run once: what it declares would be declared again.
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"model_file_{path.stem}_{hashlib.sha256(f'{path.resolve()} {digest}'.encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None  # as there is a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    linecache.checkcache(str(path))
    try:
        with _speaking_of(str(path)):
            loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _speaking_of(file: str | None) -> Iterator[None]:
    """Turn whatever a model file raises into one error that shows the file's own lines; errors of ours say theirs already."""
    try:
        yield
    except NnfrontError:
        raise
    except Exception as error:  # a model file is somebody's program: it may raise anything
        if file is None:
            raise
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        if isinstance(error, SyntaxError) and error.filename == file:
            lines.append(traceback.FrameSummary(file, error.lineno, "the file"))
        if not lines:
            raise
        raise LoadError(
            f"the model file failed with {type(error).__name__}: {getattr(error, 'msg', error)}",
            details=[f"line {f.lineno}, in {f.name.strip('<>')}: {f.line}" for f in lines],
            where=f"{file}:{lines[-1].lineno}",
        ) from error


def _checked(name: str, file: ModuleType) -> Architecture:
    missing = [n for n in ("Config", "build", "export_spec") if not hasattr(file, n)]
    ignored, prefixes = getattr(file, "IGNORED", ()), getattr(file, "PREFIXES", {})
    wrong = ""
    if missing:
        wrong = f"the model file {name} lacks {', '.join(missing)}"
    elif not isinstance(ignored, list | tuple) or not all(isinstance(each, str) for each in ignored):
        wrong = f"IGNORED of the model file {name} is {ignored!r}, expected a tuple of names and patterns"
    elif not isinstance(prefixes, dict) or not all(isinstance(s, str) for p in prefixes.items() for s in p):
        wrong = f"PREFIXES of the model file {name} is {prefixes!r}, expected a dict from a checkpoint's prefixes to the model's"
    if wrong:
        raise LoadError(wrong, details=[f"file: {file.__file__}"])
    return Architecture(name, file)


def read_folder(
    folder: Folder, model_file: str | Path | None = None
) -> tuple[Architecture, Any, dict[str, Any]]:
    """Return a folder's architecture, its Config, and its config.json as it stands. Reads no weights."""
    hf_config = read_json(folder, CONFIG)
    parts = [key for key in hf_config if key.endswith("_config") and key.split("_")[0] in MEDIA]
    architecture = find_architecture(str(hf_config.get("model_type")), model_file, parts)
    # How weights are stored is no model's affair.
    model = {key: value for key, value in hf_config.items() if key not in KEYS}
    return architecture, architecture.config(model), hf_config
