# SPDX-License-Identifier: Apache-2.0
"""The weight transform: right values, read late, dropped early, nothing copied that need not be, and never above the plan."""

import pytest
import torch
from safetensors.torch import save_file
from transform_cases import LiveBytes, NotingSource, quantized, transform, typed, types_of

from nnfront.dims import Dim
from nnfront.errors import LoadError
from nnfront.ir import OPS, Projection, Scalar
from nnfront.transform.plan import plan_transform
from nnfront.transform.run import run_transform, stream_transform
from nnfront.weights import Checkpoint

SQUARES = {name: torch.randn(8, 8) for name in ("a", "b", "c")}


def run(weights, make, source=None):
    return run_transform(transform(types_of(weights), make), source or weights)


class TestValues:
    def test_results_have_the_names_order_and_values_of_the_formulas(self):
        got = run(SQUARES, lambda m: {
            "product": m.matmul(m.w["a"], m.w["b"]),
            "fused": m.concat(m.w["b"], m.w["c"], dim=0),
            "raw": m.w["c"],
            "turned": m.permute_dims(m.w["a"]),
        })  # fmt: skip
        assert list(got) == ["product", "fused", "raw", "turned"]
        a, b, c = SQUARES.values()
        assert torch.equal(got["product"], a @ b)
        assert torch.equal(got["fused"], torch.cat([b, c]))
        assert torch.equal(got["raw"], c)
        assert torch.equal(got["turned"], a.T)

    def test_a_weight_and_a_view_of_it_stay_where_they_are(self):
        got = run(SQUARES, lambda m: {"raw": m.w["a"], "turned": m.permute_dims(m.w["a"])})
        assert got["raw"].data_ptr() == got["turned"].data_ptr() == SQUARES["a"].data_ptr()

    def test_two_names_of_one_value_are_one_tensor(self):
        def make(m):
            fused = m.concat(m.w["a"], m.w["b"])
            return {"x": fused, "y": fused}

        got = run(SQUARES, make)
        assert got["x"].data_ptr() == got["y"].data_ptr()

    def test_dims_of_weights_are_solved_and_may_be_results(self):
        types = {"a": typed("n", 4), "b": typed("n", 4)}
        program = transform(
            types, lambda m: {"half": m.reshape(m.w["a"], shape=(Dim("2*n"), 2)), "n": Scalar(Dim("n"))}
        )
        got = run_transform(program, {"a": torch.ones(6, 4), "b": torch.ones(6, 4)})
        assert got["half"].shape == (12, 2)
        assert got["n"] == 6
        with pytest.raises(
            LoadError, match="weight 'b' axis 0 is 'n' = 5, but 'a' axis 0 already said 'n' = 6"
        ):
            run_transform(program, {"a": torch.ones(6, 4), "b": torch.ones(5, 4)})

    def test_a_weight_that_is_not_there_is_an_error(self):
        with pytest.raises(LoadError, match="there is no weight 'a'"):
            run({"a": torch.ones(2)}, lambda m: {"x": m.w["a"]}, {"b": torch.ones(2)})

    def test_progress_ends_with_all_steps_done(self):
        told: list[tuple[int, int]] = []
        program = transform(types_of(SQUARES), lambda m: {"x": m.add(m.w["a"], m.w["b"])})
        run_transform(program, SQUARES, progress=lambda done, total: told.append((done, total)))
        assert told == [(i, 4) for i in range(1, 5)]


class TestRowBlocks:
    @pytest.mark.parametrize("rows", [0, 1, 2048, 2049, 5000])
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_quantisation_in_blocks_is_that_of_the_whole(self, rows: int, symmetric: bool):
        w = torch.randn(rows, 512)
        options = {"bits": 4, "group_size": 64, "axis": 1, "symmetric": symmetric}
        got = run({"w": w}, quantized(**options))
        whole = OPS["quantize"].run([w], {"scale_dtype": None, **options})
        assert len(got) == len(whole)
        assert all(torch.equal(a, b) for a, b in zip(got.values(), whole, strict=True))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_floats_of_8_bits_are_made_in_blocks_like_the_whole(self, dtype: str):
        w = torch.randn(5000, 512).to(getattr(torch, dtype))
        options = {"axis": 1, "dtype": "float8_e4m3fn", "scale_dtype": "float32"}
        q, scale = OPS["quantize"].run([w], options)
        got = run({"w": w}, quantized(**options))
        assert torch.equal(got["part0"].view(torch.uint8), q.view(torch.uint8))
        assert torch.equal(got["part1"], scale)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_what_works_along_the_rows_is_not_taken_apart(self, axis: int):
        w = torch.randn(4096, 512)
        q, scale = OPS["quantize"].run(
            [w], {"bits": 8, "group_size": None, "axis": axis, "symmetric": True, "scale_dtype": None}
        )
        got = run({"w": w}, quantized(axis=axis))
        assert torch.equal(got["part0"], q)
        assert torch.equal(got["part1"], scale)
        back = run({"q": q, "s": scale}, lambda m: {"x": m.dequantize(m.w["q"], m.w["s"], None, axis=axis)})[
            "x"
        ]
        assert torch.equal(back, q.float() * scale)


