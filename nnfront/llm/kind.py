# SPDX-License-Identifier: Apache-2.0
"""Which class loads a model, by the methods that it has; of an artefact it is known without what exports models."""

from __future__ import annotations

from pathlib import Path

from nnfront.artefact.manifest import read_manifest
from nnfront.files import Folder
from nnfront.llm.methods import EMBEDDER, SEQ2SEQ, WITH_IMAGES
from nnfront.weights.checkpoint import is_artefact

KINDS = {"Seq2Seq": SEQ2SEQ, "VisionLanguageModel": WITH_IMAGES, "Embedder": EMBEDDER}


def kind_of_model(path: str | Path, model_file: str | Path | None = None) -> str:
    """Return the name of the class that loads the model of a folder or an artefact: Seq2Seq, VisionLanguageModel,
    Embedder (which loads no artefacts), or LLM for all others.

    Reads config.json, or the manifest, alone. Raises LoadError as `LLM.load` does.
    """
    if is_made := is_artefact(path):
        methods = {*read_manifest(Folder(path)).methods}
    else:
        from nnfront.llm.hf_folder import methods_of

        methods = {*methods_of(path, model_file)}
    found = next((kind for kind, needed in KINDS.items() if methods.issuperset(needed)), "LLM")
    return "LLM" if is_made and found == "Embedder" else found
