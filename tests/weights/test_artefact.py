# SPDX-License-Identifier: Apache-2.0
"""What is saved is what is loaded: values bit for bit, dims, layouts, shared weights; streamed and held weights make one artefact."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import (
    VARIED_SPEC,
    VARIED_WEIGHTS,
    Varied,
    outputs,
    rehash,
    varied_inputs,
    varied_session,
    weight,
)

import nnfront as nn
from nnfront import op, spec
from nnfront.artefact.save import Options
from nnfront.errors import LoadError, RunError, VerifyError

WEIGHTS = "nnfront-weights-00001-of-00001.safetensors"
LIFTS: dict[str, dict[str, Any]] = {
    "one transform": {},
    "a transform for each method": {"shared_transform": False},
    "one method lifted": {"shared_transform": ["look"]},
}


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def same_files(left: Path, right: Path) -> bool:
    names = sorted(f.name for f in left.iterdir())
    return names == sorted(f.name for f in right.iterdir()) and not any(
        filecmp.cmpfiles(left, right, names, shallow=False)[1:]
    )


@pytest.fixture(params=LIFTS)
def session(request: Any) -> nn.Session:
    return varied_session(**LIFTS[request.param])


def test_a_loaded_session_gives_the_same_bits(session: nn.Session, tmp_path: Path) -> None:
    session.save(tmp_path / "a")
    assert same(outputs(nn.load(tmp_path / "a")), outputs(session))


def test_saving_what_was_loaded_gives_the_same_files(session: nn.Session, tmp_path: Path) -> None:
    session.save(tmp_path / "a")
    nn.load(tmp_path / "a").save(tmp_path / "b")
    assert same_files(tmp_path / "a", tmp_path / "b")
    assert same(outputs(nn.load(tmp_path / "b")), outputs(session))


def test_weights_keep_their_order_in_memory(tmp_path: Path) -> None:
    session = varied_session()
    session.save(tmp_path / "a")
    loaded = nn.load(tmp_path / "a")
    strides = {name: value.stride() for name, value in session.weights.items()}
    assert {name: value.stride() for name, value in loaded.weights.items()} == strides
    assert strides["both.permute_dims"] == (1, 4)


@pytest.mark.parametrize("lift", LIFTS.values(), ids=LIFTS.keys())
def test_streaming_makes_the_files_that_a_session_makes(lift: dict[str, Any], tmp_path: Path) -> None:
    varied_session(**lift).save(tmp_path / "held")
    ir = Varied().export(VARIED_SPEC)
    ir = nn.passes.lift_transform_params(ir, **({"shared_transform": True, "allow_growth": True} | lift))
    nn.compile(ir).save(tmp_path / "streamed", VARIED_WEIGHTS)
    assert same_files(tmp_path / "held", tmp_path / "streamed")


def test_unlifted_methods_are_saved_with_their_own_weights(tmp_path: Path) -> None:
    session = nn.compile(Varied().export(VARIED_SPEC)).load(VARIED_WEIGHTS)
    session.save(tmp_path / "a")
    loaded = nn.load(tmp_path / "a")
    assert same(outputs(loaded), outputs(session))
    assert sorted(loaded.weights) == sorted(VARIED_WEIGHTS)


class Shared(nn.Module):
    """Two methods that make the same and different things of one weight."""

    def __init__(self) -> None:
        self.left, self.right = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.both = op.concat([self.left.weight, self.right.weight], dim=0)

    def one(self, x: Any) -> Any:
        return op.matmul(x, op.permute_dims(self.both))

    def two(self, x: Any) -> Any:
        return op.matmul(x + 1.0, op.permute_dims(self.both))


@pytest.mark.parametrize("is_shared", [True, False], ids=["one transform", "two transforms"])
def test_methods_share_one_set_of_weights(is_shared: bool, tmp_path: Path) -> None:
    ir = Shared().export({name: {"x": spec.Tensor(["n", 64])} for name in ("one", "two")})
    ir = nn.passes.lift_transform_params(ir, shared_transform=is_shared)
    weights = {name: weight(name, (64, 64)) for name in ("left.weight", "right.weight")}
    session = nn.compile(ir).load(weights)
    session.save(tmp_path / "a")
    data = sum(value.nbytes for value in weights.values())
    with open(tmp_path / "a" / WEIGHTS, "rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    assert (tmp_path / "a" / WEIGHTS).stat().st_size == data + header
    loaded, x = nn.load(tmp_path / "a"), weight("x", (3, 64))
    joined = torch.cat([*weights.values()]).T
    torch.testing.assert_close(loaded["one"](x), x @ joined)
    torch.testing.assert_close(loaded["two"](x), (x + 1) @ joined)


def test_a_name_that_two_transforms_use_for_different_things_is_stored_twice(tmp_path: Path) -> None:
    class Clash(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter((4, 4))

        def one(self, x: Any) -> Any:
            return x @ (self.w * 2.0)

        def two(self, x: Any) -> Any:
            return x @ (self.w * 3.0)

    ir = Clash().export({name: {"x": spec.Tensor(["n", 4])} for name in ("one", "two")})
    ir = nn.passes.lift_transform_params(ir, shared_transform=False)
    w, x = weight("w", (4, 4)), weight("x", (2, 4))
    nn.compile(ir).load({"w": w}).save(tmp_path / "a")
    loaded = nn.load(tmp_path / "a")
    torch.testing.assert_close(loaded["one"](x), x @ (w * 2))
    torch.testing.assert_close(loaded["two"](x), x @ (w * 3))
    fields = json.loads((tmp_path / "a" / "nnfront.json").read_text())
    assert fields["weights"] == {"two_transform_params": {"w.multiply": "two_transform_params.w.multiply"}}


def test_a_dim_that_only_dropped_weights_say_is_remembered(tmp_path: Path) -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter(("rows", 4))
            self.total = op.sum(self.w, axis=0)

        def forward(self, x: Any) -> Any:
            return x + self.total

    ir = Summed().export({"forward": {"x": spec.Tensor(["rows", 4])}})
    session = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(
        {"w": torch.ones(3, 4)}
    )
    session.save(tmp_path / "a")
    loaded = nn.load(tmp_path / "a")
    assert loaded["forward"](torch.zeros(3, 4)).tolist() == [[3.0] * 4] * 3
    for each in (session, loaded):
        with pytest.raises(RunError, match="'x' axis 0 is 'rows' = 2"):
            each["forward"](torch.zeros(2, 4))


def test_a_size_that_is_passed_along_comes_back_as_a_number(tmp_path: Path) -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter(("rows", 4))
            self.total = op.sum(self.w, axis=0)

        def forward(self, x: Any) -> Any:
            return x * self.w.shape[0] + self.total

    ir = Sized().export({"forward": {"x": spec.Tensor(["n", 4])}})
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    assert any(p.type == nn.ir.ScalarType("int64", nn.Dim("rows")) for p in ir["forward"].weights)
    nn.compile(ir).load({"w": torch.ones(3, 4)}).save(tmp_path / "a")
    assert nn.load(tmp_path / "a")["forward"](torch.ones(1, 4)).tolist() == [[6.0] * 4]


def test_a_model_without_weights_is_saved(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def forward(self, x: Any) -> Any:
            return x + 1.0

    nn.compile(Plain().export({"forward": {"x": spec.Tensor(["n"])}})).load({}).save(tmp_path / "a")
    assert nn.load(tmp_path / "a")["forward"](torch.zeros(2)).tolist() == [1.0, 1.0]


def test_shards_have_an_index(tmp_path: Path) -> None:
    ir = nn.passes.lift_transform_params(Varied().export(VARIED_SPEC), shared_transform=True)
    nn.compile(ir).save(tmp_path / "a", VARIED_WEIGHTS, options=Options(shard_bytes=100))
    shards = sorted(file.name for file in (tmp_path / "a").glob("*.safetensors"))
    assert shards[0] == f"nnfront-weights-00001-of-{len(shards):05}.safetensors"
    assert len(shards) > 1
    expected = nn.compile(ir).load(VARIED_WEIGHTS)
    assert same(outputs(nn.load(tmp_path / "a")), outputs(expected))


def test_updated_weights_are_what_is_saved(tmp_path: Path) -> None:
    session = varied_session()
    changed = {"table.weight": weight("other", (5, 4))}
    session.update(changed)
    session.save(tmp_path / "a")
    ir = nn.passes.lift_transform_params(Varied().export(VARIED_SPEC), shared_transform=True)
    expected = nn.compile(ir).load(VARIED_WEIGHTS | changed)
    torch.testing.assert_close(outputs(nn.load(tmp_path / "a")), outputs(expected))


def test_text_names_the_authors_files_without_their_folders(tmp_path: Path) -> None:
    varied_session().save(tmp_path / "a")
    text = (tmp_path / "a" / "program.nnir").read_text()
    assert "# at artefact_cases.py:" in text
    assert str(Path(__file__).parent) not in text


def test_mapped_weights_are_not_read(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter((4096, 4096))

        def forward(self, x: Any) -> Any:
            return x @ self.w

    ir = Large().export({"forward": {"x": spec.Tensor(["n", 4096])}})
    nn.compile(ir).load({"w": torch.ones(4096, 4096)}).save(tmp_path / "a")
    script = (
        "import sys, nnfront as nn, torch\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "from nnfront.artefact.loader import load; before = resident()\n"
        "session = load(sys.argv[1], verify=False); print(resident() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 32 << 20  # the weight has 64 MB, what is imported up to 10


def test_a_method_of_a_plugin_says_what_is_missing(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Any) -> Any:
            return op.extern("tests.artefact.scale", [x, 2.0], nn.Tensor.placeholder(("n",), "float32"))

    nn.compile(Scaled().export({"forward": {"x": spec.Tensor(["n"])}})).load({}).save(tmp_path / "a")
    loaded = nn.load(tmp_path / "a")
    with pytest.raises(RunError, match=r"no external function is called 'tests\.artefact\.scale'"):
        loaded["forward"](torch.ones(1))
    nn.register_extern("tests.artefact.scale", lambda x, k: x * k)
    assert loaded["forward"](torch.ones(1)).tolist() == [2.0]


def test_an_op_that_is_not_installed_is_named(tmp_path: Path) -> None:
    varied_session().save(tmp_path / "a")
    program = tmp_path / "a" / "program.nnir"
    program.write_text(program.read_text().replace("= silu(", "= my_silu("))
    rehash(tmp_path / "a")
    with pytest.raises(LoadError, match="there is no op 'my_silu'") as error:
        nn.load(tmp_path / "a")
    assert error.value.help == "import the module that declares it"


def test_a_session_without_its_ir_cannot_be_saved(tmp_path: Path) -> None:
    whole = varied_session()
    bare = nn.Session(whole.program, {}, {"transform_params": whole.weights})
    with pytest.raises(LoadError) as error:
        bare.save(tmp_path / "a")
    assert str(error.value) == (
        "this session was made without its IR, so it cannot be saved\n"
        "  help: make it with nnfront.compile(ir).load(...)"
    )


def test_an_artefact_is_no_checkpoint(tmp_path: Path) -> None:
    varied_session().save(tmp_path / "a")
    with pytest.raises(LoadError) as error:
        nn.Checkpoint(tmp_path / "a")
    assert str(error.value) == (
        f"{tmp_path / 'a'} is an nnfront artefact: its weights are not a checkpoint's any more\n"
        "  help: nnfront.load(DIR) gives its session"
    )


def test_calls_of_a_loaded_session_are_checked_as_ever(tmp_path: Path) -> None:
    varied_session().save(tmp_path / "a")
    loaded = nn.load(tmp_path / "a")
    ids, flag = varied_inputs()["look"]
    with pytest.raises(RunError, match="argument 'ids' is float32, expected int64"):
        loaded["look"](ids.float(), flag)


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    ir = nn.ir.parse("def forward[n](x: input float32[n]) -> float32[n] { y: float32[n] = silu(x) return y }")
    session = nn.compile(ir).load({})
    wrong = nn.ir.parse(str(ir).replace("silu(x)", "sum(x, axis=0)"))
    bad = nn.Session(session.program, {}, ir=wrong)
    with pytest.raises(VerifyError, match="V"):
        bad.save(tmp_path / "a")
    assert not (tmp_path / "a").exists()