class TestJoins:
    """Whole weights in a row are asked of the source in one piece."""

    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (lambda m: m.concat(m.w["a"], m.w["b"], dim=0), "join a b"),
            (lambda m: m.concat(m.concat(m.w["a"], m.w["b"]), m.w["c"]), "join a b c"),
            (lambda m: m.stack(m.w["c"], m.w["a"], dim=0), "join c a"),
            (lambda m: m.stack(m.stack(m.w["a"], m.w["b"]), m.stack(m.w["b"], m.w["c"])), "join a b b c"),
            (
                lambda m: m.concat(m.reshape(m.w["a"], shape=(16, 4)), m.reshape(m.w["b"], shape=(16, 4))),
                "join a b",
            ),
            (lambda m: m.reshape(m.concat(m.w["a"], m.w["b"]), shape=(2, 64)), "join a b"),
            (lambda m: m.unsqueeze(m.w["a"], dim=1), "read a"),
        ],
        ids=["concat", "nested", "stack", "stacks", "reshaped parts", "reshaped result", "one weight"],
    )
    def test_joined(self, make, expected: str):
        source = NotingSource(SQUARES)
        got = run(SQUARES, lambda m: {"x": make(m)}, source)["x"]
        assert source.events == [expected]
        assert torch.equal(got.reshape(-1), torch.cat([SQUARES[n].reshape(-1) for n in expected.split()[1:]]))

    @pytest.mark.parametrize(
        "make",
        [
            lambda m: m.concat(m.w["a"], m.w["b"], dim=1),
            lambda m: m.stack(m.w["a"], m.w["b"], dim=1),
            lambda m: m.concat(m.w["a"], m.w["half"]),
            lambda m: m.concat(m.w["a"], m.permute_dims(m.w["b"])),
        ],
        ids=[
            "concat along another axis",
            "stack along another axis",
            "other dtypes",
            "a part that is computed",
        ],
    )
    def test_not_joined(self, make):
        weights = {**SQUARES, "half": torch.randn(8, 8).to(torch.float16)}
        source = NotingSource(weights)
        run(weights, lambda m: {"x": make(m)}, source)
        assert all(event.startswith("read") for event in source.events)

    def test_scalars_are_stacked(self):
        weights = {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}
        assert run(weights, lambda m: {"x": m.stack(m.w["a"], m.w["b"])})["x"].tolist() == [1.0, 2.0]

    def test_a_fused_result_of_a_checkpoint_takes_no_memory(self, tmp_path):
        tensors = {name: torch.randn(1024, 512) for name in "qkvo"}
        save_file(tensors, tmp_path / "x.safetensors")
        checkpoint = Checkpoint(tmp_path)
        program = transform(types_of(tensors), lambda m: {
            "qkv": m.concat(m.w["q"], m.w["k"], m.w["v"]), "o": m.permute_dims(m.w["o"])
        })  # fmt: skip
        assert plan_transform(program, checkpoint).peak_kept_bytes < 64 << 10
        with LiveBytes() as memory:
            got = run_transform(program, checkpoint)
        assert memory.peak == 0
        assert torch.equal(got["qkv"], torch.cat([tensors[name] for name in "qkv"]))
        assert torch.equal(got["o"], tensors["o"].T)


class TestOrder:
    def make(self, m):
        """Two results, whose instructions the program has interleaved."""
        x, y = m.matmul(m.w["a"], m.w["a"]), m.matmul(m.w["b"], m.w["b"])
        return {"x": m.add(x, x), "y": m.add(y, y)}

    def test_a_result_is_finished_before_the_next_weight_is_read(self):
        source = NotingSource(SQUARES)
        log = []
        for name, _ in stream_transform(transform(types_of(SQUARES), self.make), source):
            log += [*source.events, f"give {name}"]
            source.events.clear()
        assert log == ["read a", "give x", "read b", "give y"]

    def test_a_weight_is_dropped_after_its_last_use(self):
        source = NotingSource(SQUARES)
        for _, _value in stream_transform(transform(types_of(SQUARES), self.make), source):
            assert source.alive == []

    def test_a_weight_that_a_later_result_needs_is_read_once_and_kept(self):
        source = NotingSource(SQUARES)
        got = run(
            SQUARES, lambda m: {"x": m.add(m.w["a"], m.w["b"]), "y": m.multiply(m.w["a"], m.w["c"])}, source
        )
        assert source.events == ["read a", "read b", "read c"]
        assert torch.equal(got["y"], SQUARES["a"] * SQUARES["c"])

    def test_only_what_results_need_is_read(self):
        source = NotingSource(SQUARES)
        run(SQUARES, lambda m: (m.matmul(m.w["a"], m.w["c"]), {"x": m.w["b"]})[1], source)
        assert source.events == ["read b"]

    def test_effects_keep_their_order(self, capsys):
        def make(m):
            m.print_(m.w["b"], format="b {}")
            m.print_(m.w["a"], format="a {}")
            return {"x": m.add(m.w["a"], m.w["a"]), "y": m.w["b"]}

        run({"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}, make)
        out = capsys.readouterr().out
        assert out.index("b ") < out.index("a ")

    def test_unused_fields_of_a_tuple_are_dropped(self):
        def make(m):
            parts = m.split(m.w["a"], indices_or_sections=2, axis=0)
            first = m.builder.emit(Projection(parts, 0))
            return {"x": m.add(first, first), "y": m.w["b"]}

        source = NotingSource(SQUARES)
        results = stream_transform(transform(types_of(SQUARES), make), source)
        next(results)
        assert source.alive == []
