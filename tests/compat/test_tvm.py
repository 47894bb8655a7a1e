# SPDX-License-Identifier: Apache-2.0
"""TVM's names and parameters, as TVM itself declares them; a model file of another import line; what cannot be had says so."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nnfront
import nnfront.compat.tvm as relax_nn
import nnfront.compat.tvm.llm.kv_cache
from nnfront.compat.tvm import absent, core, lambdas, llm, modules, nn, op, spec
from nnfront.errors import DimError, NnfrontError, SpecError, WrongUse

# Constructor arguments and parameters in which nnfront's class has another, or one more at the end.
_OTHERWISE = {
    ("LayerNorm", "__init__"),
    ("RMSNorm", "__init__"),
    ("Object", "__init__"),
    ("Tensor", "__init__"),
    ("Module", "state_dict"),
    ("Module", "load_state_dict"),
    ("Module", "jit"),
    ("ModuleDict", "__init__"),
    ("ModuleDict", "pop"),
    ("ModuleDict", "update"),
    ("ModuleList", "append"),
    ("ParameterDict", "__init__"),
    ("ParameterDict", "pop"),
    ("ParameterDict", "update"),
    ("ParameterList", "__init__"),
    ("ParameterList", "append"),
    ("ParameterList", "extend"),
}
_NOT_THERE = {
    ("Tensor", "from_ty"),
    ("Effect", "emit_init"),
    ("Effect", "create"),
    ("Effect", "set_state"),
    ("Effect", "finalize"),
    ("Effect", "to"),
}


def declared(file: str) -> list[ast.stmt]:
    """The public functions and classes of a file of TVM's frontend, read without importing it."""
    found = importlib.util.find_spec("tvm")
    assert found is not None, "apache-tvm is one of the dev extra"
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], "relax", "frontend", "nn", file)
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return [
        n
        for n in body
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.ImportFrom))
        and not getattr(n, "name", "").startswith("_")
    ]


def parameters(function: ast.FunctionDef) -> list[str]:
    args = function.args
    named = [a.arg for a in (*args.posonlyargs, *args.args)]
    return named + ([args.vararg.arg] if args.vararg else []) + [a.arg for a in args.kwonlyargs]


def test_every_op_of_tvm_is_here_with_its_parameters() -> None:
    functions = [n for n in declared("op.py") if isinstance(n, ast.FunctionDef)]
    assert len(functions) > 70
    for function in functions:
        ours = getattr(op, function.name)
        if function.name != "print_":  # takes several tensors and a format as well
            assert list(inspect.signature(ours).parameters) == parameters(function), function.name
        assert getattr(nn, function.name) is ours


def test_every_name_that_tvm_imports_into_its_frontend_is_here() -> None:
    imports = [n for n in declared("__init__.py") if isinstance(n, ast.ImportFrom)]
    names = [alias.name for n in imports for alias in n.names if alias.name != "*"]
    assert len(names) > 30
    assert [name for name in names if not hasattr(relax_nn, name)] == []
    assert relax_nn is nn


@pytest.mark.parametrize(
    ("file", "room"),
    [("core.py", core), ("modules.py", modules), ("spec.py", spec), ("llm/kv_cache.py", llm.kv_cache)],
    ids=["core", "modules", "spec", "kv_cache"],
)
def test_methods_take_the_parameters_of_tvms(file: str, room: ModuleType) -> None:
    absent = {"TimestepEmbedding", "Timesteps", "Attention", "FlashInferPagedKVCache", "TIRPagedKVCache"}
    compared = 0
    for cls in (n for n in declared(file) if isinstance(n, ast.ClassDef) and n.name not in absent):
        ours = getattr(room, cls.name)
        for method in (n for n in cls.body if isinstance(n, ast.FunctionDef)):
            place = (cls.name, method.name)
            if method.name.startswith("_") and method.name != "__init__":
                continue
            if any(
                isinstance(d, (ast.Name, ast.Attribute)) and "property" in ast.unparse(d)
                for d in method.decorator_list
            ):
                continue
            if issubclass(ours, (modules.KVCache, modules.IOEffect)) or "setter" in str(
                map(ast.unparse, method.decorator_list)
            ):
                continue
            if method.name == "data" or place in _OTHERWISE:
                continue
            assert hasattr(ours, method.name) is (place not in _NOT_THERE), place
            if place not in _NOT_THERE:
                theirs = [p for p in parameters(method) if p != "self"]
                mine = [p for p in inspect.signature(getattr(ours, method.name)).parameters if p != "self"]
                assert mine == theirs, place
                compared += 1
    assert compared >= 4


