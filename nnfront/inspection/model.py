# SPDX-License-Identifier: Apache-2.0
"""`inspect_model`: a folder or an artefact, compiled, and what is known of its weights without reading them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nnfront.artefact.folder import read_artefact
from nnfront.artefact.tensor_names import Orders, Places, of_all_ranks, rank_programs, restored
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.compiler import Executable, compile
from nnfront.dims import Symbol
from nnfront.files import Folder
from nnfront.ir import IRModule, admit
from nnfront.llm.folder_files import CONFIG, read_json
from nnfront.llm.hf_folder import export_folder, open_folder
from nnfront.llm.methods import Methods
from nnfront.passes import lift_transform_params
from nnfront.weights.checkpoint import Checkpoint, is_artefact


@dataclass(frozen=True)
class Inspected:
    """A compiled model. `source` is its lifted IR with shared layers, before a target's passes.

    `stored` are the tensors of its files, None for a folder that holds none; `places` say of an artefact which of them is which
    weight, `orders` which are stored with their axes in another order. `config` is config.json, empty without one. `kernels` are those that an artefact has compiled.
    """

    path: Path
    executable: Executable
    stored: Checkpoint | None
    config: Mapping[str, Any]
    places: Places | None = None
    orders: Orders = field(default_factory=dict)
    kernels: CompiledKernels | None = None

    @property
    def source(self) -> IRModule:
        return self.executable.source

    @property
    def is_artefact(self) -> bool:
        """Whether its weights are made already."""
        return self.places is not None


def inspect_model(
    path: str | Path,
    target: str | None = None,
    model_file: str | Path | None = None,
    *,
    headers_only: bool = True,
    methods: Methods = Methods.SPEC,
) -> Inspected:
    """Compile what a folder or an artefact holds. Reads headers of weights at most; of a folder config.json is enough.

    target: an artefact has its own. headers_only: a folder's files may end after their headers. methods: as for `export_folder`. Raises LoadError if there is no model, or a damaged one.
    """
    if is_artefact(path):
        files = read_artefact(path, verify=False)
        executable = compile(admit(files.program), target or files.manifest.target)
        programs = rank_programs(executable.program)
        dims = {Symbol(name): number for name, number in files.manifest.dims.items()}
        places = of_all_ranks(programs, restored(programs[0], files.manifest.weights), dims)
        return Inspected(
            Path(path),
            executable,
            files.tensors,
            _config(files.home),
            places,
            files.manifest.orders,
            files.kernels,
        )
    folder = open_folder(path)
    has_weights = any(name.endswith((".safetensors", ".gguf")) for name in folder.names())
    stored = Checkpoint(path, folder=folder, headers_only=headers_only) if has_weights else None
    target = target or "cpu"
    module = export_folder(path, model_file, stored, target, methods=methods)
    module = lift_transform_params(module, shared_transform=True)
    return Inspected(Path(path), compile(module, target), stored, _config(folder))


def _config(folder: Folder) -> Mapping[str, Any]:
    return read_json(folder, CONFIG) if folder.has(CONFIG) else {}
