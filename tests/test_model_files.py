# SPDX-License-Identifier: Apache-2.0
"""Model files of a user's: run once and again, wrong in many ways, of no language model, with tensors that may be left over."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import InferError, LoadError, LowerError, RunError
from nnfront.ir import same_code

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
LLAMA = Path(llama.__file__).read_text(encoding="utf-8")

OWN = '''
from nnfront.ir import TensorType

FACTOR = 2.0


@nn.ir.op(name="test_files_scaled")
def scaled(x: TensorType, by: float = 1.0) -> TensorType:
    """x * by."""
    return x


@scaled.reference
def _(x, by):
    return x * by * FACTOR


def make(run):
    return lambda x: x * FACTOR


nn.register_kernel("test_files_scaled", "test_files_kernel", make)
nn.register_extern("test_files.extern", lambda x: x + FACTOR)
'''


@pytest.fixture
def own() -> Any:
    """Forgets what `OWN` declares."""
    yield
    nn.unregister_kernel("test_files_kernel")
    del nn.ir.OPS["test_files_scaled"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.usefixtures("own")
class TestAgain:
    def test_a_file_that_declares_an_op_and_a_kernel_loads_as_often_as_you_like(self, tmp_path: Path) -> None:
        file = written(tmp_path / "mine.py", LLAMA + OWN)
        ids = torch.tensor([[5, 6]])
        one, two = (nn.LLM.load(FOLDER, model_file=file).logits(ids) for _ in range(2))
        assert torch.equal(one, two)
        declared = nn.ir.OPS["test_files_scaled"]
        copy = written(tmp_path / "copy.py", "# elsewhere\n" + LLAMA + OWN)
        assert torch.equal(nn.LLM.load(FOLDER, model_file=copy).logits(ids), one)
        assert nn.ir.OPS["test_files_scaled"] is declared

    @pytest.mark.parametrize(
        ("before", "after", "error", "message"),
        [
            (
                "    return x\n\n\n@",
                "    return nn.ir.TensorType((), 'int8')\n\n\n@",
                InferError,
                "there is another op 'test_files_scaled' already",
            ),
            (
                '@nn.ir.op(name="test_files_scaled")',
                '@nn.ir.op(name="test_files_scaled", scratch=False)',
                InferError,
                "there is another op 'test_files_scaled' already",
            ),
            (
                '@nn.ir.op(name="test_files_scaled")',
                '@nn.ir.op(name="test_files_scaled", flops=lambda operands, results, attrs: 0)',
                InferError,
                "there is another op 'test_files_scaled' already",
            ),
            (
                "x * by * FACTOR",
                "x + by",
                InferError,
                "the op 'test_files_scaled' has another reference already",
            ),
            (
                "FACTOR = 2.0",
                "FACTOR = 3.0",
                InferError,
                "the op 'test_files_scaled' has another reference already",
            ),
            (
                "lambda x: x * FACTOR\n",
                "lambda x: x / FACTOR\n",
                LowerError,
                "there is a kernel 'test_files_kernel' already",
            ),
            (
                "lambda x: x + FACTOR",
                "lambda x: x - FACTOR",
                RunError,
                "the external function 'test_files.extern' is registered already",
            ),
        ],
        ids=[
            "fact",
            "flops",
            "rule",
            "reference",
            "a number that the reference reads",
            "kernel",
            "external function",
        ],
    )
    def test_another_declaration_under_a_taken_name_is_refused(
        self, before: str, after: str, error: Any, message: str, tmp_path: Path
    ) -> None:
        nn.export_folder(FOLDER, written(tmp_path / "mine.py", LLAMA + OWN))
        assert before in OWN
        other = written(tmp_path / "mine.py", LLAMA + OWN.replace(before, after))
        with pytest.raises(error) as caught:
            nn.export_folder(FOLDER, other)
        assert caught.value.what == message

    def test_the_error_says_where_both_are(self, tmp_path: Path) -> None:
        one = written(tmp_path / "one.py", LLAMA + OWN)
        two = written(tmp_path / "two.py", LLAMA + OWN.replace("x * by * FACTOR", "x + by"))
        nn.export_folder(FOLDER, one)
        with pytest.raises(InferError) as caught:
            nn.export_folder(FOLDER, two)
        line = next(i for i, text in enumerate((LLAMA + OWN).splitlines(), 1) if text == "@scaled.reference")
        assert str(caught.value) == (
            "the op 'test_files_scaled' has another reference already\n"
            f"  declared at {one}:{line}\n  and, otherwise, at {two}:{line}\n"
            "  help: choose another name, or start the process again"
        )

    def test_a_file_that_was_changed_is_read_again(self, tmp_path: Path) -> None:
        file = written(tmp_path / "mine.py", LLAMA + OWN)
        before = nn.export_folder(FOLDER, file)
        written(
            file,
            (LLAMA + OWN).replace("def export_spec", "def whole_spec")
            + '\n\ndef export_spec(config):\n    return {"logits": whole_spec(config)["logits"]}\n',
        )
        after = nn.export_folder(FOLDER, file)
        assert [f.name for f in before.methods] == ["logits", "prefill", "decode"]
        assert [f.name for f in after.methods] == ["logits"]


def adder(n: int) -> Any:
    return lambda x: x + n


def test_code_is_the_same_only_with_what_it_reads() -> None:
    assert same_code(adder(1), adder(1))
    assert not same_code(adder(1), adder(2))
    assert not same_code(lambda x: x, lambda x, y=1: x)
    assert not same_code([].append, [].append)
    assert not same_code(len, max)


BROKEN: dict[str, tuple[str, str, list[str]]] = {
    "import": (
        "import nnfront as nn\nimport no_such_package\n",
        "ModuleNotFoundError: No module named 'no_such_package'",
        ["line 2, in module: import no_such_package"],
    ),
    "syntax": ("def build(:\n", "SyntaxError: invalid syntax", ["line 1, in the file: def build(:"]),
    "build": (
        LLAMA
        + "\n\ndef build(config):\n    return inner(config)\n\n\ndef inner(config):\n    return config.no_such_key\n",
        "AttributeError: 'Config' object has no attribute 'no_such_key'",
        ["in build: return inner(config)", "in inner: return config.no_such_key"],
    ),
    "spec": (
        LLAMA + "\n\ndef export_spec(config):\n    return {}[config.dtype]\n",
        "KeyError: 'bfloat16'",
        ["in export_spec: return {}[config.dtype]"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_goes_wrong_in_a_model_file_is_one_message_with_its_own_lines(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message, lines = BROKEN[name]
    file = written(tmp_path / "mine.py", text)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(FOLDER, model_file=file)
    error = caught.value
    assert error.what == f"the model file failed with {message}"
    assert len(error.details) == len(lines)
    for line, expected in zip(error.details, lines, strict=True):
        assert expected in line
    number = error.details[-1].split(",")[0].removeprefix("line ")
    assert error.where == f"{file}:{number}"
    assert error.__cause__ is not None  # in Python the traceback is there as well
    assert main(["run", str(FOLDER), "-p", "x", "--model", str(file)]) == 1
    assert capsys.readouterr().err == f"error: {error}\n"


def test_what_goes_wrong_while_a_method_is_traced_is_one_message_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LLAMA.replace("rope = self.rotary_emb(op.positions(tokens_BS, cache))", "cos, sin = 1")
    file = written(tmp_path / "mine.py", text)
    line = text.splitlines().index("        cos, sin = 1") + 1
    assert main(["run", str(FOLDER), "-p", "x", "--model", str(file)]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert f"{file}:{line}" in message
    assert "Traceback" not in message


def test_an_error_of_ours_in_a_model_file_stays_as_it_is(tmp_path: Path) -> None:
    file = written(
        tmp_path / "mine.py",
        LLAMA.replace("nn.RMSNorm(config.hidden_size, -1", "nn.RMSNorm(config.hidden_size + 1, -1"),
    )
    with pytest.raises(
        InferError, match=rf"(?s)rms_norm.*at model\.norm in method 'logits' \(.*{file.name}:\d+\)"
    ):
        nn.LLM.load(FOLDER, model_file=file)


ENCODER = """
from dataclasses import dataclass
from typing import Any

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.Config):
    vocab_size: int
    hidden_size: int
    dtype: str = "float32"
    unused = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "pretraining_tp"), "not this one's")


