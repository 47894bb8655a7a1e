# SPDX-License-Identifier: Apache-2.0
"""The memory that a plan promises is the memory that a load takes, in a process of its own, over a checkpoint several times as large."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from few_of import few_of
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec

SLACK_BYTES = 32 << 20
"""What Python objects and the hashing take besides."""
CHILD = """
    import json, sys, threading, time
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    sys.path[:0] = {places}
    from test_load_memory import Model, compiled
    import nnfront as nn

    def anonymous():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

    executable, checkpoint = compiled({layers}), nn.Checkpoint({folder!r})
    plan = executable.plan(checkpoint)
    print(plan)
    before = peak = anonymous()
    done = threading.Event()

    def watch():
        global peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    session = executable.load(checkpoint, cache={cache!r}, progress=lambda *_: time.sleep(0.001))
    done.set()
    watcher.join()
    print(json.dumps({{
        "peak": peak - before, "streamed": plan.peak_bytes, "kept": plan.peak_kept_bytes, "size": checkpoint.size_bytes,
        "sums": {{name: float(value.double().sum()) for name, value in session.weights.items()}},
    }}))
"""


class Model(nn.Module):
    """Per layer two square matrices, fused, turned, scaled and narrowed; and the fused one in four bits."""

    def __init__(self, layers: int, size: int = 1536):
        self.a, self.b = ([nn.Linear(size, size, bias=False) for _ in range(layers)] for _ in "ab")
        pairs = list(zip(self.a, self.b, strict=True))
        self.fused = [op.concat([a.weight, b.weight], dim=0) for a, b in pairs]
        self.packed = [op.quantize(each, bits=4, group_size=64) for each in self.fused]
        self.half = [op.astype(op.permute_dims(each)[: size // 32] * 2.0, "bfloat16") for each in self.fused]

    def forward(self, x):
        for (packed, scale, *zero), half in zip(self.packed, self.half, strict=True):
            y = op.linear(x, op.dequantize(packed, scale, *zero, group_size=64))
            z = op.linear(op.astype(op.concat([x, x], dim=-1), "bfloat16"), half)
            x = (
                x
                + op.sum(y, axis=-1, keepdims=True)
                + op.astype(op.sum(z, axis=-1, keepdims=True), "float32")
            )
        return x


def compiled(layers: int, size: int = 1536):
    ir = Model(layers, size).export({"forward": {"x": spec.Tensor(["n", size], "float32")}})
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """302 MB in two shards: every fused matrix has a part in each."""
    folder = tmp_path_factory.mktemp("checkpoint")
    block = torch.randn(1536, 1536)
    index = {}
    for i, part in enumerate("ab", 1):
        file = f"model-0000{i}-of-00002.safetensors"
        tensors = {f"{part}.{layer}.weight": block.roll(97 * i + layer, 0) for layer in range(LAYERS)}
        save_file(tensors, folder / file)
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


LAYERS = 16


@pytest.mark.parametrize("cached", few_of([False, True]), ids=["kept in memory", "kept in a cache"])
def test_a_load_takes_no_more_memory_than_was_printed_before(folder: Path, tmp_path: Path, cached: bool):
    cache = str(tmp_path / "cache") if cached else None
    script = textwrap.dedent(CHILD).format(
        places=[str(place) for place in Path(__file__).parents[:2]],
        layers=LAYERS,
        folder=str(folder),
        cache=cache,
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    found = json.loads(last)
    bound = found["streamed" if cached else "kept"]
    assert f"at most {bound / 1e6:.1f} MB" in "\n".join(printed[:3])
    assert found["size"] > (5 if cached else 2.5) * bound
    assert found["peak"] < bound + SLACK_BYTES
    weights = nn.Checkpoint(folder)
    for layer in range(LAYERS):
        both = torch.cat([weights[f"{part}.{layer}.weight"] for part in "ab"])
        half = (both.T[: 1536 // 32] * 2).bfloat16()
        assert found["sums"][f"half.{layer}"] == float(half.double().sum())


@pytest.mark.parametrize("size", [512, 500], ids=["whole pages", "odd sizes"])
def test_parts_of_a_result_may_lie_in_different_shards(tmp_path: Path, size: int):
    """Mapped where pages allow it, read where not; from files with and without an index, and through a cache."""
    given = {f"{part}.0.weight": torch.randn(size, size) for part in "ab"}
    for part in "ab":
        save_file({f"{part}.0.weight": given[f"{part}.0.weight"]}, tmp_path / f"{part}.safetensors")

    class Fused(nn.Module):
        def __init__(self):
            self.a, self.b = ([nn.Linear(size, size, bias=False)] for _ in "ab")
            self.fused = op.concat([self.a[0].weight, self.b[0].weight], dim=0)
            self.turned = op.permute_dims(self.fused) * 2.0

        def forward(self, x):
            return op.linear(x, self.fused) + op.sum(op.matmul(x, self.turned))

    ir = Fused().export({"forward": {"x": spec.Tensor(["n", size], "float32")}})
    executable = nn.compile(nn.passes.lift_transform_params(ir))
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        session = executable.load(nn.Checkpoint(tmp_path), cache=cache)
        both = torch.cat([*given.values()])
        assert torch.equal(session.weights["fused"], both)
        assert torch.equal(session.weights["turned"], both.T * 2)
    session.export_checkpoint(tmp_path / "out", shard_bytes=given["a.0.weight"].nbytes)
    assert all(torch.equal(value, given[name]) for name, value in nn.Checkpoint(tmp_path / "out").items())
