# SPDX-License-Identifier: Apache-2.0
"""float8 with one scale for a matrix, or for a block of 128 x 128, against a reading of that in plain loops."""

from __future__ import annotations

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu.extension import NATIVE
from nnfront.errors import PassError
from nnfront.passes import QuantScheme, lift_transform_params, quantize_weights
from nnfront.passes.quantizing.scheme import format_of, text_of

LARGEST = {"fp8": 448.0, "fp8_e5m2": 57344.0}
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def stands_for(weight: torch.Tensor, text: str) -> torch.Tensor:
    """What is left of a matrix, made block by block."""
    name, _, shared = text.partition(":")
    size = (128, 128) if shared == "block" else tuple(weight.shape)
    left = torch.empty_like(weight)
    for i in range(0, weight.shape[0], size[0]):
        for j in range(0, weight.shape[1], size[1]):
            block = weight[i : i + size[0], j : j + size[1]]
            scale = block.abs().max() / LARGEST[name]
            scale = scale if scale > 0 else torch.tensor(1.0)
            left[i : i + size[0], j : j + size[1]] = (block / scale).to(DTYPES[name]).float() * scale
    return left


class Products(nn.Module):
    def __init__(self) -> None:
        self.table = nn.Embedding(40, 256)
        self.up, self.down = nn.Linear(256, 300, bias=False), nn.Linear(300, 128, bias=False)

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        return self.down(op.silu(self.up(self.table(tokens))))

    def rows(self, tokens: nn.Tensor) -> nn.Tensor:
        return self.table(tokens)


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn([int(s) for s in p.shape]) for name, p in Products().named_parameters()}
    made["up.weight"][:128, :128] *= 20  # so that blocks differ
    made["up.weight"][256:, 128:] = 0
    return made


@pytest.mark.parametrize("text", ["fp8:tensor", "fp8:block", "fp8_e5m2:tensor", "fp8_e5m2:block"])
def test_a_matrix_is_what_its_blocks_leave_of_it(text: str) -> None:
    tokens = spec.Tensor(["n"], "int64")
    ir = Products().export({"forward": {"tokens": tokens}, "rows": {"tokens": tokens}})
    lifted = lift_transform_params(quantize_weights(ir, text), shared_transform=True)
    session, given = nn.compile(lifted).load(weights()), weights()
    assert {t.dtype for name, t in session.weights.items() if "scales" not in name} == {
        DTYPES[text.partition(":")[0]]
    }
    # Of 300 inputs there are no blocks of 128: each output has a scale of its own.
    of_down = text if "tensor" in text else text.replace(":block", "")
    left = {
        "table.weight": stands_for(given["table.weight"], text),
        "up.weight": stands_for(given["up.weight"], text),
    }
    if of_down == text:
        left["down.weight"] = stands_for(given["down.weight"], text)
    else:
        rows = [stands_for(row[None], text.replace("block", "tensor")) for row in given["down.weight"]]
        left["down.weight"] = torch.cat(rows)
    ids = torch.tensor([3, 39, 0])
    torch.testing.assert_close(session["rows"](ids), left["table.weight"][ids], rtol=1e-6, atol=0)
    hidden = torch.nn.functional.silu(left["table.weight"][ids] @ left["up.weight"].T)
    torch.testing.assert_close(session["forward"](ids), hidden @ left["down.weight"].T, rtol=1e-4, atol=1e-3)


def test_the_report_says_what_they_are_stored_in_and_bytes_are_those_of_the_session() -> None:
    ir = Products().export({"forward": {"tokens": spec.Tensor(["n"], "int64")}})
    for text in ("fp8:tensor", "fp8:block"):
        report = quantize_weights.report(ir, text)
        session = nn.compile(lift_transform_params(quantize_weights(ir, text))).load(weights())
        held = sum(t.nbytes for t in session.weights.values())
        assert sum(w.bytes_after for w in report.weights) == held
    found = {w.name: (w.stored, w.reason) for w in report.weights}
    assert found == {
        "table.weight": ("fp8:block", ""),
        "up.weight": ("fp8:block", ""),
        "down.weight": ("fp8", "300 inputs do not divide into fp8:block"),
    }


def test_experts_have_scales_of_their_own() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            self.up, self.down = nn.Parameter([3, 256, 128]), nn.Parameter([3, 128, 128])

        def forward(self, x: nn.Tensor, chosen: nn.Tensor, share: nn.Tensor) -> nn.Tensor:
            return op.moe_mlp(x, self.up, self.down, chosen, share)

    given_spec = {
        "x": spec.Tensor(["n", 128]),
        "chosen": spec.Tensor(["n", 2], "int64"),
        "share": spec.Tensor(["n", 2]),
    }
    ir = Mixture().export({"forward": given_spec})
    torch.manual_seed(0)
    given = {"up": torch.randn(3, 256, 128), "down": torch.randn(3, 128, 128)}
    given["up"][1] *= 100
    args = torch.randn(5, 128), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    for text in ("fp8:tensor", "fp8:block"):
        lifted = lift_transform_params(quantize_weights(ir, text), shared_transform=True)
        left = {name: torch.stack([stands_for(w, text) for w in stack]) for name, stack in given.items()}
        expected = nn.compile(ir).load(left)["forward"](*args)
        found = nn.compile(lifted).load(given)["forward"](*args)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
def test_kernels_in_c_read_blocks_and_other_targets_say_that_they_do_not() -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            self.up = nn.Linear(256, 320, bias=False)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.up(x)

    model = One()
    model.to("bfloat16")
    ir = model.export({"forward": {"x": spec.Tensor(["n", 256], "bfloat16")}})
    lifted = lift_transform_params(quantize_weights(ir, "fp8:block"), shared_transform=True)
    assert "fp8_groups_product" in str(nn.compile(lifted).explain())
    said = str(nn.compile(lifted, target="cuda:sm_90").explain())
    assert "fp8 in groups of 128" in said
    assert "triton_fp8" not in said.split("not triton_fp8")[0]


def test_words_for_what_shares_a_scale() -> None:
    for text in ("fp8", "fp8:tensor", "fp8:block", "fp8_e5m2:block"):
        assert text_of(format_of(text)) == text
    assert format_of("fp8:channel") == format_of("fp8")
    with pytest.raises(PassError) as raised:
        QuantScheme("fp8:64")
    assert str(raised.value) == (
        "fp8 has a scale for each output, got 'fp8:64'\n"
        "  help: write fp8, fp8:tensor, fp8:block, or use one of int4, int8, uint4, uint8"
    )
    with pytest.raises(PassError, match="int8:block"):
        QuantScheme("int8:block")