class Model(nn.Module):
    def __init__(self) -> None:
        self.linear = nn.Linear(4, 6, bias=False)
        self.norm = nn.RMSNorm(4, -1, 1e-5, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        a, b = op.split(self.linear(self.norm(x)), 2, axis=-1, name="halves")
        return nn.softmax(nn.silu(a) * nn.gelu(b), axis=-1, name="out")


def test_a_model_ports_by_its_import_line_and_computes_what_torch_does() -> None:
    model, x, weight = Model(), torch.randn(3, 4), torch.randn(6, 4)
    one = spec.MethodSpec(model.forward, ["x"], [spec.Tensor(["n", 4], "float32")], "packed", "none")
    ir, named, externs = model.export_tvm(spec.ModuleSpec(model, ["forward"], [one]), allow_extern=True)
    assert [name for name, _ in named] == ["linear.weight", "norm.weight"]
    assert externs == []
    state = {"linear.weight": weight, "norm.weight": torch.ones(4)}
    got = nnfront.compile(ir).load(state)["forward"](x)
    a, b = (torch.nn.functional.rms_norm(x, (4,), eps=1e-5) @ weight.T).chunk(2, -1)
    expected = torch.softmax(torch.nn.functional.silu(a) * torch.nn.functional.gelu(b), -1)
    torch.testing.assert_close(got, expected)
    assert isinstance(model.linear, nn.Module)
    assert not isinstance(model.linear, Model)


def test_the_name_of_an_op_may_be_given_by_position() -> None:
    x = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(op.add(x, x, "twice"), 2 * x)
    with pytest.raises(NnfrontError, match="too many positional"):
        op.add(x, x, "twice", "thrice")


@pytest.mark.parametrize(
    ("mode", "torchs"), [("linear", "bilinear"), ("cubic", "bicubic"), ("bilinear", "bilinear")]
)
def test_modes_of_interpolate_are_of_two_axes(mode: str, torchs: str) -> None:
    x = torch.randn(1, 2, 4, 4)
    got = op.interpolate(x, size=(8, 8), mode=mode, align_corners=False)
    torch.testing.assert_close(
        got, torch.nn.functional.interpolate(x, (8, 8), mode=torchs, align_corners=False)
    )


class Asks(nn.Module):
    """Compares a size as a ported file does."""

    def __init__(self, value: int = 1) -> None:
        self.value = value

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x if x.shape[0] == self.value else nn.op.negative(x)


def test_a_dim_compared_with_1_is_answered_no_and_every_call_checks_that() -> None:
    ir = Asks().export({"forward": {"x": spec.Tensor(["n"], "float32")}})
    assert "n: 2.." in str(ir)
    session = nnfront.compile(ir).load({})
    torch.testing.assert_close(session["forward"](torch.ones(2)), -torch.ones(2))
    with pytest.raises(NnfrontError, match="at least 2"):
        session["forward"](torch.ones(1))


def test_a_size_that_is_known_decides_a_comparison_and_assumes_nothing() -> None:
    assert (
        "n"
        not in str(Asks(4).export({"forward": {"x": spec.Tensor([4], "float32")}}))
        .split("->")[0]
        .split("(")[0]
        .split("forward")[1]
    )
    wide = nnfront.Dim("n", min=3)
    assert "n: 3.." in str(Asks().export({"forward": {"x": spec.Tensor([wide], "float32")}}))


def test_the_greatest_value_of_a_dim_is_assumed_away_as_well() -> None:
    ir = Asks(8).export({"forward": {"x": spec.Tensor([nnfront.Dim("n", max=8)], "float32")}})
    assert "n: ..7" in str(ir) or "n: 0..7" in str(ir)


def test_a_comparison_that_no_range_answers_stays_an_error() -> None:
    with pytest.raises(DimError, match="cannot decide whether n == 5"):
        Asks(5).export({"forward": {"x": spec.Tensor(["n"], "float32")}})


def test_the_main_face_assumes_nothing() -> None:
    class Strict(nnfront.Module):
        def forward(self, x: Any) -> Any:
            return x if x.shape[0] == 1 else -x

    with pytest.raises(DimError, match="cannot decide whether n == 1"):
        Strict().export({"forward": {"x": nnfront.spec.Tensor(["n"])}})


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda: op.debug_func("f", 1), "op.print_(x)"),
        (lambda: op.ccl_allreduce(None), "tensor_parallel_shards = 1"),
        (lambda: nn.wrap_nested(3, "x"), "op.extern(name, args, out)"),
        (lambda: nn.KVCache(8, [2, 4]), "spec.Cache(layers, ...)"),
        (lambda: nn.IOEffect(), "op.print_(x)"),
        (lambda: nn.SourceModule({}, ""), "nnfront.register_extern"),
        (lambda: nn.add_extern(None), "nnfront.register_extern"),
        (lambda: Model().jit({}), "nnfront.compile(module.export(spec))"),
    ],
)
def test_what_cannot_be_had_says_what_to_write(use: Any, says: str) -> None:
    with pytest.raises(WrongUse) as caught:
        use()
    assert says in caught.value.help
    assert "test_tvm.py" in caught.value.where


class LastToken(nn.Module):
    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.tensor_expr_op(lambda x: x.no_such_thing, name_hint="last_of_seq", args=[x])


