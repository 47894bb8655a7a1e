# SPDX-License-Identifier: Apache-2.0
"""compile, load, transform_params, bind, explain: weights in, numbers out, and no wrong number for wrong weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.compiler import TransformedWeights, check, compile
from nnfront.errors import LoadError, LowerError
from nnfront.ir import parse
from nnfront.lower import Branch, Run


class Mlp(nn.Module):
    """Square weights, so that a raw weight would fit where a transformed one belongs."""

    def __init__(self):
        self.gate = nn.Linear(4, 4, bias=False)
        self.up = nn.Linear(4, 4, bias=False)
        self.both = op.concat([self.gate.weight, self.up.weight], dim=0)
        self.turned = op.permute_dims(self.gate.weight) * 2.0

    def forward(self, x):
        gate, up = op.split(op.matmul(x, op.permute_dims(self.both)), 2, axis=-1)
        return op.matmul(op.silu(gate) * up, self.turned)

    def raw(self, x):
        return self.up(x)


SPEC = {
    "forward": {"x": spec.Tensor(["batch", 4], "float32")},
    "raw": {"x": spec.Tensor(["batch", 4], "float32")},
}


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"gate.weight": torch.randn(4, 4), "up.weight": torch.randn(4, 4)}


def by_hand(w, x):
    gate, up = x @ w["gate.weight"].T, x @ w["up.weight"].T
    return (torch.nn.functional.silu(gate) * up) @ (2.0 * w["gate.weight"].T)


def unlifted():
    return Mlp().export(SPEC)


def lifted(shared=True):
    return nn.passes.lift_transform_params(unlifted(), shared_transform=shared)


@pytest.mark.parametrize("ir", [unlifted, lifted, lambda: lifted(False), lambda: lifted(["forward"])])
def test_lifted_or_not_a_method_computes_the_same(ir):
    session, w, x = compile(ir()).load(weights()), weights(), torch.randn(3, 4)
    torch.testing.assert_close(session["forward"](x), by_hand(w, x))
    torch.testing.assert_close(session["raw"](x), x @ w["up.weight"].T)


def test_a_checkpoint_file_loads_like_a_dict(tmp_path):
    save_file(weights(), tmp_path / "model.safetensors")
    x = torch.randn(3, 4)
    session = compile(lifted()).load(nn.Checkpoint(tmp_path))
    torch.testing.assert_close(session["forward"](x), by_hand(weights(), x))


def test_transform_params_returns_its_results_by_name():
    w = weights()
    results = compile(lifted(["forward"])).transform_params(w)
    assert len(results) == 2
    assert torch.equal(results["turned"], 2.0 * w["gate.weight"].T)
    (other,) = (tensor for name, tensor in results.items() if name != "turned")
    assert torch.equal(other, torch.cat([w["gate.weight"], w["up.weight"]]).T)


def test_several_transforms_give_a_dict_each():
    results = compile(lifted(False)).transform_params(weights())
    assert list(results) == ["forward_transform_params", "raw_transform_params"]


@pytest.mark.parametrize("shared", [True, False])
def test_transformed_weights_are_bound_without_running_the_transform_again(shared):
    exe, x = compile(lifted(shared)), torch.randn(3, 4)
    session = exe.bind(exe.transform_params(weights()))
    torch.testing.assert_close(session["forward"](x), by_hand(weights(), x))


def test_raw_weights_in_the_place_of_transformed_ones_are_refused():
    with pytest.raises(LoadError, match="these are not transformed weights"):
        compile(lifted()).bind(weights())


@pytest.mark.parametrize("call", ["load", "transform_params"])
def test_transformed_weights_in_the_place_of_raw_ones_are_refused(call):
    exe = compile(lifted())
    with pytest.raises(LoadError, match="these weights are transformed already"):
        getattr(exe, call)(exe.transform_params(weights()))


@pytest.mark.parametrize("call", ["load", "transform_params"])
def test_a_plain_dict_of_transformed_weights_is_refused_by_its_names(call):
    exe = compile(lifted())
    with pytest.raises(LoadError, match="the checkpoint does not fit the model"):
        getattr(exe, call)(dict(exe.transform_params(weights())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other.weight": torch.zeros(1)}, "unexpected: 'other.weight': float32[1]"),
        ({"up.weight": torch.zeros(4, 3)}, "shape: 'up.weight': float32[4, 3], expected float32[4, 4]"),
        (
            {"up.weight": torch.zeros(4, 4).half()},
            "dtype: 'up.weight': float16[4, 4], expected float32[4, 4]",
        ),
        ({"gate.weight": None}, "missing: 'gate.weight': float32[4, 4], needed by forward"),
    ],
)
def test_weights_that_do_not_fit_are_all_listed_before_anything_runs(change, message):
    given = {name: tensor for name, tensor in (weights() | change).items() if tensor is not None}
    with pytest.raises(LoadError) as caught:
        compile(lifted()).load(given)
    assert message in caught.value.details


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "weight 'up.weight' is a list, not a torch tensor"),
        (torch.zeros(4, 4, device="meta"), "weight 'up.weight' is on meta, not on the CPU"),
    ],
)
def test_what_is_no_tensor_on_the_cpu_is_refused(value, message):
    with pytest.raises(LoadError, match=message):
        compile(lifted()).load(weights() | {"up.weight": value})


def test_tensors_that_may_be_left_over_are_named():
    given = weights() | {"a.inv_freq": torch.zeros(1)}
    session = compile(lifted()).load(given, ignored=["*.inv_freq"])
    assert "a.inv_freq" not in session.weights


def test_floats_are_converted_only_if_asked_for():
    half = {name: tensor.half() for name, tensor in weights().items()}
    x = torch.randn(3, 4)
    session = compile(lifted()).load(half, cast=True)
    expected = by_hand({name: tensor.float() for name, tensor in half.items()}, x)
    torch.testing.assert_close(session["forward"](x), expected)


def test_weights_that_are_bound_must_be_all_there_and_of_their_type():
    exe = compile(lifted(["forward"]))
    results = exe.transform_params(weights())
    name = min(results, key=lambda n: results[n].numel())
    with pytest.raises(LoadError, match=f"forward: transformed '{name}' has no value"):
        exe.bind(TransformedWeights({n: t for n, t in results.items() if n != name}), weights())
    with pytest.raises(LoadError, match=r"is float64\[4, 4\], expected float32\[4, 4\]"):
        exe.bind(TransformedWeights({**results, name: results[name].double()}), weights())
    with pytest.raises(LoadError, match=r"raw: weight 'up.weight' has no value"):
        exe.bind(results)


def test_a_tied_weight_may_be_stored_under_either_name():
    class Tied(nn.Module):
        def __init__(self):
            self.embed = nn.Embedding(6, 4)
            self.head = nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, i):
            return self.head(self.embed(i))

    exe = compile(Tied().export({"forward": {"i": spec.Tensor(["n"], "int64")}}))
    w, i = torch.randn(6, 4), torch.tensor([2, 5])
    for given in ({"embed.weight": w}, {"head.weight": w}, {"embed.weight": w, "head.weight": w.clone()}):
        torch.testing.assert_close(exe.load(given)["forward"](i), w[i] @ w.T)
    with pytest.raises(LoadError, match="the checkpoint holds two values for one weight"):
        exe.load({"embed.weight": w, "head.weight": w + 1})


def test_a_module_without_a_transform_has_none_to_run():
    with pytest.raises(LoadError, match="this module has no weight transform"):
        compile(unlifted()).transform_params(weights())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "tpu",
            "unknown target 'tpu'\n  help: targets are 'cpu', 'cuda', 'cuda:sm_80', 'cuda:sm_86', 'cuda:sm_89', 'cuda:sm_90', 'cuda:sm_100', 'cuda:sm_103', 'cuda:sm_120'",
        ),
        ("cuda:sm_70", "unknown target 'cuda:sm_70'"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target, message):
    with pytest.raises(LowerError, match=message):
        compile(unlifted(), target)


@pytest.mark.parametrize("target", ["cuda", "cuda:sm_90"])
def test_a_program_for_cuda_is_made_anywhere_and_loaded_on_a_gpu(target, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    executable = compile(unlifted(), target)
    assert executable.target == target
    with pytest.raises(LoadError) as caught:
        executable.load(weights())
    assert str(caught.value) == (
        f"target {target!r} needs a GPU, and torch finds none\n"
        f"  torch {torch.__version__} is built without CUDA: no GPU is found whatever is there\n"
        "  help: compile for 'cpu'; TRITON_INTERPRET=1, set before the start, runs the kernels without a GPU, slowly"
    )


def test_a_dim_that_only_the_checkpoint_knows_binds_calls_too():
    """`vocab` is in no weight that methods read: the transform sums over it."""
    ir = parse("""
    transform def transform_params[vocab](w: weight float32[vocab, 4]) -> {total: float32[4]} {
        total: float32[4] = sum(w, axis=(0,))
        results: {total: float32[4]} = {total: total}
        return results
    }
    def main[vocab](x: input float32[vocab, 4], total: transformed float32[4]) -> float32[vocab, 4] attrs(transform="transform_params") {
        y: float32[vocab, 4] = multiply(x, total)
        return y
    }
    """)
    w = torch.randn(5, 4)
    run = compile(ir).load({"w": w})["main"]
    torch.testing.assert_close(run(torch.ones(5, 4)), w.sum(0).expand(5, 4))
    message = "main: argument 'x' axis 0 is 'vocab' = 6, but the weights already said 'vocab' = 5"
    with pytest.raises(nn.errors.RunError, match=message):
        run(torch.ones(6, 4))


def test_explain_lists_transforms_and_methods():
    text = compile(lifted(["forward"])).explain(batch=2)
    assert text.splitlines()[0].split() == ["method", "op", "kernel", "bytes", "flops", "module", "why"]
    *rows, of_forward, of_raw, last = text.splitlines()[1:]
    assert {line.split()[0] for line in rows} == {"transform_params", "forward", "raw"}
    assert [of_forward.split(":")[0], of_raw.split(":")[0]] == ["forward", "raw"]
    assert last.startswith("kernels in C: ")
    assert repr(compile(lifted())) == "<Executable for cpu: forward, raw>"


def test_progress_is_told_to_the_end():
    seen = []
    compile(lifted(["forward"])).load(weights(), progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert {total for _, total in seen} == {len(seen)}


def test_checking_a_module_says_what_checking_the_compiled_one_says():
    folder = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
    module = nn.passes.lift_transform_params(nn.export_folder(folder), shared_transform=True)
    checkpoint = nn.Checkpoint(folder, headers_only=True)
    assert check(module, checkpoint).json() == nn.compile(module).check(checkpoint).json()
    assert (
        check(module, checkpoint, ignored=["x"]).text()
        == compile(module).check(checkpoint, ignored=["x"]).text()
    )


class Masked(nn.Module):
    """Attention whose mask the caller gives, with a cast that changes nothing and a sum that is computed twice."""

    def __init__(self):
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x, mask):
        q = op.reshape(self.proj(x), (*x.shape[:2], 1, 8))
        q = op.astype(q, "float32")
        q = (q + 1.0) * (q + 1.0)  # the author's line
        return op.scaled_dot_product_attention(q, q, q, mask)


def masked(*cases):
    arguments = {"x": spec.Tensor(["batch", "seq", 8]), "mask": spec.Tensor(["seq", "seq"])}
    return Masked().export({"forward": {**arguments, "$": {"special_cases": list(cases)}}})


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
@pytest.mark.parametrize("condition", [nn.causal, nn.zeros], ids=["causal", "zeros"])
def test_a_declared_case_of_a_known_mask_reads_no_mask(condition, target):
    method = compile(masked({"mask": condition}), target).program.methods["forward"]
    (mask,) = (i for i, slot in enumerate(method.slots) if slot.name == "mask")
    (choice,) = (i for i in method.body.instructions if isinstance(i, Branch))
    variant, general = (list(block.walk()) for block in (choice.then, choice.otherwise))
    assert [run.op for run in variant].count("scaled_dot_product_attention") == 1
    (attends,) = (run for run in variant if run.op == "scaled_dot_product_attention")
    assert method.slots[attends.inputs[3]].value is None
    assert attends.attrs.get("is_causal", False) == (condition is nn.causal)
    assert not any(mask in run.inputs or run.op in ("full", "triu", "zeros") for run in variant)
    assert any(mask in run.inputs for run in general)


def test_a_case_of_a_known_mask_computes_what_the_general_function_does():
    w, x = {"proj.weight": torch.randn(8, 8)}, torch.randn(2, 5, 8)
    mask = torch.full((5, 5), -torch.inf).triu(1)
    session = compile(masked({"mask": nn.causal})).load(w)
    q = ((x @ w["proj.weight"].T + 1.0) ** 2)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(session["forward"](x, mask), expected)
    assert session.hits("forward") == {"mask is causal": 1, "general": 0}


def test_what_compiling_leaves_of_equal_values_runs_once_and_names_the_authors_line():
    method = compile(masked()).program.methods["forward"]
    runs = [run for run in method.body.walk() if isinstance(run, Run)]
    assert [run.op for run in runs] == [
        "linear",
        "reshape",
        "add",
        "multiply",
        "scaled_dot_product_attention",
    ]
    here = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# the author's line")
    )
    assert {run.line for run in runs if run.op in ("add", "multiply")} == {f"{__file__}:{here}"}


def test_attributes_of_text_by_hand_may_be_as_an_author_writes_them(tmp_path):
    text = """
    def main[n](x: input float32[n, 4], w: weight float32[4, 3]) -> float32[n, 3] {
        t: float32[3, 4] = permute_dims(w)
        h: float32[n, 3] = linear(x, t)
        y: float32[n, 3] = softmax(h, axis=-1)
        return y
    }
    """
    x, w = torch.randn(2, 4), torch.randn(4, 3)
    session = nn.compile(nn.ir.parse(text)).load({"w": w})
    torch.testing.assert_close(session["main"](x), torch.softmax(x @ w, -1))
    session.save(tmp_path / "a")
    torch.testing.assert_close(nn.load(tmp_path / "a")["main"](x), torch.softmax(x @ w, -1))
