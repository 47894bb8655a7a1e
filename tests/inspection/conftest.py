# SPDX-License-Identifier: Apache-2.0
"""A folder with the dims of a model of 70 billion parameters: its config.json, and no weights."""

import json
from pathlib import Path

import pytest

CONFIG = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "llama-70b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
