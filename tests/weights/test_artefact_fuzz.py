# SPDX-License-Identifier: Apache-2.0
"""A spoiled artefact is refused in words or loads and is right: no crash, no hang, no other exception, no memory without end.

Each file is spoiled a thousand times, as it is, where any change must be found; and with the hashes forged, so that what lies behind
them is reached, where a change may be another model that is as good.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import outputs, rehash, reseal, varied_session, write_folder
from artefact_mutations import spoil_bytes, spoil_json, spoil_words
from few_of import few_of
from hostile import limits

import nnfront as nn
from nnfront.artefact.manifest import TextModel
from nnfront.artefact.save import Extras
from nnfront.errors import NnfrontError
from nnfront.files import File, Folder

W = "nnfront-weights-00001-of-00001.safetensors"
INDEX = "nnfront-weights.safetensors.index.json"

Spoil = Callable[[random.Random, bytes], bytes]


@pytest.fixture(scope="module")
def small(tmp_path_factory: Any) -> Path:
    folder = Path(tmp_path_factory.mktemp("small")) / "a"
    varied_session().save(folder)
    return folder


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: Any) -> Path:
    place = Path(tmp_path_factory.mktemp("llm"))
    nn.LLM.load(write_folder(place / "hf")).save(place / "a")
    return place / "a"


@pytest.fixture(scope="module")
def with_copies(tmp_path_factory: Any) -> Path:
    """The small artefact with the copies of a language model: quicker to load than one."""
    place = Path(tmp_path_factory.mktemp("copies"))
    hf = write_folder(place / "hf")
    session = varied_session()
    session.extras = Extras(
        TextModel("llama", 32, 16),
        tuple(File(Folder(hf), name) for name in ("tokenizer.json", "config.json")),
    )
    session.save(place / "a")
    return place / "a"


def spoil_and_load(
    folder: Path,
    name: str,
    spoil: Spoil,
    is_forged: bool,
    count: int,
    is_right: Callable[[nn.Session], bool],
    first: int = 0,
) -> Counter[str]:
    """Count what came of it; raises what is no NnfrontError, with the number of the case in a note."""
    file, manifest = folder / name, folder / "nnfront.json"
    original, hashes = file.read_bytes(), manifest.read_bytes()
    found: Counter[str] = Counter()
    try:
        for case in range(first, first + count):
            spoiled = spoil(random.Random(f"{name} {case}"), original)
            file.write_bytes(spoiled)
            if is_forged:
                reseal(folder) if file == manifest else rehash(folder)
            try:
                with limits():
                    session = nn.load(folder)
                    assert is_right(session)
                found["loaded"] += 1
            except NnfrontError as error:
                found[type(error).__name__] += 1
            except BaseException as error:
                error.add_note(f"case {case} of {name} by {spoil.__name__}")
                raise
            manifest.write_bytes(hashes)
    finally:
        file.write_bytes(original)
        manifest.write_bytes(hashes)
    return found


CASES = [
    pytest.param("nnfront.json", spoil_bytes, False, id="bytes of the manifest"),
    pytest.param("nnfront.json", spoil_json, False, id="values of the manifest"),
    pytest.param("nnfront.json", spoil_json, True, id="values of the manifest, forged"),
    pytest.param("program.nnir", spoil_bytes, False, id="bytes of the program"),
    pytest.param("program.nnir", spoil_bytes, True, id="bytes of the program, forged"),
    pytest.param("program.nnir", spoil_words, True, id="words of the program, forged"),
    pytest.param(W, spoil_bytes, False, id="bytes of the weights"),
    pytest.param(W, spoil_bytes, True, id="bytes of the weights, forged"),
    pytest.param(INDEX, spoil_bytes, False, id="bytes of the index"),
    pytest.param(INDEX, spoil_bytes, True, id="bytes of the index, forged"),
    pytest.param(INDEX, spoil_json, True, id="values of the index, forged"),
]


def check_case(folder: Path, name: str, spoil: Spoil, is_forged: bool, count: int, first: int = 0) -> None:
    expected = outputs(nn.load(folder))

    def is_right(session: nn.Session) -> bool:
        return is_forged or all(map(torch.equal, outputs(session), expected))

    found = spoil_and_load(folder, name, spoil, is_forged, count, is_right, first)
    assert found["loaded"] + found["LoadError"] == found.total()
    assert found["LoadError"] > (0.3 if is_forged else 0.8) * found.total()


@pytest.mark.parametrize("count", few_of([20, 100]))
@pytest.mark.parametrize(("name", "spoil", "is_forged"), CASES)
def test_a_spoiled_artefact_is_refused_or_right(
    small: Path, name: str, spoil: Spoil, is_forged: bool, count: int
) -> None:
    check_case(small, name, spoil, is_forged, count)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spoil", "is_forged"), CASES)
def test_a_spoiled_artefact_is_refused_or_right_a_thousand_times(
    small: Path, name: str, spoil: Spoil, is_forged: bool
) -> None:
    check_case(small, name, spoil, is_forged, 1000, first=100)


LLM_CASES = [
    pytest.param("language_model", "program.nnir", spoil_words, id="words of the program"),
    pytest.param("language_model", "program.nnir", spoil_bytes, id="bytes of the program"),
    pytest.param("with_copies", "tokenizer.json", spoil_json, id="values of the tokenizer"),
    pytest.param("with_copies", "tokenizer.json", spoil_bytes, id="bytes of the tokenizer"),
    pytest.param("with_copies", "config.json", spoil_bytes, id="bytes of the config"),
]


def spoil_language_model(folder: Path, name: str, spoil: Spoil, count: int) -> None:
    def can_encode(session: nn.Session) -> bool:
        text = session.extras.text
        assert text is not None
        llm = nn.LLM(session, text, None, folder)
        return isinstance(llm.tokenizer.encode("a b"), list)

    found = spoil_and_load(folder, name, spoil, True, count, can_encode)
    assert found["loaded"] + found["LoadError"] + found["RunError"] == found.total()


@pytest.mark.parametrize(("place", "name", "spoil"), LLM_CASES)
def test_a_spoiled_language_model_is_refused_or_loads(
    place: str, name: str, spoil: Spoil, request: Any
) -> None:
    spoil_language_model(request.getfixturevalue(place), name, spoil, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("place", "name", "spoil"), LLM_CASES)
def test_a_spoiled_language_model_is_refused_or_loads_a_thousand_times(
    place: str, name: str, spoil: Spoil, request: Any
) -> None:
    spoil_language_model(request.getfixturevalue(place), name, spoil, 1000)