class Encoder(nn.Module):
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.dtype)

    def encode(self, tokens):
        return op.mean(self.embed_tokens(tokens), 1)

    def decode(self, tokens):
        return self.embed_tokens(tokens)


class Model(nn.Module):
    def __init__(self, config):
        self.model = Encoder(config)

    def encode(self, tokens):
        return self.model.encode(tokens)

    def decode(self, tokens):
        return self.model.decode(tokens)


def build(config):
    return Model(config)


def export_spec(config):
    tokens = {"tokens": spec.Tensor(["batch", "seq"], "int64")}
    return {"encode": tokens, "decode": tokens}


IGNORED = ("model.layers.*", "model.norm.weight")
"""


_HEAD, _TAIL = ENCODER.split("class Encoder")[0], ENCODER[ENCODER.index("IGNORED") :]
STEPS = f"""{_HEAD.replace('"max_position_embeddings", ', "").replace("hidden_size: int", "hidden_size: int; max_position_embeddings: int")}
class Steps(nn.Module):
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.dtype)

    def step(self, tokens, cache):
        return self.mix(self.embed_tokens(tokens), cache)[:, None] + self.embed_tokens(tokens)

    def mix(self, x, cache):
        total = op.cache_read(cache[0], "sum") + op.sum(x, axis=1)
        op.cache_write(cache[0], "sum", total, x.shape[1])
        return total


