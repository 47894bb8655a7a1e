# SPDX-License-Identifier: Apache-2.0
"""Models and checkpoints that contradict themselves or each other: one error each, which names both sides."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError, TraceError, VerifyError


class Model(nn.Module):
    def __init__(self):
        self.q, self.k = (nn.Linear(8, 8, bias=False) for _ in "qk")
        self.qk = op.concat([self.q.weight, self.k.weight], dim=0)

    def forward(self, x):
        return op.linear(x, self.qk)


def executable():
    ir = Model().export({"forward": {"x": spec.Tensor(["n", 8], "float32")}})
    return nn.compile(nn.passes.lift_transform_params(ir))


def good() -> dict[str, torch.Tensor]:
    return {f"{n}.weight": torch.randn(8, 8) for n in "qk"}


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [("float64", True), ("float16", True), ("float8_e4m3fn", False), ("float8_e5m2", False), ("int32", False), ("uint8", False), ("bool", False)],
)  # fmt: skip
def test_a_dtype_that_the_model_did_not_ask_for(tmp_path: Path, dtype: str, advice: bool):
    save_file(
        good() | {"k.weight": torch.ones(8, 8).to(getattr(torch, dtype))}, tmp_path / "model.safetensors"
    )
    for options in ({}, {"cache": tmp_path / "cache"}):
        with pytest.raises(LoadError) as error:
            executable().load(nn.Checkpoint(tmp_path), **options)
        assert str(error.value) == (
            "the checkpoint does not fit the model: 1 of another dtype\n"
            f"  dtype: 'k.weight': {dtype}[8, 8], expected float32[8, 8]\n"
            f"  at {tmp_path}"
            + (
                "\n  help: load with cast=True, or LLM.load with dtype=..., to convert while loading"
                if advice
                else ""
            )
        )
    if advice:
        executable().load(nn.Checkpoint(tmp_path), cast=True)


def test_methods_that_want_one_weight_in_two_types():
    method = "def {name}(x: input {type}, w: weight {type}) -> {type} {{ y: {type} = add(x, w) return y }}"
    for other in ("float32[5]", "float16[4]", "float32[4, 1]"):
        text = "\n".join(method.format(name=n, type=t) for n, t in (("a", "float32[4]"), ("b", other)))
        with pytest.raises(VerifyError) as error:
            nn.compile(nn.ir.parse(text))
        assert str(error.value) == f"V21: the weight 'w' has two types\n  in a float32[4]\n  in b {other}"


@pytest.mark.parametrize("first", ["parameter", "path"])
def test_two_parameters_that_claim_one_name(first: str):
    class Twice(nn.Module):
        def __init__(self):
            parts = [("b.c", nn.Parameter((4,))), ("b", {"c": nn.Parameter((5,))})]
            self.a = dict(parts if first == "parameter" else parts[::-1])

        def forward(self, x):
            return x + op.sum(self.a["b.c"]) + op.sum(self.a["b"]["c"])

    with pytest.raises(TraceError) as error:
        Twice().export({"forward": {"x": spec.Tensor([3], "float32")}})
    shapes = (4, 5) if first == "parameter" else (5, 4)
    assert error.value.what == "two parameters have the checkpoint name 'a.b.c'"
    assert error.value.details == (f"<Parameter float32[{shapes[0]}]> and <Parameter float32[{shapes[1]}]>",)
    assert error.value.help.endswith("with a dot in it reads like a path: rename it")


def test_a_tied_name_that_another_parameter_has():
    class Twice(nn.Module):
        def __init__(self):
            self.one = nn.Parameter((4,))
            self.a = {"b": {"c": self.one}, "b.c": nn.Parameter((5,))}

        def forward(self, x):
            return x + op.sum(self.one)

    with pytest.raises(TraceError, match=r"two parameters have the checkpoint name 'a\.b\.c'"):
        Twice().export({"forward": {"x": spec.Tensor([3], "float32")}})


def test_one_parameter_under_one_name_twice_is_no_clash():
    class Once(nn.Module):
        def __init__(self):
            w = nn.Parameter((3,))
            self.first = w
            self.a = {"b": {"c": w}, "b.c": w}

        def forward(self, x):
            return x + self.first

    ir = Once().export({"forward": {"x": spec.Tensor([3], "float32")}})
    assert torch.equal(
        nn.compile(ir).load({"a.b.c": torch.ones(3)})["forward"](torch.ones(3)), torch.full((3,), 2.0)
    )


class TestShards:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for name in "qk":
            save_file({f"{name}.weight": torch.randn(8, 8)}, tmp_path / f"{name}.safetensors")
        index = {"weight_map": {f"{name}.weight": f"{name}.safetensors" for name in "qk"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        executable().load(nn.Checkpoint(tmp_path))
        return tmp_path

    def error(self, folder: Path) -> str:
        with pytest.raises(LoadError) as error:
            executable().load(nn.Checkpoint(folder))
        return str(error.value)

    def test_a_truncated_shard(self, folder: Path):
        file = folder / "k.safetensors"
        size = file.stat().st_size
        with open(file, "r+b") as stream:
            stream.truncate(size - 1)
        assert self.error(folder) == (
            f"{folder}: the checkpoint is broken\n"
            f"  k.safetensors: the file is truncated: {size - 1} bytes, but the header describes {size}"
        )

    def test_a_name_in_two_shards(self, folder: Path):
        save_file({name: torch.randn(8, 8) for name in ("k.weight", "q.weight")}, folder / "k.safetensors")
        text = self.error(folder)
        assert (
            "k.safetensors: tensor 'q.weight' is in" in text
            or "q.safetensors: tensor 'q.weight' is in" in text
        )

    def test_an_index_that_places_a_tensor_elsewhere(self, folder: Path):
        index = {"weight_map": {"q.weight": "k.safetensors", "k.weight": "q.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert self.error(folder) == (
            f"{folder}: the checkpoint is broken\n"
            "  q.safetensors: has tensor 'q.weight', which the index places in k.safetensors\n"
            "  k.safetensors: has tensor 'k.weight', which the index places in q.safetensors"
        )

    def test_an_index_that_names_what_is_not_there(self, folder: Path):
        index = {"weight_map": {"q.weight": "q.safetensors", "k.weight": "gone.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "it names 'gone.safetensors', which is not in this folder" in self.error(folder)


def test_ties_that_differ_name_both(tmp_path: Path):
    class Tied(nn.Module):
        def __init__(self):
            self.one, self.two = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    exe = nn.compile(Tied().export({"forward": {"x": spec.Tensor(["n", 8], "float32")}}))
    save_file({f"{n}.weight": torch.randn(8, 8) for n in ("one", "two")}, tmp_path / "model.safetensors")
    text = re.escape("'one.weight' and 'two.weight' are tied in the model, but their bytes differ")
    with pytest.raises(LoadError, match=text):
        exe.load(nn.Checkpoint(tmp_path))
    save_file(
        {"one.weight": torch.randn(8, 8), "two.weight": torch.randn(8, 4)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(
        LoadError,
        match=r"'two.weight': float32\[8, 4\], but 'one.weight' is float32\[8, 8\] and both are one weight",
    ):
        exe.load(nn.Checkpoint(tmp_path))
