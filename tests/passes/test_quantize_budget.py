# SPDX-License-Identifier: Apache-2.0
"""Formats that are chosen by measured errors: within the bits that are given, and better than one format of as many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nnfront as nn
from nnfront.backends.registry import backend_of
from nnfront.errors import PassError
from nnfront.passes import QuantScheme
from nnfront.passes.quantizing.budget import CANDIDATES, candidates, measure, within
from nnfront.passes.quantizing.scheme import format_of

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


def test_what_a_candidate_takes_and_loses_is_measured():
    torch.manual_seed(0)
    weight = torch.randn(64, 256).bfloat16()
    found = measure(weight)
    assert set(found) == set(CANDIDATES)
    count = weight.numel()
    assert {name: bits / count for name, (bits, _) in found.items()} == {
        "int4:128": 4.125,
        "int4:64": 4.25,
        "q4_k": 4.5,
        "int4": 4.5,
        "uint4": 4.75,
        "q5_k": 5.5,
        "q6_k": 6.5625,
        "int8": 8.0625,
        "int8:32": 8.5,
    }
    scale = weight.double().abs().amax(1, keepdim=True) / 127
    rounded = (weight.double() / scale).round() * scale
    lost = float((rounded - weight.double()).square().sum() / weight.double().square().sum())
    assert found["int8"][1] == pytest.approx(lost, rel=0.05)
    by_error = sorted(found, key=lambda name: -found[name][1])
    assert by_error == ["int4:128", "int4:64", "int4", "uint4", "q4_k", "q5_k", "q6_k", "int8", "int8:32"]
    assert measure(torch.zeros(4, 128).bfloat16())["int4"][1] == 0


@pytest.mark.parametrize("budget", [4.125, 4.3, 4.5, 5.0, 6.5, 8.1])
def test_no_weight_is_worse_than_in_the_best_format_of_that_size(budget):
    torch.manual_seed(1)
    sizes, spreads = (16, 32, 64, 16), (0, 2, 0, 4)  # heavier tails lose more
    weights = [
        torch.randn(n, 128) * (torch.randn(n, 128) * s).exp() for n, s in zip(sizes, spreads, strict=True)
    ]
    measured = {f"w{i}": measure(w.bfloat16()) for i, w in enumerate(weights)}
    elements = sum(w.numel() for w in weights)
    rules = dict(within(QuantScheme(f"auto:{budget}"), measured, elements).rules)
    assert sum(measured[name][to][0] for name, to in rules.items()) <= budget * elements
    sizes = {to: sum(each[to][0] for each in measured.values()) for to in CANDIDATES}
    single = [to for to in CANDIDATES if sizes[to] <= budget * elements]
    best = min(single, key=lambda to: sum(each[to][1] for each in measured.values()))
    assert all(measured[name][to][1] <= measured[name][best][1] for name, to in rules.items())
    left = budget * elements - sum(measured[name][to][0] for name, to in rules.items())
    better = [
        each[to][0] - each[rules[name]][0]
        for name, each in measured.items()
        for to in CANDIDATES
        if each[to][1] < each[rules[name]][1]
    ]
    assert not better or min(better) > left  # nothing that would help has room
    assert rules == dict(within(QuantScheme(f"auto:{budget}"), measured, elements).rules)


@pytest.mark.matrix  # seconds of a whole model
def test_a_folder_is_quantised_within_its_budget_and_rules_are_kept():
    scheme = QuantScheme("auto:5", rules=(("*.o_proj", "keep"), ("model.layers.0.mlp", "int4:64")))
    llm = nn.LLM.load(FOLDER, quant=scheme)
    stored = {w.name: w.stored for w in llm.quantized.weights if w.role}
    assert {to for name, to in stored.items() if "o_proj" in name} == {"keep"}
    assert {to for name, to in stored.items() if "layers.0.mlp" in name} == {"int4:64"}
    free = [w for w in llm.quantized.quantized if "layers.0.mlp" not in w.name]
    bits = 8 * sum(w.bytes_after for w in free) / sum(w.elements for w in free)
    assert 4.6 < bits <= 5
    assert {format_of(w.stored).name for w in free} <= {"q4_k", "q5_k", "q6_k", "int8"}
    assert torch.isfinite(llm.logits(torch.tensor([[1, 2, 3]]))).all()


def test_a_budget_that_is_too_small_or_no_number_is_refused():
    measured = {"w": measure(torch.randn(8, 128).bfloat16())}
    with pytest.raises(PassError) as caught:
        within(QuantScheme("auto:4"), measured, 8 * 128)
    assert str(caught.value) == (
        "auto:4 is less than the weights take in int4:128\n"
        "  they take 4.12 bits for an element\n"
        "  help: allow more, or keep fewer weights"
    )
    for text in ("auto", "auto:x", "auto:0", "auto:inf", "auto:nan"):
        with pytest.raises(PassError) as caught:
            QuantScheme(text)
        assert str(caught.value) == (
            f"{text!r} does not say how many bits an element may take\n  help: write auto:4.5"
        )


def test_without_weights_there_are_no_errors_to_choose_by():
    ir = nn.export_folder(FOLDER)
    with pytest.raises(PassError) as caught:
        nn.passes.quantize_weights(ir, "auto:4.5")
    assert str(caught.value) == (
        "auto:4.5 is by the errors of weights, which are not known here\n"
        "  help: give it to LLM.load, nnfront run or nnfront export, or name a format"
    )


def test_a_target_chooses_among_what_its_kernels_read():
    read = candidates(backend_of("cuda:sm_90").reads)
    assert read == ("int4:128", "int4:64", "int4", "uint4", "int8", "int8:32")
    assert candidates(backend_of("cpu").reads) == CANDIDATES