def test_a_lambda_is_written_anew_beside_a_file_that_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lambdas, "_WRITTEN", {})
    monkeypatch.setattr(absent, "find_spec", lambda name: None)
    given = {"forward": {"x": spec.Tensor(["b", "s", 2], "float32")}}
    with pytest.raises(WrongUse, match="tensor_expr_op 'last_of_seq': lambdas over TE and TIR") as caught:
        LastToken().export(given)
    assert "register_lambda('last_of_seq', function of tensors)" in caught.value.help
    nn.register_lambda("last_of_seq", lambda x: x[:, -1:])
    x = torch.randn(2, 3, 2)
    torch.testing.assert_close(nnfront.compile(LastToken().export(given)).load({})["forward"](x), x[:, -1:])


def test_names_and_specs_of_different_number_are_an_error() -> None:
    with pytest.raises(SpecError, match="ModuleSpec: 1 names and 0 specs"):
        spec.ModuleSpec(Model(), ["forward"], [])
    with pytest.raises(SpecError, match="MethodSpec: 2 names and 1 specs"):
        spec.MethodSpec(Model().forward, ["x", "y"], [spec.Tensor([4], "float32")], "plain", "none")


def test_specs_are_read_off_torch_tensors() -> None:
    read = spec.MethodSpec.from_torch([torch.ones(2, 4)], Model().forward)
    assert str(read.arguments["x"]) == "Tensor([2, 4], 'float32')"


def test_results_of_ops_need_no_wrapping() -> None:
    x = nn.Tensor.from_const([1.0])
    pair = (x, x)
    assert nn.wrap_nested(pair, "pair") is pair


class Cached(nn.Module):
    """Layers that hand an opaque cache on, as language models of TVM do."""

    def __init__(self) -> None:
        self.layers = nn.ModuleList([Attends() for _ in range(2)])

    def forward(
        self, x: nn.Tensor, cache: llm.kv_cache.PagedKVCache
    ) -> tuple[nn.Tensor, llm.kv_cache.PagedKVCache]:
        for i, layer in enumerate(self.layers):
            x = layer(x, cache, i)
        return x, cache


class Attends(nn.Module):
    def __init__(self) -> None:
        self.qkv = nn.Linear(4, 12, bias=False)

    def forward(self, x: nn.Tensor, cache: llm.kv_cache.PagedKVCache, layer: int) -> nn.Tensor:
        b, s, _ = x.shape
        qkv = op.reshape(self.qkv(x), (b, s, 6, 2))
        return x + op.reshape(cache.attention_with_fused_qkv(layer, qkv, 2, sm_scale=0.5), (b, s, 4))


def test_a_paged_cache_is_external_functions_of_its_methods() -> None:
    model = Cached()
    given = {
        "x": spec.Tensor(["b", "s", 4], "float32"),
        "cache": spec.Object(object_type=llm.kv_cache.PagedKVCache),
    }
    ir = model.export({"forward": given})
    seen: list[tuple[Any, int, float]] = []

    def attend(cache: Any, layer: int, scale: float, qkv: torch.Tensor) -> torch.Tensor:
        seen.append((cache, layer, scale))
        return qkv[:, 4:]

    nnfront.register_extern("vm.builtin.attention_kv_cache_attention_with_fused_qkv", attend)
    state = {name: torch.randn(12, 4) for name, _ in model.named_parameters()}
    x, cache = torch.randn(2, 3, 4), object()
    got, same = nnfront.compile(ir).load(state)["forward"](x, cache)
    for weight in state.values():
        x = x + (x @ weight.T)[..., 8:]
    torch.testing.assert_close(got, x)
    assert same is cache
    assert seen == [(cache, 0, 0.5), (cache, 1, 0.5)]


class PutsBack(nn.Module):
    """Assigns what an attribute holds already, as a context manager does that may change it for a while."""

    def __init__(self) -> None:
        self.linear = nn.Linear(4, 4)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        bias = self.linear.bias
        x = self.linear(x)
        self.linear.bias = bias
        return x


def test_assigning_what_is_there_changes_nothing_and_is_allowed() -> None:
    assert "linear.bias" in str(PutsBack().export({"forward": {"x": spec.Tensor([4], "float32")}}))


def test_gelu_is_exact_unless_it_is_told_tanh() -> None:
    x = torch.linspace(-3, 3, 11)
    for approximate, ours in ((None, "none"), (True, "none"), ("tanh", "tanh")):
        expected = torch.nn.functional.gelu(x, approximate=ours)
        torch.testing.assert_close(nnfront.eager(lambda x, a=approximate: op.gelu(x, a), x), expected)
        torch.testing.assert_close(
            nnfront.eager(lambda x, a=approximate: nn.gelu(x, approximate=a), x), expected
        )


def test_integers_are_resized_too() -> None:
    pixels = torch.randint(0, 256, (1, 3, 5, 7), dtype=torch.uint8)
    expected = torch.nn.functional.interpolate(pixels.float(), (9, 4), mode="bilinear").to(torch.uint8)
    got = nnfront.eager(lambda x: op.interpolate(x, (9, 4), data_layout="NCHW", mode="linear"), pixels)
    assert got.dtype == torch.uint8
    assert (got.int() - expected.int()).abs().max() <= 1
