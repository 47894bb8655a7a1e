# SPDX-License-Identifier: Apache-2.0
"""Long prompts: what they take besides the cache does not grow with them. Attention of a block of one computes attention to all that came before."""

import dataclasses
from pathlib import Path

import pytest
import torch
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_checks import measured_peak
from nnfront_models import llama

import nnfront as nn
from nnfront.artefact.manifest import TextModel
from nnfront.backends.cpu import attention_blocks
from nnfront.backends.cpu.attention_blocks import in_blocks
from nnfront.backends.cpu.attention_memory import NEAR
from nnfront.state.lengths import SequenceLengths

SIZE = 64


def operands(seq: int, stored: int, heads: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = (1, seq, heads, SIZE), (1, groups, stored, SIZE), (1, groups, stored, SIZE)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def exact(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    shared, seq, stored = q.shape[2] // keys.shape[1], q.shape[1], keys.shape[2]
    keys, values = (t.double().repeat_interleave(shared, 1) for t in (keys, values))
    scores = q.transpose(1, 2).double() @ keys.mT * 0.2
    hidden = torch.ones(seq, stored, dtype=torch.bool).triu(stored - seq + 1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(1, 2)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_pieces_of_keys_are_put_together_to_attention_to_all(data: st.DataObject) -> None:
    seq, before = data.draw(st.integers(9, 150)), data.draw(st.integers(0, 400))
    groups, dtype = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    given_ = operands(seq, before + seq, groups * data.draw(st.integers(1, 3)), groups, dtype)
    given_[0] *= data.draw(st.sampled_from([1, 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "NEAR", data.draw(st.sampled_from([64, 96, 256])))
        y = in_blocks(*given_, SequenceLengths(()), 0.2)
    assert y.dtype == dtype
    close = 1e-4 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(y.double(), exact(*given_), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_block_holds_does_not_grow_with_what_came_before(dtype: torch.dtype) -> None:
    peaks = []
    for stored in (3 * NEAR, 9 * NEAR):
        q, keys, values = operands(256, stored, 8, 2, dtype)
        run = in_blocks(q, keys, values, SequenceLengths(()), 0.2)  # what libraries keep is there then
        peaks.append(measured_peak(lambda: in_blocks(q, keys, values, SequenceLengths(()), 0.2)))  # noqa: B023
        assert run.isfinite().all()
    assert peaks[1] <= peaks[0] + (64 << 10)
    # Less than the mask of a block that saw all of it would take.
    assert peaks[1] < 64 * 4 * 9 * NEAR * dtype.itemsize


LONG = 8192
CONFIG = dataclasses.replace(
    llama.TINY,
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LONG + 1,
    dtype="bfloat16",
)


@pytest.mark.parametrize("format", few_of([None, "int4", "int8"], 2))
def test_a_prompt_of_8192_tokens_takes_no_more_besides_its_cache_than_one_of_512(format):
    model = llama.build(CONFIG)
    ir = model.export(llama.export_spec(CONFIG))
    ir = ir if format is None else nn.passes.quantize_weights(ir, format)
    sizes = {name: [int(s) for s in p.shape] for name, p in model.named_parameters()}
    weights = {name: torch.randn(shape).bfloat16() / 20 for name, shape in sizes.items()}
    session = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(weights)
    assert format is None or any(format in name.split(".") for name in session.weights)
    llm = nn.LLM(session, TextModel("llama", CONFIG.vocab_size, LONG + 1), CONFIG, Path())
    ids = torch.randint(CONFIG.vocab_size, (1, LONG))

    def beyond_cache(count: int) -> int:
        taken = measured_peak(lambda: llm.generate_ids(ids[:, :count], max_new_tokens=1))
        return taken - session.make_cache(batch=1, max_seq=count + 1).nbytes

    llm.generate_ids(ids[:, :1024], max_new_tokens=1)  # what libraries keep is there then
    short, long = beyond_cache(512), beyond_cache(LONG)
    assert long <= short + (
        1 << 20
    )  # a mask of one call alone, of 512 tokens beside 8,192, would take eight times as much