class Model(nn.Module):
    def __init__(self, config):
        self.model = Steps(config)
        self.vocab = config.vocab_size

    def prefill(self, tokens, cache):
        return op.broadcast_to(self.model.step(tokens, cache)[:, :, :1], (*tokens.shape, self.vocab))

METHODS

def build(config):
    return Model(config)


def export_spec(config):
    any, one, two = (spec.Tensor(["batch", n], "int64") for n in ("seq", 1, 2))
    floats = spec.Tensor(["batch", 1, config.hidden_size], "float32")
    layer = spec.Layer(per_sequence={{"sum": spec.Tensor([config.hidden_size])}})
    kept, other, fixed = (spec.State([layer], *sizes) for sizes in (("batch", "max_seq"), ("batch", "room"), ("batch", 8)))
    return SPEC


{_TAIL}"""


class TestNoLanguageModel:
    def test_loading_it_says_what_is_missing(self, tmp_path: Path) -> None:
        file = written(tmp_path / "encoder.py", ENCODER)
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(FOLDER, model_file=file)
        assert str(caught.value) == (
            f"{FOLDER} holds no language model\n"
            "  there is no method 'prefill', methods are 'encode', 'decode'\n"
            "  'decode' takes int64[batch, seq], expected tokens and a cache\n"
            "  the model file's Config has no int 'max_position_embeddings'\n"
            "  help: nnfront.compile(nnfront.export_folder(DIR)).load(nnfront.Checkpoint(DIR)) loads any model"
        )

    @pytest.mark.parametrize(
        ("spec", "methods", "lacks"),
        [
            (
                """{"prefill": {"tokens": any, "cache": kept}, "decode": {"tokens": one, "embeds": floats, "cache": kept}}""",
                """    def decode(self, tokens, embeds, cache):
        return self.model.step(tokens, cache)
