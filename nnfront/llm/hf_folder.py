# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder, exported, lifted and compiled: what is ready to be given its weights, or written as an artefact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nnfront import dtypes, passes
from nnfront.artefact.manifest import TextModel
from nnfront.artefact.save import Extras
from nnfront.compiler import Executable, compile
from nnfront.llm.model_files import read_folder, read_json
from nnfront.llm.timings import Phases
from nnfront.weights import Checkpoint

# What an artefact takes along, so that it can be used without the folder.
_COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class CompiledFolder:
    """A folder's model without weights: the executable, the model file's config, the checkpoint, what generating text needs, and files."""

    executable: Executable
    config: Any
    checkpoint: Checkpoint
    text: TextModel
    files: tuple[Path, ...]

    @property
    def extras(self) -> Extras:
        """What an artefact of it has besides the program and the weights."""
        return Extras(self.text, self.files)


def compile_folder(
    path: str | Path,
    target: str = "cpu",
    dtype: str | None = None,
    model_file: str | Path | None = None,
    phases: Phases | None = None,
    quant: str | None = None,
) -> CompiledFolder:
    """Export a folder's model, lift its weight formulas into one transform, and compile it. Reads headers of weights only.

    dtype: compute in it instead of the checkpoint's dtype. quant: store the weights of linear layers in `int4`, `int8` or `fp8`. `phases` is told where the time goes.
    Raises LoadError if the folder or its architecture are not what they should be.
    """
    folder, phases = Path(path), phases or Phases()
    architecture, config, hf_config = read_folder(folder, model_file)
    if dtype is not None:
        config = replace(config, dtype=dtypes.check(dtype))
    model = architecture.file.build(config)
    spec = architecture.file.export_spec(config)
    checkpoint = Checkpoint(folder)
    text = TextModel(
        str(hf_config.get("model_type")),
        int(config.max_position_embeddings),
        int(config.vocab_size),
        _eos_token_ids(folder, hf_config),
    )
    phases.end("read")
    module = model.export(spec)
    phases.end("export")
    if quant is not None:
        module = passes.quantize_weights(module, quant)
    module = passes.lift_transform_params(module, shared_transform=True)
    phases.end("lift")
    executable = compile(module, target=target)
    phases.end("compile")
    files = tuple(folder / name for name in _COPIED if (folder / name).is_file())
    return CompiledFolder(executable, config, checkpoint, text, files)


def _eos_token_ids(folder: Path, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: from generation_config.json, else from config.json."""
    path = folder / "generation_config.json"
    found = (read_json(path) if path.is_file() else {}).get("eos_token_id", hf_config.get("eos_token_id"))
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)
