# SPDX-License-Identifier: Apache-2.0
"""Damaged GGUF files, and files whose metadata lie: a LoadError that says what is wrong, or the model that was written; never anything else."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from few_of import few_of
from folders import llama
from gguf_files import write

import nnfront as nn
from nnfront.errors import LoadError, NnfrontError
from nnfront.llm.gguf_folder import GgufFolder

TINY = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
IDS = torch.tensor([[1, 5, 2]])
TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "d", "e", "f", "</s>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 1, 3],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A file, and where its data begin."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write(path, llama(**TINY), types="Q8_0", metadata=TOKENS)
    checkpoint = nn.Checkpoint(path)
    return path.read_bytes(), min(info.offset for info in checkpoint.infos.values())


def mutated(data: bytes, header: int, draw: random.Random) -> bytes:
    """One of the ways in which a header can be wrong."""
    new = bytearray(data)
    at = draw.randrange(header)
    match draw.randrange(5):
        case 0:
            new[at] ^= 1 << draw.randrange(8)
        case 1:
            new[at] = draw.randrange(256)
        case 2:
            numbers = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 2**40, draw.randrange(1 << 16))
            new[at : at + 8] = struct.pack("<Q", draw.choice(numbers))[: max(header - at, 0)]
        case 3:
            del new[draw.randrange(len(new)) :]
        case _:
            other, count = draw.randrange(header), draw.randrange(1, 40)
            new[at : at + count] = new[other : other + count]
    return bytes(new)


@pytest.mark.parametrize("seed", few_of(range(4)))
def test_500_mutations_are_refused_or_are_what_a_file_may_say(
    written: tuple[bytes, int], tmp_path: Path, seed: int
) -> None:
    data, header = written
    draw, path = random.Random(seed), tmp_path / "m.gguf"
    refusals, read = [], 0
    for _ in range(500):
        path.write_bytes(mutated(data, header, draw))
        try:
            checkpoint = nn.Checkpoint(path)
            for info in checkpoint.infos.values():
                assert info.offset + info.size_bytes <= path.stat().st_size
                assert checkpoint.tensor(info.name).nbytes == info.size_bytes
            folder = GgufFolder(path)
            folder.read_json("config.json")
            read += 1
        except LoadError as error:
            refusals.append(str(error))
    assert min(read, len(refusals)) > 20
    assert all(str(path) in text for text in refusals)


def test_mutations_that_are_read_load_or_are_refused(written: tuple[bytes, int], tmp_path: Path) -> None:
    data, header = written
    draw, path = random.Random(9), tmp_path / "m.gguf"
    path.write_bytes(data)
    expected, right = nn.LLM.load(path).logits(IDS), 0
    for _ in range(60):
        path.write_bytes(mutated(data, header, draw))
        try:
            got = nn.LLM.load(path).logits(IDS)
        except NnfrontError:
            continue
        right += torch.equal(got, expected)
    assert right > 5


def test_a_file_that_ends_early_says_so_and_is_checked_by_its_header(
    written: tuple[bytes, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, header = written
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:-100])
    with pytest.raises(LoadError, match=r"the file is truncated: \d+ bytes, but the header describes \d+"):
        nn.LLM.load(path)
    path.write_bytes(data[: header // 2])
    with pytest.raises(LoadError, match="the file is truncated"):
        nn.Checkpoint(path)


def changed(data: bytes, key: bytes, offset: int, value: bytes) -> bytes:
    """Other bytes behind a key or a name."""
    at = data.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + offset
    return data[:at] + value + data[at + len(value) :]


NAME = b"blk.0.ffn_up.weight"
LIES = {
    "unknown type": (NAME, 20, struct.pack("<I", 99), "tensor 'blk.0.ffn_up.weight': it is of type 99, which is not read; those are F32, F16, Q4_0"),
    "type that is not read": (NAME, 20, struct.pack("<I", 16), "it is of type 16 (IQ2_XXS), which is not read"),
    "larger than it is": (NAME, 20, struct.pack("<I", 0), "its data begin at"),
    "rows that are no blocks": (NAME, 4, struct.pack("<Q", 33), "its rows of 33 are no whole number of blocks of 32 (Q8_0)"),
    "too many axes": (NAME, 0, struct.pack("<I", 5), "tensor 'blk.0.ffn_up.weight' has 5 axes; 4 are the most"),
    "sizes beyond all files": (NAME, 4, struct.pack("<QQ", 2**62, 2**62), "are more than a file can hold"),
    "offset": (NAME, 24, struct.pack("<Q", 32), "its data begin at 32, expected"),
    "a list of more than there is": (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**20), "bytes, and its header goes on"),
    "a list of more than there may be": (b"tokenizer.ggml.tokens", 8, struct.pack("<Q", 2**40), f"a list has {2**40} items"),
    "a type of value that there is not": (b"llama.block_count", 0, struct.pack("<I", 77), "a value is of type 77, which there is not"),
    "layers that are not there": (b"llama.block_count", 4, struct.pack("<I", 2), "missing: 'model.layers.1.input_layernorm.weight'"),
    "as many layers as numbers": (b"llama.block_count", 4, struct.pack("<I", 2**31 - 1), "the model is larger than it can be"),
    "no layers": (b"llama.block_count", 4, struct.pack("<I", 0), "block_count is 0, expected an int >= 1"),
    "another width": (b"llama.embedding_length", 4, struct.pack("<I", 64), "12 of another shape"),
    "heads": (b"llama.attention.head_count_kv", 4, struct.pack("<I", 2), "of another shape"),
    "vocabulary": (b"llama.vocab_size", 4, struct.pack("<I", 9), "vocab_size is 9, expected 8"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "offset", "value", "problem"), LIES.values(), ids=LIES)
def test_metadata_that_lie_are_refused(
    written: tuple[bytes, int], tmp_path: Path, key: bytes, offset: int, value: bytes, problem: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(changed(written[0], key, offset, value))
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(path)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is truncated: 0 bytes, and its header goes on"),
        (b"GGML" + bytes(20), "it does not begin with GGUF"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "its version is 1, expected 2 or 3 (little-endian)"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "its version is 50331648"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), f"it says {2**60} tensors and 0 pairs of metadata"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "bytes, and its header goes on"),
    ],
)
def test_what_is_no_header_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(LoadError) as caught:
        nn.Checkpoint(tmp_path / "m.gguf")
    assert problem in str(caught.value)