""",
                [
                    "'decode' takes int64[batch, 1], float32[batch, 1, 256], "
                    "cache(layer(batch=batch, max_seq=max_seq, per_sequence={sum: float32[256]})), expected tokens and a cache"
                ],
            ),
            (
                """{"prefill": {"tokens": floats, "cache": other}, "decode": {"tokens": two, "cache": fixed}}""",
                """    def prefill(self, tokens, cache):
        return self.model.mix(tokens, cache)

    def decode(self, tokens, cache):
        return op.astype(self.model.step(tokens, cache), "int64")
""",
                [
                    "'prefill' takes tokens float32[batch, 1, 256], expected int64[batch, seq]",
                    "'prefill' takes a cache of batch x room, expected batch x max_seq",
                    "'prefill' gives float32[batch, 256], expected floats [batch, 1, 4096]",
                    "'decode' takes tokens int64[batch, 2], expected int64[batch, 1]",
                    "'decode' takes a cache of batch x 8, expected batch x max_seq",
                    "'decode' gives int64[batch, 2, 256], expected floats [batch, 1, 4096]",
                ],
            ),
        ],
        ids=["other arguments", "other types"],
    )
    def test_methods_of_the_same_names_that_are_others_are_named(
        self, spec: str, methods: str, lacks: list[str], tmp_path: Path
    ) -> None:
        text = STEPS.replace("SPEC", spec).replace("METHODS", methods)
        file = written(tmp_path / "steps.py", text)
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(FOLDER, model_file=file)
        assert caught.value.what == f"{FOLDER} holds no language model"
        assert list(caught.value.details) == lacks

    def test_it_is_exported_and_loads_as_the_help_says(self, tmp_path: Path) -> None:
        file = written(tmp_path / "encoder.py", ENCODER)
        ids = torch.tensor([[5, 6]])
        session = nn.compile(nn.export_folder(FOLDER, file)).load(nn.Checkpoint(FOLDER))
        nn.artefact.export(FOLDER, tmp_path / "out", model_file=file)
        assert torch.equal(nn.load(tmp_path / "out")["encode"](ids), session["encode"](ids))
        with pytest.raises(LoadError, match="is an artefact, but of no language model"):
            nn.LLM.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "text", "message"),
    [
        ("int8", LLAMA, "dtype is 'int8', expected one of float16, bfloat16, float32, float64"),
        ("half", LLAMA, "dtype is 'half', expected one of float16, bfloat16, float32, float64"),
        (
            "float32",
            ENCODER.replace('    dtype: str = "float32"\n', "")
            .replace('"head_dim",', '"head_dim", "dtype",')
            .replace("config.dtype", "'bfloat16'"),
            "dtype is 'float32', but the model file's Config has no field 'dtype'",
        ),
    ],
)
def test_a_dtype_that_the_model_cannot_compute_in_is_refused(
    dtype: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "mine.py", text)
    assert main(["run", str(FOLDER), "-p", "x", "--dtype", dtype, "--model", str(file)]) == 1
    assert capsys.readouterr().err.splitlines()[0] == f"error: {message}"


@pytest.fixture
def with_more(folder: Path) -> Path:
    """A folder whose checkpoint holds two tensors beside the model's."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)
    tensors["extra.bias"] = torch.ones(2)
    safetensors.torch.save_file(tensors, path)
    return folder


