# SPDX-License-Identifier: Apache-2.0
"""Where a model is that is named by a path or as org/name: in Hugging Face's cache, downloaded into it, or said to be nowhere."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest
from safetensors.torch import load_file, save_file

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(cache: Path, files: tuple[str, ...] = FILES) -> Path:
    """Put a model into a cache as Hugging Face's library lays it out: blobs, and links to them."""
    repo = cache / "models--some--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    for name in files:
        blob = repo / "blobs" / hashlib.sha256(name.encode()).hexdigest()
        shutil.copy(FOLDER / name, blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_name_in_the_cache_is_a_model_for_every_command(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = put(cache)
    assert nn.find_model("some/model") == snapshot
    assert nn.model_name(snapshot) == "some/model"
    llm = nn.LLM.load("some/model")
    assert llm.generate("def", 4) == nn.LLM.load(FOLDER).generate("def", 4)
    for command in (["show"], ["check"], ["explain", "decode"]):
        assert main([command[0], "some/model", *command[1:]]) == 0
    assert main(["diff", str(FOLDER), "some/model"]) == 0
    capsys.readouterr()
    assert main(["show", "some/model", "--html", "-"]) == 0
    assert "<title>some/model · nnfront</title>" in capsys.readouterr().out


def test_a_folder_of_that_name_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert nn.find_model("some/model") == Path("some/model")
    # What could be a path with a slip in it is not looked up.
    assert nn.find_model("some/modle") == Path("some/modle")
    assert nn.find_model("no-such-name") == Path("no-such-name")


def test_without_the_library_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoadError) as raised:
        nn.LLM.load("some/model")
    assert str(raised.value) == (
        "some/model is not a folder, and the package 'huggingface_hub', which finds models by such names, is not installed\n"
        "  help: pip install 'nnfront[hub]', or give the path of a Hugging Face folder, of a GGUF file, or of an artefact"
    )


def test_without_a_network_what_the_cache_lacks_is_an_error(cache: Path) -> None:
    with pytest.raises(
        LoadError,
        match=r"some/model is not in Hugging Face's cache, and cannot be downloaded\n  .*\n  help: where there is a network: hf download some/model;",
    ):
        nn.find_model("some/model")


@pytest.mark.parametrize("files", [(), FILES[:2], FILES[2:]])
def test_a_part_of_a_model_is_none(cache: Path, files: tuple[str, ...]) -> None:
    snapshot = put(cache, files)
    with pytest.raises(LoadError) as raised:
        nn.find_model("some/model")
    assert str(raised.value) == (
        "of some/model there is no config.json with safetensors, or not all of them\n"
        f"  in {snapshot}\n"
        "  help: where there is a network: hf download some/model; of a model in GGUF download a file and give its path"
    )


def test_a_shard_that_is_missing_is_no_whole_model(cache: Path) -> None:
    snapshot = put(cache)
    (snapshot / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(LoadError, match="or not all of them"):
        nn.find_model("some/model")
    (snapshot / "model-2.safetensors").touch()
    assert nn.find_model("some/model") == snapshot


def test_a_safetensors_file_is_accepted_where_a_folder_is(tmp_path: Path) -> None:
    file = FOLDER / "model.safetensors"
    assert nn.LLM.load(file).generate("def", 4) == nn.LLM.load(FOLDER).generate("def", 4)
    assert main(["check", str(file)]) == 0
    assert main(["show", str(file)]) == 0
    shutil.copy(file, tmp_path / "alone.safetensors")
    with pytest.raises(LoadError, match=r"config\.json does not exist"):
        nn.LLM.load(tmp_path / "alone.safetensors")


def test_one_of_several_files_stands_for_all(tmp_path: Path) -> None:
    for name in FILES[:2] + FILES[3:]:
        shutil.copy(FOLDER / name, tmp_path)
    tensors = load_file(FOLDER / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:20], names[20:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = nn.LLM.load(tmp_path / "model-00002-of-00002.safetensors")
    assert found.generate("def", 4) == nn.LLM.load(FOLDER).generate("def", 4)


def test_names_of_paths() -> None:
    assert nn.model_name(FOLDER) == "pylib-3m"
    assert nn.model_name(FOLDER / "model.safetensors") == "model"
    assert nn.model_name("a/b/small.gguf") == "small"


class Hub(BaseHTTPRequestHandler):
    """What Hugging Face's site answers about one public model."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/some/model/tree/"):
            found = [
                {"type": "file", "path": n, "size": (FOLDER / n).stat().st_size, "oid": n} for n in FILES
            ]
            self._send(json.dumps(found).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith("/api/models/some/model"):
            info = {
                "id": "some/model",
                "sha": COMMIT,
                "siblings": [{"rfilename": n} for n in (*FILES, "model.bin")],
            }
            self._send(json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        elif path.startswith("/some/model/resolve/") and name in FILES:
            self._send((FOLDER / name).read_bytes(), {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_what_is_not_there_is_downloaded_once(hub: str, tmp_path: Path) -> None:
    script = "import sys, nnfront as nn; print(nn.find_model('some/model'))\ntry: nn.find_model('some/other')\nexcept nn.errors.LoadError as error: print(error)"
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    path, *error = done.stdout.splitlines()
    assert sorted(file.name for file in Path(path).iterdir()) == sorted(FILES)
    assert (Path(path) / "model.safetensors").read_bytes() == (FOLDER / "model.safetensors").read_bytes()
    assert error == [
        "there is no model some/other at Hugging Face, nor a folder of that name",
        "  help: correct the name; for a private model log in: hf auth login",
    ]
    offline = subprocess.run(
        [sys.executable, "-c", script.splitlines()[0]],
        env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert offline.stdout.strip() == path
