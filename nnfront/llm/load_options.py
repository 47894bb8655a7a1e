# SPDX-License-Identifier: Apache-2.0
"""What all that loads a folder's model asks of its arguments, which class loads it, and how an artefact is opened in the place of a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nnfront
from nnfront.artefact.folder import ArtefactFiles, read_artefact
from nnfront.artefact.loader import session_of
from nnfront.artefact.manifest import TextModel, read_manifest
from nnfront.backends.registry import parts_of
from nnfront.distributed.ranks import ALONE, Ranks
from nnfront.errors import LoadError
from nnfront.files import Folder
from nnfront.ir import IRModule
from nnfront.llm.methods import EMBEDDER, SEQ2SEQ, WITH_IMAGES
from nnfront.session import Session
from nnfront.weights.checkpoint import is_artefact

if TYPE_CHECKING:
    from nnfront.llm.hf_folder import CompiledFolder

KV_QUANTS = {"fp8": "float8_e4m3fn"}
"""How keys and values may be kept in fewer bits, and what caches call it."""

KINDS = {"Seq2Seq": SEQ2SEQ, "VisionLanguageModel": WITH_IMAGES, "Embedder": EMBEDDER}
"""Classes that load models, by the methods that these have."""


def kind_of_model(path: str | Path, model_file: str | Path | None = None) -> str:
    """Return the name of the class that loads the model of a folder or an artefact: Seq2Seq, VisionLanguageModel,
    Embedder (which loads no artefacts), or LLM for all others.

    Reads config.json, or the manifest, alone. Raises LoadError as `LLM.load` does.
    """
    if is_made := is_artefact(path):
        methods = {*read_manifest(Folder(path)).methods}
    else:
        from nnfront.llm.hf_folder import methods_of  # here: an artefact loads without what exports

        methods = {*methods_of(path, model_file)}
    found = next((kind for kind, needed in KINDS.items() if methods.issuperset(needed)), "LLM")
    return "LLM" if is_made and found == "Embedder" else found


def stored_as(kv_quant: str | None) -> str | None:
    """What caches call it. Raises LoadError for a way that there is not."""
    if kv_quant not in (None, *KV_QUANTS):
        raise LoadError(f"kv_quant is {kv_quant!r}, expected {' or '.join(map(repr, KV_QUANTS))}, or nothing")
    return None if kv_quant is None else KV_QUANTS[kv_quant]


def opened(path: str | Path, given: Mapping[str, Any]) -> ArtefactFiles:
    """Open an artefact. `given` are arguments of `LLM.load`, of which those say nothing that say how weights are made: they raise LoadError if they are given, and so does a damaged one."""
    if any(given.get(name) is not None for name in ("dtype", "model_file", "quant")):
        raise LoadError(
            f"{path} is an artefact: its dtype, its model and how its weights are stored are part of it",
            help="export the folder again with them: nnfront export DIR -o OUT --dtype D --model FILE --quant Q",
        )
    if given.get("adapters"):
        raise LoadError(
            f"{path} is an artefact, to which no adapters can be added",
            help="give the folder that it was made of, with adapters={NAME: DIR} (--lora-modules NAME=DIR)",
        )
    cache, ignored, lora, ranks = (given.get(name) for name in ("cache", "ignored", "lora", "ranks"))
    if cache is not None or ignored or lora:
        raise LoadError(
            f"{path} is an artefact: its weights are made already",
            help="export the folder again with it: nnfront export DIR -o OUT --lora ADAPTER"
            if lora
            else f"leave {'ignored' if cache is None else 'the cache'} out",
        )
    return read_artefact(path, rank=0 if ranks is None else ranks.rank)


def text_of(files: ArtefactFiles) -> TextModel:
    """What generating text needs of an artefact. Raises LoadError for one of no language model."""
    if files.manifest.llm is None:
        raise LoadError(
            f"{files.folder} is an artefact, but of no language model",
            help="nnfront.Seq2Seq.load(DIR) loads an encoder-decoder"
            if all(name in files.manifest.methods for name in SEQ2SEQ)
            else "nnfront.load(DIR) loads it",
        )
    return files.manifest.llm


def session_on(files: ArtefactFiles, device: str, ranks: Ranks = ALONE) -> Session:
    """The session of an artefact on a device, for one of several ranks, which all call it. Raises LoadError for what it was not made for, and for ranks that do not load the same."""
    target = files.manifest.target
    wanted, made = parts_of(device), parts_of(target)
    if wanted.name != made.name or wanted.arch not in (None, made.arch):
        raise LoadError(
            f"{files.folder} was made for the target {target!r}, not for {device!r}",
            help=f"load(..., device={target!r}), or export the model again for {device!r}",
        )
    made_of = hashlib.sha256(files.manifest.text().encode()).hexdigest()
    ranks.agree({"nnfront": nnfront.__version__, "torch": torch.__version__, "the artefact": made_of[:12]})
    with ranks.together():
        return session_of(files, wanted.number, rank=ranks.rank, ranks=ranks.world)


def weights_again(
    compiled: Callable[[], CompiledFolder], before: IRModule, ignored: Sequence[str], cast: bool
) -> Mapping[str, torch.Tensor]:
    """The weights that a folder holds now, by the model's names. Raises LoadError if it holds another model than before."""
    model = compiled()
    if str(model.executable.source) != str(before):
        raise LoadError(
            "the folder holds another model than the one that was loaded from it, not new weights of the same",
            help="load it anew",
        )
    return model.executable.named(model.checkpoint, ignored, cast)
