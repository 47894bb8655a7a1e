# SPDX-License-Identifier: Apache-2.0
"""The plan of a weight transform: what it says, and that it is what happens."""

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from transform_cases import CopyingSource, LiveBytes, quantized, transform, typed, types_of

from nnfront.ir import Projection
from nnfront.transform.plan import plan_transform
from nnfront.transform.run import run_transform, stream_transform


class TestPlan:
    def test_the_plan_reads_as_what_happens(self):
        weights = {
            "q.weight": torch.zeros(4, 250),
            "k.weight": torch.zeros(2, 250),
            "o.weight": torch.zeros(100, 100),
        }
        plan = plan_transform(
            transform(types_of(weights), lambda m: {
                "qk": m.concat(m.w["q.weight"], m.w["k.weight"]),
                "o": m.astype(m.permute_dims(m.w["o.weight"]), dtype="bfloat16"),
                "raw": m.w["o.weight"],
            }),
            weights,
        )  # fmt: skip
        assert str(plan).splitlines()[1:] == [
            "  results kept in memory: 0.0 MB of new memory, at most 0.0 MB on the way",
            "  results written to files: at most 0.0 MB",
            "  qk: float32[6, 250] = concat(q.weight, k.weight)    # 0.0 MB, 0.0 MB new",
            "  o: bfloat16[100, 100] = astype(permute_dims(o.weight, axes=[1, 0]), dtype='bfloat16')    # 0.0 MB, 0.0 MB new",
            "  raw: float32[100, 100] = o.weight    # 0.0 MB",
        ]
        assert plan.resident_bytes == 6 * 250 * 4 + 100 * 100 * 2
        assert [r.sources for r in plan.results] == [("q.weight", "k.weight"), ("o.weight",), ("o.weight",)]
        assert [r.new_bytes for r in plan.results] == [6000, 20000, 0]

    def test_an_exact_case(self):
        # 4 kB each: two new results at a time, or all three.
        weights = {name: torch.ones(10, 100) for name in "abc"}
        program = transform(types_of(weights), lambda m: {n: m.flip(m.w[n], axis=(0,)) for n in "abc"})
        plan = plan_transform(program, weights)
        assert (plan.peak_bytes, plan.resident_bytes, plan.peak_kept_bytes) == (4000, 12000, 12000)
        with LiveBytes() as memory:
            kept = run_transform(program, weights)
        assert memory.peak == plan.peak_kept_bytes
        del kept
        with LiveBytes() as memory:
            for _, value in stream_transform(program, weights):
                del value
        assert memory.peak == plan.peak_bytes

    def test_a_conversion_does_not_keep_what_it_converts(self):
        weights = {"a": torch.ones(100, 100)}
        program = transform(
            types_of(weights), lambda m: {"x": m.astype(m.flip(m.w["a"], axis=(0,)), dtype="bfloat16")}
        )
        plan = plan_transform(program, weights)
        assert (plan.resident_bytes, plan.peak_kept_bytes) == (20_000, 60_000)
        with LiveBytes() as memory:
            kept = run_transform(program, weights)
            assert memory.now == plan.resident_bytes
        del kept

    def test_what_ops_compute_is_told_from_weights_in_a_row(self):
        weights = {"a": torch.ones(100, 100), "b": torch.ones(100, 100)}
        plan = plan_transform(transform(types_of(weights), lambda m: {
            "raw": m.w["a"],
            "joined": m.concat(m.w["a"], m.w["b"]),
            "turned": m.permute_dims(m.concat(m.w["a"], m.w["b"])),
            "q": m.builder.emit(Projection(parts := m.quantize(m.w["a"]), 0)),
            "scale": m.builder.emit(Projection(parts, 1)),
            "view": m.permute_dims(m.relu(m.w["b"])),
        }), weights)  # fmt: skip
        computed = {result.name: result.is_computed for result in plan.results}
        assert computed == {
            "raw": False,
            "joined": False,
            "turned": False,
            "q": True,
            "scale": True,
            "view": True,
        }
        assert next(r for r in plan.results if r.name == "scale").new_bytes == 100 * 4

    @pytest.mark.parametrize("copies", [False, True], ids=["views of weights", "weights that are read"])
    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_no_transform_takes_more_than_its_plan_and_all_are_right(self, copies: bool, data):
        weights = {name: torch.randn(16, 16) for name in "abcd"}
        meaning = {}

        def make(m):
            values = [(m.w[name], weights[name]) for name in weights]
            for _ in range(data.draw(st.integers(1, 12), "length")):
                (x, x_), (y, y_) = (data.draw(st.sampled_from(values)) for _ in "xy")
                match data.draw(
                    st.sampled_from(["matmul", "add", "turn", "cat", "flat", "astype", "take", "relu"])
                ):
                    case "matmul":
                        values.append((m.matmul(x, y), x_ @ y_))
                    case "add":
                        values.append((m.add(x, y), x_ + y_))
                    case "turn":
                        values.append((m.permute_dims(x), x_.T))
                    case "cat":
                        both = m.concat(x, y)
                        values.append(
                            (
                                m.matmul(m.permute_dims(both), both),
                                torch.cat([x_, y_]).T @ torch.cat([x_, y_]),
                            )
                        )
                    case "flat":
                        flat = m.reshape(x, shape=(4, 64))
                        values.append((m.reshape(flat, shape=(16, 16)), x_))
                    case "astype":
                        values.append((m.astype(m.astype(x, dtype="float64"), dtype="float32"), x_))
                    case "take":
                        values.append((m.flip(x, axis=(0,)), x_.flip(0)))
                    case "relu":
                        values.append((m.relu(x), x_.relu()))
            chosen = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=5), "results")
            meaning.update({f"r{i}": value for i, (_, value) in enumerate(chosen)})
            return {f"r{i}": var for i, (var, _) in enumerate(chosen)}

        program = transform(types_of(weights), make)
        source = CopyingSource(weights) if copies else weights
        plan = plan_transform(program, source)
        with LiveBytes() as memory:
            got = run_transform(program, source)
            held = memory.now
        for name, value in meaning.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-3)
        assert memory.peak <= plan.peak_kept_bytes
        assert held <= plan.resident_bytes
        del got
        with LiveBytes() as memory:
            for _, result in stream_transform(program, source):
                del result
        assert memory.peak <= plan.peak_bytes

    @pytest.mark.parametrize("rows", [256, 5000])
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_quantisation_stays_within_its_plan(self, rows: int, axis: int, dtype: str):
        weights = {"w": torch.randn(rows, 512).to(getattr(torch, dtype))}
        program = transform(types_of(weights), quantized(axis=axis, bits=4))
        with LiveBytes() as memory:
            run_transform(program, weights)
        plan = plan_transform(program, weights)
        assert memory.peak <= plan.peak_kept_bytes

    @pytest.mark.parametrize("format", few_of(["int4", "uint4", "nvfp4", "q5_k", "q6_k"], 2))
    @pytest.mark.parametrize("rows", few_of([1500, 256]))
    def test_calibrated_quantisation_stays_within_its_plan(self, format: str, rows: int):
        weights = {"w": torch.randn(rows, 512).bfloat16(), "moments": torch.eye(256).repeat(2, 1, 1)}

        def make(m):
            found = m.quantize_calibrated(m.w["w"], m.w["moments"], format=format)
            if format.startswith("q"):
                return {"blocks": found}
            return {f"part{i}": m.builder.emit(Projection(found, i)) for i in range(len(found.type.fields))}

        program = transform(types_of(weights), make)
        with LiveBytes() as memory:
            run_transform(program, weights)
        assert memory.peak <= plan_transform(program, weights).peak_kept_bytes

    def test_quantisation_of_a_large_matrix_holds_little_besides_its_result(self):
        weights = {"w": torch.randn(20_000, 512).to(torch.bfloat16)}  # 41 MB of float32
        plan = plan_transform(transform(types_of(weights), quantized(axis=1)), weights)
        assert plan.peak_kept_bytes - plan.resident_bytes < 26e6

    def test_ten_thousand_results_are_planned(self):
        weights = {
            f"layers.{i}.experts.{j}.{part}": typed(64, 8)
            for i in range(10)
            for j in range(500)
            for part in ("up", "gate")
        }
        program = transform(weights, lambda m: {n: m.permute_dims(w) for n, w in m.w.items()})

        class Types:
            def info(self, name):
                return weights[name]

            def tensor(self, name): ...

            def joined(self, names): ...

            def part(self, name, axis, ranges): ...

            def copied_bytes(self, names):
                return 0

        assert len(plan_transform(program, Types()).results) == 10_000
