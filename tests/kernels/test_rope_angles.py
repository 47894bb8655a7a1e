# SPDX-License-Identifier: Apache-2.0
"""Cosines and sines of the next tokens' angles against float64, and by which programs they are asked for."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_mutants import Mutant, package
from nnfront_kernels import KernelError, rope_angles
from nnfront_models import llama

import nnfront as nn

LENGTHS = (0, 7, 4095, 131071, 1_000_003)


def agree(kernels: ModuleType, seq: int, pairs: int, factor: float) -> None:
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    inv_freq = 500000.0 ** -(torch.arange(pairs) / pairs)
    found = kernels.rope_angles.launch(lengths, inv_freq, seq, factor=factor)
    angles = (lengths[:, None] + torch.arange(seq)).float()[..., None] * inv_freq
    for mine, his in zip(found, (angles.double().cos(), angles.double().sin()), strict=True):
        assert mine.shape == (len(LENGTHS), seq, pairs)
        torch.testing.assert_close(mine.double(), his * factor, rtol=0, atol=2.0**-22)
    stated = rope_angles.reference(lengths, inv_freq, seq, factor=factor, compute=torch.float64)
    torch.testing.assert_close(found[1].double(), stated[1], rtol=0, atol=2.0**-22)


def as_it_is(seq: int, pairs: int, factor: float) -> None:
    agree(nnfront_kernels, seq, pairs, factor)


@pytest.mark.parametrize(("seq", "pairs", "factor"), few_of([(2, 40, 1.25), (1, 64, 1.0), (3, 200, 1.0)], 1))
def test_angles_are_those_of_the_next_positions(interpreted, seq, pairs, factor):
    interpreted(as_it_is, seq, pairs, factor)


MUTANTS = [
    Mutant("the_same_position_for_all", "rope_angles.py", "token // SEQ", "0"),
    Mutant("no_factor_for_sines", "rope_angles.py", "sin * factor", "sin"),
]


def mutated(mutant: Mutant) -> None:
    agree(package(mutant), 2, 40, 1.25)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_angles_are_caught(interpreted, mutant):
    with pytest.raises(AssertionError):
        interpreted(mutated, mutant)


def test_what_does_not_fit_is_refused():
    lengths, row = torch.zeros(3, dtype=torch.int32), torch.ones(8)
    for changes, message in (
        ((lengths.long(), row), "lengths must be a dense int32"),
        ((lengths, torch.ones(8, 2)[:, 0]), "inv_freq must be a dense"),
        ((lengths, row.double()), "rope_angles: dtype must be float32, got 'float64'"),
    ):
        with pytest.raises(KernelError, match=message):
            rope_angles.plan(*changes, 1, arch="sm_90")


PARAMETERS = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**PARAMETERS, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {**PARAMETERS, "rope_type": "dynamic", "factor": 4.0}


@pytest.mark.parametrize(("parameters", "is_ours"), [(PARAMETERS, True), (YARN, True), (LONG, False)])
def test_steps_ask_for_them_where_frequencies_do_not_depend_on_the_length(parameters, is_ours):
    config = dataclasses.replace(llama.TINY, dtype="bfloat16", head_dim=64, rope_parameters=parameters)
    ir = llama.build(config).export(llama.export_spec(config))
    methods = nn.compile(ir, target="cuda:sm_90").program.methods
    for name, expected in (("decode", is_ours), ("prefill", False), ("logits", False)):
        kernels = [run.kernel for run in methods[name].body.walk()]
        assert kernels.count("triton_rope_angles") == expected
        assert ("cos" in kernels) != expected
