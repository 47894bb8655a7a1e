# SPDX-License-Identifier: Apache-2.0
"""Special cases of methods over a state of all kinds give what the general function gives, and leave what it leaves."""

import pytest
import state_models
import torch

import nnfront as nn
from nnfront.errors import RunError

KINDS = "rkwsmr"


def parts(kinds=KINDS):
    torch.manual_seed(0)
    config = state_models.Config(kinds=kinds)
    model = state_models.build(config)
    weights = {name: torch.randn([int(n) for n in p.shape]) * 0.3 for name, p in model.named_parameters()}
    return model.export(state_models.export_spec(config)), weights


def compiled(ir, weights):
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(weights)


@pytest.fixture(scope="module")
def sessions():
    ir, weights = parts()
    special = nn.passes.special_cases(ir, "decode", [{"batch": 1}])
    special = nn.passes.special_cases(special, "prefill", [{"batch": 1, "seq": nn.multiple_of(4)}])
    return compiled(ir, weights), compiled(special, weights)


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_case_gives_and_leaves_what_the_general_function_does(sessions, batch, page_size):
    ids = torch.randint(0, 61, (batch, 20))
    results = []
    for session in sessions:
        cache = session.make_cache(batch=batch, max_seq=32, page_size=page_size)
        got = [session["prefill"](ids[:, :8], cache)]
        got += [session["decode"](ids[:, i : i + 1], cache) for i in range(8, 20)]
        kept = [layer.read(b.name) for layer in cache for b in layer.type.per_sequence]
        kept += [layer.stored(i) for layer in cache for i in range(len(layer.type.per_token))]
        results.append((got, kept, cache.lengths))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_a_row_of_a_state_takes_the_case_of_one_sequence(sessions):
    general, special = sessions
    ids = torch.randint(0, 61, (2, 9))
    caches = [session.make_cache(batch=2, max_seq=32) for session in sessions]
    before = special.hits("decode")["batch == 1"]
    for session, cache in zip(sessions, caches, strict=True):
        session["prefill"](ids, cache)
        session["decode"](ids[:1, :1], cache.rows(0))
        session["decode"](ids[1:, 1:2], cache.rows(1))
    token = ids[:, 2:3]
    torch.testing.assert_close(special["decode"](token, caches[1]), general["decode"](token, caches[0]))
    assert special.hits("decode")["batch == 1"] == before + 2


def test_verify_variants_tries_them(sessions):
    report = nn.verify_variants(sessions[1], "decode")
    assert [str(v.case) for v in report.variants] == ["batch == 1"]
    assert len(report.variants[0].sizes) == 3
    nn.verify_variants(sessions[1], "prefill")


@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ('activation="silu"', "activation=None", "in the result"),
        (
            "cache_write(cache_write, getitem_1",
            "cache_write(cache_write, cache_read_1",
            "in ssm of layer 0 of 'cache'",
        ),
        ("cache_positions(cache_layer, seq=1)", "cache_positions(cache_layer_1, seq=1)", None),
    ],
    ids=["the result", "what is kept", "nothing"],
)
def test_verify_variants_finds_one_that_is_wrong(right, wrong, found):
    ir, weights = parts("rk")
    text = str(nn.passes.special_cases(ir, "decode", [{"batch": 1}]))
    head, variant = text.split("case_0", 1)
    assert right in variant
    variant = variant.replace(right, wrong, 1)
    session = compiled(nn.ir.parse(f"{head}case_0{variant}"), weights)
    if found is None:
        nn.verify_variants(session, "decode")
        return
    with pytest.raises(RunError, match=r"the variant for 'batch == 1' is not what the general") as caught:
        nn.verify_variants(session, "decode")
    assert found in caught.value.details[0]