class TestIgnored:
    def test_what_is_left_over_is_refused_unless_named(self, with_more: Path) -> None:
        with pytest.raises(LoadError, match=r"(?s)1 unexpected.*'extra\.bias'"):
            nn.LLM.load(with_more)
        ids = torch.tensor([[5, 6]])
        expected = nn.LLM.load(FOLDER).logits(ids)
        assert torch.equal(nn.LLM.load(with_more, ignored=["extra.*"]).logits(ids), expected)

    def test_the_command_line_takes_names_everywhere_that_weights_are_read(
        self, with_more: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        commands = (
            ["run", str(with_more), "-p", "x", "-n", "1"],
            ["export", str(with_more), "-o", str(tmp_path / "out")],
            ["check", str(with_more)],
        )
        assert [main(command) for command in commands] == [1, 1, 1]
        assert [main([*command, "--ignore", "extra.bias"]) for command in commands] == [0, 0, 0]
        assert nn.LLM.load(tmp_path / "out").logits(torch.tensor([[5]])).shape == (1, 1, 4096)
        with pytest.raises(SystemExit):
            main(["show", str(with_more), "--ignore", "x"])

    def test_a_model_file_names_what_its_checkpoints_hold_besides(
        self, with_more: Path, tmp_path: Path
    ) -> None:
        text = LLAMA.replace("IGNORED = (", 'IGNORED = ("extra.bias", ')
        file = written(tmp_path / "mine.py", text)
        assert nn.LLM.load(with_more, model_file=file).logits(torch.tensor([[5]])).shape == (1, 1, 4096)
        ir = nn.export_folder(with_more, file)
        assert ir.attrs["ignored"] == ("extra.bias", "*.rotary_emb.inv_freq")
        assert nn.ir.first_difference(nn.ir.parse(str(ir)), ir) is None

    def test_one_name_in_the_place_of_several_is_refused(self, with_more: Path, tmp_path: Path) -> None:
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(with_more, ignored="extra.*")
        assert str(caught.value) == "ignored is 'extra.*', expected a list of names and patterns"
        file = written(
            tmp_path / "mine.py", LLAMA.replace('("*.rotary_emb.inv_freq",)', '("*.rotary_emb.inv_freq")')
        )
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(with_more, model_file=file)
        assert str(caught.value) == (
            f"IGNORED of the model file {file} is '*.rotary_emb.inv_freq', expected a tuple of names and patterns\n  file: {file}"
        )

    def test_a_model_file_names_prefixes_under_which_checkpoints_hold_its_weights(
        self, folder: Path, tmp_path: Path
    ) -> None:
        path = folder / "model.safetensors"
        expected = nn.LLM.load(folder).logits(torch.tensor([[5, 6]]))
        tensors = safetensors.torch.load_file(path)
        safetensors.torch.save_file({n.removeprefix("model."): t for n, t in tensors.items()}, path)
        with pytest.raises(LoadError, match=r"embed_tokens\.weight"):
            nn.LLM.load(folder)
        file = written(tmp_path / "mine.py", LLAMA + '\nPREFIXES = {"": "model."}\n')
        assert torch.equal(nn.LLM.load(folder, model_file=file).logits(torch.tensor([[5, 6]])), expected)
        assert torch.equal(nn.LLM.load(FOLDER, model_file=file).logits(torch.tensor([[5, 6]])), expected)
        written(file, LLAMA + '\nPREFIXES = "model."\n')
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(folder, model_file=file)
        assert str(caught.value) == (
            f"PREFIXES of the model file {file} is 'model.', expected a dict from a checkpoint's prefixes to the model's\n"
            f"  file: {file}"
        )

    def test_an_artefact_has_nothing_left_over(self, tmp_path: Path) -> None:
        nn.LLM.load(FOLDER).save(tmp_path / "out")
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(tmp_path / "out", ignored=["x"])
        assert (
            str(caught.value)
            == f"{tmp_path / 'out'} is an artefact: its weights are made already\n  help: leave ignored out"
        )

    @pytest.mark.parametrize("stored", ["head.weight", "tied.weight"])
    def test_a_parameter_that_no_method_reads_may_be_there_under_any_of_its_names(self, stored: str) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                self.used = nn.Linear(2, 2, bias=False)
                self.head = nn.Linear(2, 2, bias=False)
                self.tied = nn.Linear(2, 2, bias=False)
                self.tied.weight = self.head.weight

            def forward(self, x: nn.Tensor) -> nn.Tensor:
                return self.used(x)

        ir = Model().export({"forward": {"x": nn.spec.Tensor(["n", 2])}})
        weights = {"used.weight": torch.eye(2), stored: torch.ones(2, 2)}
        assert torch.equal(nn.compile(ir).load(weights)["forward"](torch.ones(1, 2)), torch.ones(1, 2))
