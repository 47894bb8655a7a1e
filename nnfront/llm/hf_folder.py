# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face folder, exported, lifted and compiled: what is ready to be given its weights, or written as an artefact."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nnfront import dtypes, passes
from nnfront.artefact.manifest import TextModel
from nnfront.artefact.save import Extras
from nnfront.backends.registry import backend_of
from nnfront.compiler import Executable, compile
from nnfront.errors import LoadError
from nnfront.files import File, Folder, shown, shown_text
from nnfront.ir import IRModule
from nnfront.llm.calibration import quantized_by
from nnfront.llm.folder_files import CONFIG, GENERATION, read_json
from nnfront.llm.gguf_folder import GgufFolder, holds_gguf
from nnfront.llm.lora import Loras, merge_adapters, open_adapters, split_ties, with_adapters
from nnfront.llm.methods import Methods, lacks_for_text, without_step
from nnfront.llm.model_files import read_folder
from nnfront.llm.parts import for_engine
from nnfront.llm.timings import Timings
from nnfront.llm.unmerged import NO_ADAPTERS, Adapters, keep_adapters, open_named
from nnfront.passes import QuantizeReport, QuantScheme
from nnfront.passes.quantizing.budget import candidates, measure, open_weights, within
from nnfront.passes.quantizing.scheme import scheme_of
from nnfront.quantized import StoredReport, StoredTensors, quantization_of
from nnfront.weights import Checkpoint

SMALL_BYTES = 1 << 20
"""Tensors that describe others are not larger."""

SAFETENSORS = (".safetensors", ".safetensors.index.json")
"""How files of weights end whose folder says what model they are of."""

LOGITS = "logits"
"""The method of a language model that gives the logits of all positions."""

TIED = "tie_word_embeddings"
"""What a Config calls it that the head is the embedding, where it may be either."""

