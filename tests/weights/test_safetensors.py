# SPDX-License-Identifier: Apache-2.0
"""Headers: what the safetensors library writes is read, and whatever is wrong is named before data is looked at."""

import json
import struct
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from nnfront.errors import LoadError
from nnfront.weights.safetensors import DTYPES, MAX_HEADER_BYTES, read_header

PAIR = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.arange(4, dtype=torch.int8)}
ENTRY_A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
ENTRY_B = {"dtype": "I8", "shape": [4], "data_offsets": [24, 28]}


def file_of(tmp_path: Path, header: object, data: bytes = bytes(28)) -> Path:
    """A file with this header, an object or its text, in front of `data`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def message(file: Path) -> str:
    with pytest.raises(LoadError) as caught:
        read_header(file)
    return str(caught.value)


def test_header_agrees_with_the_reference_library(tmp_path: Path):
    file = tmp_path / "x.safetensors"
    save_file(
        {**PAIR, "scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)}, file, metadata={"format": "pt"}
    )
    header = read_header(file)
    with safetensors.safe_open(file, "pt") as peer:
        assert sorted(header.tensors) == sorted(peer.keys())
        assert header.metadata == peer.metadata()
        shapes = {name: list(info.shape) for name, info in header.tensors.items()}
        assert shapes == {name: peer.get_slice(name).get_shape() for name in peer.keys()}
    data = file.read_bytes()
    for name in PAIR:
        info = header.tensors[name]
        assert data[info.offset : info.offset + info.size_bytes] == PAIR[name].numpy().tobytes()


@pytest.mark.parametrize(
    "file_dtype", [d for d in DTYPES if isinstance(getattr(torch, DTYPES[d][0], None), torch.dtype)]
)
def test_dtype_names_and_sizes_are_those_of_torch(file_dtype: str):
    name, bits = DTYPES[file_dtype]
    assert getattr(torch, name).itemsize * 8 == bits
    assert f'"{file_dtype}"'.encode() in save({"x": torch.zeros(1, dtype=getattr(torch, name))})


def test_headers_only_reads_a_file_without_its_data(tmp_path: Path):
    file = file_of(tmp_path, {"a": ENTRY_A, "b": ENTRY_B}, data=b"")
    assert list(read_header(file, headers_only=True).tensors) == ["a", "b"]
    assert "truncated" in message(file)


WRONG = {
    "truncated": ({"a": ENTRY_A, "b": ENTRY_B}, bytes(27), r"the file is truncated: 162 bytes, but the header describes 163"),
    "longer": ({"a": ENTRY_A}, bytes(25), r"1 bytes follow the last tensor"),
    "not_json": (b"{", b"", r"the header is not JSON: "),
    "not_utf8": (b"\xff\xff", b"", r"the header is not JSON: 'utf-8' codec"),
    "not_an_object": ([1], b"", r"the header is not a JSON object"),
    "nan": (b'{"a": NaN}', b"", r"the header is not JSON: NaN is not a JSON number"),
    "deep": (b"[" * 100_000, b"", r"the header is not JSON: it is nested more than 100 deep"),
    "huge_int": (b'{"a": ' + b"9" * 5000 + b"}", b"", r"the header is not JSON: it holds a number of 5000 digits, 400 are the most"),
    "duplicate": (b'{"a": {"shape": [1], "shape": [2]}}', b"", r"the header is not JSON: 'shape' occurs twice"),
    "duplicate_name": (b'{"a": {}, "a": {}}', b"", r"the header is not JSON: 'a' occurs twice"),
    "not_an_entry": ({"a": 3}, b"", r"tensor 'a': needs dtype, shape and data_offsets"),
    "unknown_dtype": ({"a": {**ENTRY_A, "dtype": "F33"}}, bytes(24), r"tensor 'a': unknown dtype 'F33'"),
    "dtype_is_a_list": ({"a": {**ENTRY_A, "dtype": ["F32"]}}, bytes(24), r"tensor 'a': unknown dtype \['F32'\]"),
    "negative_size": ({"a": {**ENTRY_A, "shape": [-2, -3]}}, bytes(24), r"the shape \[-2, -3\] must be a list of sizes"),
    "bool_size": ({"a": {**ENTRY_A, "shape": [True, 6]}}, bytes(24), r"the shape \[True, 6\] must be a list of sizes"),
    "float_size": ({"a": {**ENTRY_A, "shape": [2.0, 3]}}, bytes(24), r"the shape \[2.0, 3\] must be a list of sizes"),
    "many_axes": ({"a": {**ENTRY_A, "shape": [1] * 65}}, bytes(24), r"the shape \[1, 1, .*\.\.\. must be a list of sizes"),
    "offsets_backwards": ({"a": {**ENTRY_A, "data_offsets": [24, 0]}}, bytes(24), r"data_offsets \[24, 0\] must be"),
    "three_offsets": ({"a": {**ENTRY_A, "data_offsets": [0, 24, 24]}}, bytes(24), r"data_offsets \[0, 24, 24\] must be"),
    "wrong_bytes": ({"a": {**ENTRY_A, "shape": [2, 4]}}, bytes(24), r"F32 \[2, 4\] takes 32 bytes, but .* span 24"),
    "half_a_byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"1", r"F4 \[3\] takes 1.5 bytes"),
    "gap": ({"a": ENTRY_A, "b": {**ENTRY_B, "data_offsets": [25, 29]}}, bytes(29), r"'b': leaves a gap before it.*begins at 25, expected 24"),
    "overlap": ({"a": ENTRY_A, "b": {**ENTRY_B, "data_offsets": [20, 24]}}, bytes(24), r"'b': overlaps the tensor before it"),
    "too_many_tensors": (dict.fromkeys(map(str, range(250_001))), b"", r"the header describes 250001 tensors; 250000 are the most"),
    "product_of_sizes": ({"a": {**ENTRY_A, "shape": [2**62] * 64}}, bytes(24), r"takes 1\.\d+e\+1195 bytes, but .* span 24"),
    "metadata": ({"__metadata__": {"n": 1}}, b"", r"__metadata__ must be an object of strings"),
    "control_character": ({"a\n": ENTRY_A}, bytes(24), r"tensor 'a\\n': the name holds characters that cannot be printed"),
}  # fmt: skip


@pytest.mark.parametrize(("header", "data", "text"), WRONG.values(), ids=WRONG)
def test_a_broken_header_is_an_error_that_says_why(tmp_path: Path, header: object, data: bytes, text: str):
    file = file_of(tmp_path, header, data)
    with pytest.raises(LoadError, match=text) as caught:
        read_header(file)
    assert str(caught.value).startswith(f"{file} is not a valid safetensors file\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "the file has 0 bytes; 8 bytes of header length are the least"),
        (b"\1\0\0", "the file has 3 bytes"),
        (struct.pack("<q", -1), f"the header length is {2**64 - 1} bytes; {MAX_HEADER_BYTES} are the most"),
        (struct.pack("<Q", 10) + b"{}", "the header length is 10 bytes, but only 2 follow"),
    ],
)
def test_a_header_length_that_lies_is_found_before_anything_is_read(
    tmp_path: Path, content: bytes, text: str
):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    assert text in message(file)


def test_all_problems_are_listed_at_once(tmp_path: Path):
    file = file_of(tmp_path, {"a": {**ENTRY_A, "dtype": "X"}, "b": {**ENTRY_B, "shape": [5]}, "c": 1})
    text = message(file)
    assert "tensor 'a'" in text
    assert "tensor 'b'" in text
    assert "tensor 'c'" in text


def test_a_file_that_is_absent_or_a_folder_is_an_error(tmp_path: Path):
    assert "it cannot be read: No such file" in message(tmp_path / "absent.safetensors")
    assert "it cannot be read: it is a folder, not a regular file" in message(tmp_path)


@given(
    edits=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 60),
)
@settings(max_examples=100, deadline=None)
def test_a_mutated_file_is_an_error_or_means_what_the_reference_library_reads(tmp_path_factory, edits, cut):
    content = bytearray(save({**PAIR, "c": torch.ones(2, 2, dtype=torch.bfloat16)}, {"format": "pt"}))
    for place, byte in edits:
        content[place % len(content)] = byte
    if cut < 8:  # in one of eight cases
        del content[len(content) - cut :]
    file = tmp_path_factory.mktemp("mutated") / "x.safetensors"
    file.write_bytes(content)
    try:
        ours = {name: list(info.shape) for name, info in read_header(file).tensors.items()}
    except LoadError:
        return
    with safetensors.safe_open(file, "pt") as peer:
        assert ours == {name: peer.get_slice(name).get_shape() for name in peer.keys()}
