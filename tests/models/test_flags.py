# SPDX-License-Identifier: Apache-2.0
"""Every flag of every command, with every kind of model: it does what it says, or it is refused. None is ignored in silence."""

from __future__ import annotations

import argparse
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from configurations import configurations, with_random_weights
from test_encoder_decoders import first_sizes, reference, with_tokenizer
from test_images import PROMPT, SEEING, prepared
from test_images import reference as seeing_reference
from transformers import AutoConfig, AutoModel

import nnfront as nn
from nnfront.cli import COMMANDS, main

SHIPPED = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind of model, and an artefact of a language model."""
    root = tmp_path_factory.mktemp("kinds")
    made = {name: root / name for name in ("artefact", "t5", "whisper", "images", "encoder")}
    for name in ("t5", "whisper"):
        reference(name, first_sizes(name), made[name])
        with_tokenizer(made[name])
    with wave.open(str(root / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        file.writeframes(bytes(3200))
    sizes = SEEING[0].values[1]
    seeing_reference("gemma3", sizes).save_pretrained(made["images"])
    prepared(made["images"], 24, sizes["mm_tokens_per_image"])
    _, sizes = next(each.values for each in configurations(lambda name: name == "bert"))
    with_random_weights(AutoModel.from_config(AutoConfig.for_model("bert", **sizes))).save_pretrained(
        made["encoder"]
    )
    nn.artefact.export(SHIPPED, made["artefact"])
    return {**made, "text": SHIPPED, "sound": root / "sound.wav", "out": root / "out"}


MADE = "would change nothing: {path} is an artefact, whose model and weights are made already"
ARTEFACT = "is an artefact: its"
NO_ADAPTERS = "is an artefact, to which no adapters can be added"
NO_SOUND = "would change nothing: {path} holds a model that hears nothing"
ONE_PROCESS = "--tp divides language models that read texts alone, and {path} holds "
UNPROFILED = "would change nothing: without --profile no weights and caches are made"
PAGE = "would change nothing: a page shows all methods, lifted, and where they come from"
LLAMA = ["--model", str(SHIPPED.parents[1] / "models" / "llama.py")]
REFUSED: dict[tuple[str, str, str], str] = {
    ("run", "text", "--language de"): NO_SOUND,
    ("run", "text", "--task translate"): NO_SOUND,
    ("run", "text", "--image x.png"): "{path} holds a model that sees no images",
    ("run", "images", "--language de"): NO_SOUND,
    ("run", "t5", "--image x.png"): "would change nothing: {path} holds an encoder-decoder, which sees no images",
    ("run", "t5", "--language de"): "would change nothing: {path} holds a model that knows of no languages",
    ("run", "t5", "--task translate"): "the model has no task 'translate'",
    ("run", "t5", "--audio {sound}"): "the source is a sound, the model reads a text",
    ("run", "whisper", ""): "the source is a text, the model reads a sound",
    ("run", "t5", "--spec ngram"): "--spec would change nothing: {path} holds an encoder-decoder",
    ("run", "images", "--spec ngram"): "--spec would change nothing: {path} holds a model that sees images",
    ("run", "encoder", ""): "holds no language model",
    ("run", "encoder", "--quant int8"): "holds no language model",
    ("run", "artefact", "--dtype float32"): ARTEFACT,
    ("run", "artefact", "--quant int8"): ARTEFACT,
    ("run", "artefact", "--activations int8"): ARTEFACT,
    ("run", "text", "--activations int8"): "no product takes activations in int8",
    ("run", "artefact", "--cache {out}"): ARTEFACT,
    ("run", "artefact", "--lora x"): ARTEFACT,
    ("run", "artefact", "--ignore x"): ARTEFACT,
    ("run", "artefact", "--lora-modules a=x --adapter a"): NO_ADAPTERS,
    ("run", "text", "--adapter a"): "there is no adapter 'a'",
    ("run", "text", "--lora-modules a={text}"): "--lora-modules would change nothing: no --adapter says which of them writes the text",
    ("chat", "artefact", "--lora-modules a=x --adapter a"): NO_ADAPTERS,
    ("serve", "artefact", "--lora-modules a=x"): NO_ADAPTERS,
    ("run", "artefact", "--device cuda"): "was made for the target 'cpu', not for 'cuda'",
    ("explain", "text", "--kv-quant fp8"): UNPROFILED,
    ("explain", "text", "--cache {out}"): UNPROFILED,
    ("explain", "text", "--ignore x"): UNPROFILED,
    ("explain", "text", "--filled 5"): "--filled would change nothing: nothing is called",
    ("explain", "text", "--trace {out}"): "--trace without --profile has nothing to write",
    ("explain", "text", "decode --profile --kv-quant fp8"): "--kv-quant would change nothing: profiled calls are given caches",
    ("explain", "artefact", "--dtype float32"): MADE,
    ("explain", "artefact", "--quant int8"): MADE,
    ("explain", "artefact", "--lora x"): MADE,
    ("explain", "t5", "encode --profile"): "holds no language model",
    ("show", "text", "--device cuda"): "would change nothing: a page alone shows kernels",
    ("show", "text", "--provenance"): "would change nothing: a summary shows no bindings",
    ("show", "text", "--sizes batch=1"): "numbers for dims are for a page",
    ("show", "text", "--html - --method decode"): PAGE,
    ("show", "text", "--html - --lifted"): PAGE,
    ("check", "artefact", "--ignore x"): MADE,
    ("verify", "artefact", ""): "is an nnfront artefact: its weights are not a checkpoint's any more",
    ("export", "artefact", "-o {out}"): "is an artefact already",
    ("export", "text", "-o {out} --sizes batch=1"): "sizes say for which calls kernels are compiled",
    ("serve", "text", "--max-model-len 513"): "--max-model-len is 513, the model's context holds 512 tokens",
    ("serve", "text", "--max-model-len 0"): "--max-model-len is 0",
    ("serve", "t5", ""): "holds no language model",
    ("eval", "t5", "--text {text}/config.json"): "holds no language model",
    ("eval", "encoder", "--text {text}/config.json"): "holds no language model",
    ("calibrate", "encoder", "--text {text}/config.json -o {out}"): "holds no language model",
    ("calibrate", "t5", "--text {text}/config.json -o {out}"): "holds no language model",
    ("calibrate", "artefact", "--text {text}/config.json -o {out}"): "is an nnfront artefact",
}  # fmt: skip
BASE = {"run": "-p a5 -n 3"}
"""What a command is not without."""


def called(command: str, kind: str, flags: str, folders: dict[str, Path], *more: str) -> int:
    given = flags.format(**folders).split()
    base = [] if "--audio" in given or command not in BASE else BASE[command].split()
    return main([command, str(folders[kind]), *base, *given, *more])


@pytest.mark.parametrize(("command", "kind", "flags"), REFUSED)
def test_a_flag_without_an_effect_is_refused(
    command: str, kind: str, flags: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(command, kind, flags, folders) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert REFUSED[command, kind, flags].format(path=folders[kind]) in said.err
    assert not said.out


@pytest.mark.parametrize(
    ("command", "flags"),
    [("run", []), ("explain", []), ("check", []), ("show", []), ("diff", ["{artefact}"])],
)
def test_a_model_file_is_refused_with_an_artefact(
    command: str, flags: list[str], folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(command, "artefact", " ".join(flags), folders, *LLAMA) in (1, 2)
    assert "is an artefact" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["t5", "images"])
@pytest.mark.parametrize("named", [True, False])
def test_what_one_process_computes_is_not_divided(
    kind: str, named: bool, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    COMMANDS["run"].add_arguments(parser)
    given = parser.parse_args(["-p", "a5", *["--image", "x.png"] * (kind == "images")])
    given.path, given.model, given.ignore, given.tp = str(folders[kind]), None, [], 2
    with pytest.raises(nn.errors.LoadError) as caught:
        COMMANDS["run"].main(given)
    assert str(caught.value).startswith(ONE_PROCESS.format(path=folders[kind]))
    assert caught.value.help == "leave --tp out"


def written(kind: str, flags: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert called("run", kind, flags, folders) == 0
    return capsys.readouterr().out.removesuffix("\n")


Say = Callable[[str], str]


@pytest.mark.parametrize("kind", ["text", "artefact", "t5", "whisper", "images"])
def test_a_text_ends_before_a_stop(
    kind: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    how = "--audio {sound} -n 12" if kind == "whisper" else "-n 12"
    whole = written(kind, how, folders, capsys)
    new = whole if kind in ("t5", "whisper") else whole.removeprefix("a5")
    stop = next(word for word in reversed(new.split()) if word)
    assert (
        written(kind, f"{how} --stop {stop}", folders, capsys)
        == whole.removesuffix(new) + new.partition(stop)[0]
    )


def test_a_repetition_penalty_counts_what_an_encoder_decoder_has_written(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = written("t5", "-n 12 --repetition-penalty 1000", folders, capsys).split()
    assert len({*words}) == len(words) > 3


def test_a_prompt_with_places_for_images_is_no_text(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folders["images"]), "-p", PROMPT, "-n", "3"]) == 1
    said = capsys.readouterr()
    assert not said.out
    assert "error: the prompt has 2 places for images, and there are 0 images" in said.err


def test_every_flag_is_looked_at() -> None:
    """A new flag is put into a table of this file, or among those that do the same with every kind of model."""
    tried = {word for _, _, flags in REFUSED for word in flags.split()} | {"--model", "--stop", "--tp"}
    served = "--host --port --api-key --served-model-name --chat-template --max-num-seqs --max-queued --max-tokens --page-size --chunk --inter-token-ms --reuse-answers --snapshot-mb --timeout --log"
    same = {
        "bench": "--lengths --batches -n --repeats --json --plot",
        "run": "-p -n --temperature --top-k --top-p --min-p --repetition-penalty --seed",
        "calibrate": "",
        "chat": "--system --chat-template -n --temperature --seed",
        "check": "--json",
        "diff": "--device --json",
        "eval": "--window --stride --json",
        "explain": "",
        "export": "--mtp",
        "deploy": f"--name --route-prefix --replicas --min-replicas --max-replicas --cpus {served}",
        "serve": f"{served} --max-connections",
        "show": "",
        "verify": "--tokens --device",
    }  # fmt: skip
    of_weights = {
        "--quant-head",
        "--quant-rule",
        "--keep",
        "--quant-report",
        "--calibration",
    }  # which need --quant
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        command.add_arguments(parser)
        actions: list[Any] = parser._actions
        flags = {action.option_strings[0] for action in actions if action.option_strings}
        assert flags - tried - of_weights - {*same[name].split()} == set(), name
        assert {*same[name].split()} <= flags, name
