# SPDX-License-Identifier: Apache-2.0
"""What a page of a model holds: its data against the IR, the files' headers and the plan, from which each is read independently."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError, LowerError
from nnfront.inspection.model import inspect_model
from nnfront.inspection.page_data import page_data
from nnfront.ir import Call, FunctionCall, walk_bindings

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return page_data(inspect_model(FOLDER), {"batch": 2, "max_seq": 64})


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "pylib"
    nn.artefact.export(FOLDER, folder, quant="int4")
    return folder


def numbers(tree: list[Any]) -> Iterator[int]:
    for item in tree:
        yield from [item] if isinstance(item, int) else numbers(item["of"])


def test_every_call_of_the_program_is_a_node_and_every_node_in_the_tree_once(data: dict[str, Any]) -> None:
    module = nn.passes.lift_transform_params(nn.export_folder(FOLDER), shared_transform=True)
    for name, function in module.items():
        graph = data["functions"][name]
        calls = [
            b.value for b in walk_bindings(function.bindings) if isinstance(b.value, Call | FunctionCall)
        ]
        wanted = [c.op.name if isinstance(c, Call) else c.function for c in calls]
        inputs = len(function.inputs)
        assert [node["op"] for node in graph["nodes"][inputs:-1]] == wanted
        assert sorted(numbers(graph["tree"])) == list(range(len(graph["nodes"])))


def test_what_a_node_reads_is_made_before_it_by_the_node_it_names(data: dict[str, Any]) -> None:
    graph = data["functions"]["LlamaDecoderLayer_2"]
    nodes = {node["name"]: node for node in graph["nodes"]}
    assert [graph["nodes"][i]["name"] for i in nodes["attention"]["in"]] == [
        "rope_2",
        "rope_3",
        "reshape_2",
        "cache",
    ]
    assert [graph["nodes"][i]["name"] for i in nodes["result"]["in"]] == ["add_1", "attention"]
    assert all(i < at for at, node in enumerate(graph["nodes"]) for i in node.get("in", ()))


def test_nodes_are_grouped_by_module_and_layers_are_calls_of_one_function(data: dict[str, Any]) -> None:
    (model,) = [item for item in data["functions"]["decode"]["tree"] if isinstance(item, dict)]
    groups = {item["label"]: item for item in model["of"] if isinstance(item, dict)}
    assert model["module"] == "model"
    assert list(groups) == ["rotary_emb", "layers"]
    layers = [data["functions"]["decode"]["nodes"][i] for i in groups["layers"]["of"]]
    assert [layer["module"] for layer in layers] == [f"model.layers.{i}" for i in range(4)]
    assert {layer["call"] for layer in layers} == {"LlamaDecoderLayer_2"}
    assert layers[2]["weights"][1] == "model.layers.2.self_attn.qkv.weight"


def test_both_branches_of_an_if_are_groups_of_their_own() -> None:
    text = """def forward[n](x: input float32[n], flag: input bool[]) -> float32[n] {
        y: float32[n] = if flag { a: float32[n] = exp(x) yield a } else { b: float32[n] = sin(x) yield b }
        return y
    }"""
    from nnfront.inspection.graphs import Lines, graph_of

    graph = graph_of(nn.ir.parse(text)["forward"], Lines())
    (branches,) = [item for item in graph["tree"] if isinstance(item, dict)]
    then, otherwise, joined = branches["of"]
    assert (then["label"], otherwise["label"]) == ("then", "else")
    assert [graph["nodes"][i]["op"] for i in [*then["of"], *otherwise["of"]]] == ["exp", "sin"]
    assert graph["nodes"][joined]["in"] == [1, *then["of"], *otherwise["of"]]


def test_weights_have_their_formula_and_the_tensors_of_the_file(data: dict[str, Any]) -> None:
    weights = {weight["name"]: weight for weight in data["weights"]}
    found = weights["model.layers.3.mlp.gate_up.weight"]
    assert (
        found["formula"] == "concat(model.layers.3.mlp.gate_proj.weight, model.layers.3.mlp.up_proj.weight)"
    )
    assert (found["type"], found["bytes"], found["format"]) == (
        "bfloat16[1024, 256]",
        1024 * 256 * 2,
        "bfloat16",
    )
    assert found["methods"] == ["logits", "prefill", "decode"]
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        stored = set(file.keys())
        for weight in data["weights"]:
            for source in weight["sources"]:
                stored.discard(source["name"])
                shape = file.get_slice(source["name"]).get_shape()
                assert source["type"] == f"bfloat16{shape}"
                assert source["file"] == "model.safetensors"
    assert not stored


def test_dims_say_who_binds_them(data: dict[str, Any]) -> None:
    (dim,) = [dim for dim in data["dims"] if dim["name"] == "max_seq"]
    assert (dim["min"], dim["max"]) == (1, 512)
    assert dim["bound"] == [
        {"method": "prefill", "by": "'cache' max_seq"},
        {"method": "decode", "by": "'cache' max_seq"},
    ]


def test_kernels_are_those_that_explain_prints_with_the_reasons_of_others(
    data: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(FOLDER), "batch=2", "max_seq=64"]) == 0
    lines = (re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[1:])
    rows = [columns[:3] for columns in lines if len(columns) > 3]  # the others sum up
    assert [[k["method"], k["op"], k["kernel"]] for k in data["kernels"]] == rows
    assert (
        sum(
            len(k["modules"])
            for k in data["kernels"]
            if k["op"] == "qkv_attention" and k["method"] == "decode"
        )
        == 4
    )
    float32 = nn.compile(
        nn.ir.parse(
            "def f[n](x: input float32[n, 8], w: weight float32[4, 8]) -> float32[n, 4] { y: float32[n, 4] = linear(x, w) return y }"
        )
    )
    from nnfront.lower.explain import explained

    (line,) = explained(float32.program, {})
    assert line.cells()[-1] == "; ".join([line.why, *(f"not {reason}" for reason in line.refused)])


def test_the_memory_plan_is_that_of_the_sizes_asked_for(data: dict[str, Any]) -> None:
    memory = data["memory"]
    assert memory["sizes"] == {"batch": 2, "max_seq": 64, "seq": 128}
    # Keys and values of 4 layers, 2 heads of 64 in 2 bytes, for 64 tokens of 2 sequences.
    assert memory["methods"]["decode"]["caches"] == 2 * 4 * 2 * 64 * 2 * 64 * 2
    for method in memory["methods"].values():
        live = [0] * len(method["steps"])
        for _, _, _, size, ranges in method["buffers"]:
            for first, last in ranges:
                for step in range(first, last + 1):
                    live[step] += size
        assert max(live) == live[method["peak_step"]] == method["peak"]


def test_nodes_name_source_lines_and_these_are_in_the_data(data: dict[str, Any]) -> None:
    graph = data["functions"]["LlamaDecoderLayer_2"]
    (node,) = [node for node in graph["nodes"] if node["op"] == "attention"]
    line = data["lines"][node["at"]]
    assert Path(line["file"]).name == "llama.py"
    text = Path(line["file"]).read_text().splitlines()
    assert line["text"][line["line"] - line["first"]].strip() == text[line["line"] - 1].strip()
    assert "attention" in text[line["line"] - 1]


def test_an_artefact_shows_formats_formulas_and_its_own_tensors(artefact: Path) -> None:
    data = page_data(inspect_model(artefact))
    weights = {weight["name"]: weight for weight in data["weights"]}
    # The name says how it lies, if not in rows.
    (packed,) = (
        w for name, w in weights.items() if name.startswith("model.layers.0.mlp.down_proj.weight.int4")
    )
    assert data["made_of"] == "artefact"
    assert packed["format"] == "int4"
    assert "quantize(model.layers.0.mlp.down_proj.weight" in packed["formula"]
    assert packed["sources"] == [
        {"name": "model.layers.0.mlp.down_proj.weight", "type": "bfloat16[256, 512]", "bytes": 256 * 512 * 2}
    ]
    assert packed["stored"]["file"] == "nnfront-weights-00001-of-00001.safetensors"
    assert packed["stored"]["bytes"] == packed["bytes"] == 256 * 512 // 2
    assert data["lines"][0]["file"] == "llama.py"


def test_config_alone_is_enough(large_folder: Path) -> None:
    data = page_data(inspect_model(large_folder))
    assert len([n for n in data["functions"]["decode"]["nodes"] if "call" in n]) == 80
    assert sum(weight["bytes"] for weight in data["weights"]) == 2 * 70_553_706_496


def test_the_page_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    assert main(["show", str(FOLDER), "--html", str(tmp_path / "page.html"), "--sizes", "batch=2"]) == 0
    page = (tmp_path / "page.html").read_text()
    outside = re.sub(r"http://www.w3.org/2000/svg", "", page)
    assert not re.search(
        r"https?://|<link (?!rel=\"icon\" href=\"data:,\")|<img|@import|url\((?!#)|{{", outside
    )
    assert "default-src 'none'" in page
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(text)["memory"]["sizes"]["batch"] == 2


def test_names_cannot_break_out_of_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    config = json.loads((FOLDER / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["</script><!--"]}))
    page = nn.page(folder)
    assert page.count("</script>") == 2
    assert "<script>alert(1)" not in page
    assert "<!--" not in page


def test_what_cannot_be_shown_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LoadError, match="is not a folder"):
        nn.page(tmp_path / "nothing")
    with pytest.raises(LowerError, match="dim 'max_seq' cannot be 100000"):
        nn.page(FOLDER, sizes={"max_seq": 100000})
    assert main(["show", str(FOLDER), "--html", str(tmp_path)]) == 1
    assert "cannot be written: Is a directory" in capsys.readouterr().err
    assert main(["show", str(FOLDER), "--html", "-", "--sizes", "decode"]) == 1
    assert capsys.readouterr().err == (
        "error: decode gives no number for a dim\n  help: write the dim and its size: batch=1\n"
    )
    assert main(["show", str(FOLDER), "--sizes", "batch=1"]) == 1
    assert "numbers for dims are for a page" in capsys.readouterr().err