# What an artefact takes along, so that it can be used without the folder.
_COPIED = (
    CONFIG,
    GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


@dataclass(frozen=True, slots=True)
class CompiledFolder:
    """A folder's model without weights: the executable, the model file's config, the checkpoint, and the folder, held open.

    `text` is what generating text needs; None if it is no language model, then `lacks` says why. `quantized` is what `quant` did, `stored` what
    became of weights that were quantised before; `adapters` are names of adapters that are not merged, in their order. `measured` are the weights of whose inputs the method `LOGITS`
    gives the moments.
    """

    executable: Executable
    config: Any
    checkpoint: Checkpoint
    folder: Folder
    text: TextModel | None
    lacks: tuple[str, ...] = ()
    quantized: QuantizeReport | None = None
    stored: StoredReport | None = None
    adapters: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()

    @property
    def extras(self) -> Extras:
        """What an artefact of it has besides the program and the weights."""
        return Extras(self.text, tuple(File(self.folder, name) for name in _COPIED if self.folder.has(name)))


def open_folder(path: str | Path) -> Folder:
    """Open a Hugging Face folder, or what is seen as one: a GGUF file, a folder with a model in GGUF, or that of a safetensors file or index. Raises LoadError if there is none."""
    if holds_gguf(path):
        return GgufFolder(path)
    if str(path).endswith(SAFETENSORS) and os.path.isfile(path):
        return Folder(os.path.dirname(os.path.abspath(path)))
    if not os.path.isdir(path):
        raise LoadError(
            f"{shown_text(str(path))} is not a folder",
            help="give the path of a Hugging Face folder, with config.json and safetensors, of a GGUF file, or of an artefact",
        )
    return Folder(path)


def methods_of(path: str | Path, model_file: str | Path | None = None) -> tuple[str, ...]:
    """Names of the methods that a folder's model has. Reads config.json alone. Raises LoadError as `export_folder` does."""
    architecture, config, _ = read_folder(open_folder(path), model_file)
    return architecture.methods(config)


def export_folder(
    path: str | Path,
    model_file: str | Path | None = None,
    checkpoint: Checkpoint | None = None,
    target: str = "cpu",
    *,
    methods: Methods = Methods.SPEC,
) -> IRModule:
    """Export the methods of a Hugging Face folder's model.

    Reads config.json, and of `checkpoint` the headers: a model of many times more tensors is not built to its end. Where weights are quantised, headers say which; those that products
    read as they are on `target` stay so. Raises LoadError if the folder or its architecture are not what they should be.
    """
    folder = open_folder(path)
    architecture, config, hf_config = read_folder(folder, model_file)
    if checkpoint is None and quantization_of(hf_config) is not None:
        checkpoint = Checkpoint(path, folder=folder, headers_only=True)
    module = architecture.export(config, None if checkpoint is None else checkpoint.infos, methods=methods)
    return _derived(module, hf_config, checkpoint, target)[0]


def _derived(
    module: IRModule, hf_config: dict[str, Any], checkpoint: Checkpoint | None, target: str
) -> tuple[IRModule, StoredReport | None]:
    """The module with formulas in the place of weights that are quantised in the checkpoint, if that is what config.json says."""
    quantization = quantization_of(hf_config)
    if quantization is None or checkpoint is None:
        return module, None
    return quantization.derive(module, stored_tensors(checkpoint), backend_of(target))


def stored_tensors(checkpoint: Checkpoint) -> StoredTensors:
    """A checkpoint's tensors as readers of quantised weights ask for them; those that describe others are read, if the data are there."""

    def read(name: str) -> bytes | None:
        info = checkpoint.info(name)
        return b"".join(map(bytes, checkpoint.blocks(name))) if info.size_bytes <= SMALL_BYTES else None

    return StoredTensors(checkpoint.infos, None if checkpoint.headers_only else read)


def compile_folder(
    path: str | Path,
    target: str = "cpu",
    dtype: str | None = None,
    model_file: str | Path | None = None,
    phases: Timings | None = None,
    quant: str | QuantScheme | None = None,
    lora: Loras = (),
    ranks: int = 1,
    *,
    methods: Methods = Methods.SPEC,
    adapters: Adapters = NO_ADAPTERS,
    moments: bool = False,
) -> CompiledFolder:
    """Export a folder's model, lift its weight formulas into one transform, and compile it. Reads headers of weights only.

    dtype: compute in it instead of the checkpoint's dtype. quant, lora, adapters: as for `LLM.load`. ranks: divide it among so many; `Executable.of_rank` is what one of them runs.
    methods: which are made. moments: in their place one that measures inputs of weights (`passes.input_moments`). `phases` is told where the time goes.
    Raises LoadError if the folder or its architecture are not what they should be.
    """
    folder, phases = open_folder(path), phases or Timings()
    architecture, config, hf_config = read_folder(folder, model_file)
    if dtype is not None:
        config = computing_in(dtype, config)
    if adapters and methods.guesses:
        raise LoadError(
            "the head that guesses tokens knows nothing of adapters that are not merged",
            help="guess with ngram or draft:DIR (--spec), or merge one: lora=[DIR] (--lora DIR)",
        )
    merged = open_adapters(lora)
    kept = open_named(adapters, len(merged))
    checkpoint = with_adapters(Checkpoint(path, folder=folder), (*merged, *kept.values()))
    phases.end("read")
    export = partial(architecture.export, stored=checkpoint.infos, ranks=ranks, methods=methods)
    module = export(config)
    lacks = tuple(lacks_for_text(module, config))
    may_split = getattr(config, TIED, None) is True
    if split := split_ties(module, merged) if merged and may_split else {}:
        config = replace(config, **{TIED: False})
        module = export(config)
    if kept:
        module = keep_adapters(without_step(module), list(kept.values()), checkpoint, backend_of(target))
    if merged:
        module = merge_adapters(module, merged, backend_of(target), split)
    module, stored = _derived(module, hf_config, checkpoint, target)
    if methods is Methods.PARTS:
        module = for_engine(module)
    measured: tuple[str, ...] = ()
    if moments:
        if lacks or LOGITS not in module:
            raise LoadError(f"{path} holds no language model, and no other is calibrated", details=lacks)
        module = passes.input_moments(module, LOGITS)
        measured = module[LOGITS].attrs["moments_of"]
    text = None
    if not lacks:
        text = TextModel(
            str(hf_config.get("model_type")),
            config.max_position_embeddings,
            config.vocab_size,
            eos_token_ids(folder, hf_config),
        )
    phases.end("export")
    quantized = None
    if quant is not None:
        quant = scheme_of(quant)
        if quant.budget is not None:
            quant = _within_budget(module, quant, checkpoint, target, cast=dtype is not None)
            phases.end("measure")
        if quant.calibration is not None and ranks > 1:
            raise LoadError(
                "a model that ranks divide is not calibrated: a part of a weight has a part of its inputs",
                help="leave --calibration out, or --tp (ranks)",
            )
        module, quantized, checkpoint = quantized_by(module, quant, checkpoint)
        if quant.activations is not None:
            refuses = backend_of(target).refuses_int8
            report = passes.quantize_activations.report(module, refuses)
            report.require_any()
            module = passes.quantize_activations(module, refuses)
            quantized = replace(quantized, activations=report)
    module = passes.lift_transform_params(module, shared_transform=True)
    phases.end("lift")
    executable = compile(module, target=target)
    phases.end("compile")
    return CompiledFolder(
        executable, config, checkpoint, folder, text, lacks, quantized, stored, tuple(kept), measured
    )


def _within_budget(
    module: IRModule, scheme: QuantScheme, checkpoint: Checkpoint, target: str, *, cast: bool
) -> QuantScheme:
    """Choose formats by what each loses of each weight, one weight after the other."""
    names, formats = open_weights(module, scheme), candidates(backend_of(target).reads)
    executable = compile(passes.lift_transform_params(module, shared_transform=True))
    measured, elements = {}, 0
    for name, weight in executable.stream_params(checkpoint, cast=cast):
        if name in names:
            measured[name] = measure(weight, formats)
            elements += weight.numel()
        del weight
    return within(scheme, measured, elements, [name for name, is_head in names.items() if is_head])


def computing_in(dtype: str, config: Any) -> Any:
    """The config of a model that computes in another dtype."""
    if dtype not in dtypes.COMPUTED:
        raise LoadError(f"dtype is {dtype!r}, expected one of {', '.join(dtypes.COMPUTED)}")
    if not is_dataclass(config) or "dtype" not in [field.name for field in fields(config)]:
        raise LoadError(
            f"dtype is {dtype!r}, but the model file's Config has no field 'dtype'",
            help="leave dtype out, or let the Config have it and the model read it",
        )
    return replace(config, dtype=dtype)  # type: ignore[type-var]


def eos_token_ids(folder: Folder, hf_config: dict[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: from generation_config.json, else from config.json."""
    given = read_json(folder, GENERATION) if folder.has(GENERATION) else {}
    found = given.get("eos_token_id", hf_config.get("eos_token_id"))
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(id) is int and 0 <= id < 2**63 for id in ids):
        raise LoadError(
            f"{folder.path}: eos_token_id is {shown(found)}, expected a token or a list of them",
            help="correct it in generation_config.json, or in config.json if there is none",
        )
    return tuple(ids)
