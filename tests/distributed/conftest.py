# SPDX-License-Identifier: Apache-2.0
"""Folders of tiny models whose sizes divide by 4, and ranks that have run them: started once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))

from configurations import with_random_weights
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3_moe": SMALL | EXPERTS | {"mlp_only_layers": [0]},
    "deepseek_v3": SMALL
    | EXPERTS
    | {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "qwen3_next": SMALL
    | EXPERTS
    | {
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 8,
        "linear_num_value_heads": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each of `MODELS`: transformers' model with random weights in float32, and ids."""
    root = tmp_path_factory.mktemp("models")
    for name, sizes in MODELS.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **sizes)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with_random_weights(model).save_pretrained(root / name)
        torch.save(torch.randint(0, 101, (2, 12)), root / name / "ids.pt")
    return {name: root / name for name in MODELS}


@pytest.fixture(scope="session", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ran(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: Any
) -> list[dict[str, Any]]:
    """What each rank of so many has found; see worker.py."""
    out = tmp_path_factory.mktemp("ranks")
    for rank in range(request.param):  # as many checkpoints of one shape, each of its own training
        torch.manual_seed(rank)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
        with_random_weights(model).save_pretrained(out / f"unlike{rank}")
    models = {name: (str(folder), None) for name, folder in folders.items()}
    models["llama int4"] = (str(folders["llama"]), "int4")
    (out / "task.json").write_text(
        json.dumps({"out": str(out), "models": models, "unlike": str(out / "unlike")})
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={request.param}",
    ]
    worker = Path(__file__).parent / "worker.py"
    subprocess.run(
        [*command, str(worker), str(out / "task.json")],
        check=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return [torch.load(out / f"{rank}.pt") for rank in range(request.param)]
