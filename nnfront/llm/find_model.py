# SPDX-License-Identifier: Apache-2.0
"""`find_model`: where a model is that somebody names: a path, or `org/name` in Hugging Face's cache, where it is put if it is not there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nnfront.errors import LoadError
from nnfront.files import Folder, shown_text

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--(.+?)--(.+)")
INDEX = ".safetensors.index.json"
WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
"""The files of a repository that are downloaded: what loading reads. Of formats that hold code none."""


def find_model(path: str | os.PathLike[str]) -> Path:
    """Return the path that a name stands for: that of a folder, an artefact or a file as it is, that of a shard's index.

    `org/name` that is no path is looked up in Hugging Face's cache; what is not there whole is downloaded, with huggingface_hub's own bars.
    A copy that is whole is used as it is: nobody is asked whether there is a newer one. A name that is neither is returned for
    whoever opens it to refuse. Raises LoadError for a model that is not found, or if huggingface_hub is not installed.
    """
    name = os.fspath(path)
    if os.path.exists(name):
        return _index_of(Path(name)) if name.endswith(".safetensors") else Path(name)
    if not _ID.fullmatch(name) or os.path.isdir(name.partition("/")[0]):
        return Path(name)
    return _in_cache(name)


def model_name(path: str | os.PathLike[str]) -> str:
    """Return what a model at a path is called: `org/name` in Hugging Face's cache, else the name of the folder, or of the file without its ending."""
    whole = Path(os.path.abspath(path))
    if whole.parent.name == "snapshots" and (found := _SNAPSHOT.fullmatch(whole.parent.parent.name)):
        return f"{found[1]}/{found[2]}"
    return (
        whole.name if os.path.isdir(whole) else whole.name.partition(".safetensors")[0].removesuffix(".gguf")
    )


def _index_of(file: Path) -> Path:
    """The index that names a file as one of several, else the file."""
    for index in sorted(file.parent.glob(f"*{INDEX}")):
        if file.name in (_named(index) or ()):
            return index
    return file


def _named(index: Path) -> set[str] | None:
    """The files that an index names; None for one that is damaged: whoever opens it says what is wrong with it."""
    try:
        return {*Folder(index.parent).read_json(index.name)["weight_map"].values()}
    except (LoadError, KeyError, TypeError, AttributeError):
        return None


def _in_cache(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
    except ImportError:
        raise LoadError(
            f"{shown_text(name)} is not a folder, and the package 'huggingface_hub', which finds models by such names, is not installed",
            help="pip install 'nnfront[hub]', or give the path of a Hugging Face folder, of a GGUF file, or of an artefact",
        ) from None
    try:
        cached = Path(snapshot_download(name, local_files_only=True))
        if _is_whole(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        found = Path(snapshot_download(name, allow_patterns=WANTED))
    except GatedRepoError:
        raise LoadError(
            f"{name} is open to those who have agreed to its terms",
            help=f"agree at https://huggingface.co/{name}, and log in: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise LoadError(
            f"there is no model {name} at Hugging Face, nor a folder of that name",
            help="correct the name; for a private model log in: hf auth login",
        ) from None
    except (OSError, ValueError) as error:
        raise LoadError(
            f"{name} is not in Hugging Face's cache, and cannot be downloaded",
            details=[str(error).splitlines()[0] if str(error) else type(error).__name__],
            help=f"where there is a network: hf download {name}; or give the path of a folder that holds the model",
        ) from None
    if not _is_whole(found):
        raise LoadError(
            f"of {name} there is no config.json with safetensors, or not all of them",
            details=[f"in {found}"],
            help=f"where there is a network: hf download {name}; of a model in GGUF download a file and give its path",
        )
    return found


def _is_whole(folder: Path) -> bool:
    """Whether config.json is there, and all files with weights that an index names, or one at least."""
    if not (folder / "config.json").is_file():
        return False
    found = [_named(index) for index in folder.glob(f"*{INDEX}")]
    if None in found:
        return False
    wanted = {file for files in found for file in files or ()}
    return all((folder / file).is_file() for file in wanted) if wanted else any(folder.glob("*.safetensors"))
