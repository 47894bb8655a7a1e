# SPDX-License-Identifier: Apache-2.0
"""Export the model files of a checkout of MLC-LLM. Usage: tvm_model_files.py tvm|nnfront CHECKOUT [NAME ...].

With `nnfront` the import lines of `tvm.relax.frontend.nn` are read as those of `nnfront.compat.tvm`; nothing else is replaced, and no
file is changed. The methods that make a paged cache are left out on both sides: they call MLC-LLM's own compiler. The last line printed is
JSON: by name "ok" or the first error, and of nnfront's the functions in TIR that it calls.
"""

import importlib
import json
import logging
import re
import sys
import types
from collections import defaultdict
from dataclasses import fields
from importlib.machinery import SourceFileLoader
from pathlib import Path

# For configs that no preset gives: every field of the name, in sizes that fit together.
SIZES = {
    **dict.fromkeys(["hidden_size", "n_embd", "attention_size", "attention_hidden_size"], 64),
    **dict.fromkeys(["intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_hidden_size"], 128),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["num_attention_heads", "n_head", "num_experts", "num_local_experts"], 4),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "num_key_value_heads"], 2),
    **dict.fromkeys(["head_dim", "head_size", "kv_channels", "rotary_dim"], 16),
    **dict.fromkeys(["rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"], 1e-5),
    **dict.fromkeys(["context_window_size", "max_position_embeddings", "n_positions"], 256),
    **dict.fromkeys(["attention_bias", "tie_word_embeddings", "use_qk_norm", "bias"], False),
    "vocab_size": 256,
    "prefill_chunk_size": 64,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "position_embedding_base": 10000,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "partial_rotary_factor": 0.5,
    "model_type": "llama",
    "model_version": "6_0",
    "rescale_every": 0,
    "sliding_window_size": 64,
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
    "attn_temperature_tuning": False,
    "floor_scale": 8192,
    "attn_scale": 0.1,
    "no_rope_layers": [1, 0],
    "no_rope_layer_interval": 2,
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 64,
    "rope_scaling": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
# What the sizes above leave open, or say otherwise.
OWN = {
    "llama4": {"text_config": {**SIZES, "rope_scaling": LLAMA3_ROPE, "use_qk_norm": True}},
    "gemma3": {"text_config": {**SIZES, "hidden_activation": "gelu_pytorch_tanh"}},
    "phi": {"hidden_act": "gelu_new"},
    "nemotron": {"hidden_act": "relu2"},
}
# Presets of a relative, and what they lack.
LIKE = {
    "qwen3_moe": (
        "qwen3",
        {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"decoder_sparse_step": 1},
    ),
    "qwen3-embedding": ("qwen3", {}),
    "olmo": ("olmo2", {"clip_qkv": None}),
    "bert-bge": ("bert", {}),
    "deepseek_v3": (
        "deepseek_v2",
        {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True}
        | {"scoring_func": "sigmoid"},
    ),
}
LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def opened(checkout: Path) -> None:
    """Let `mlc_llm` be imported from `checkout` without its compiled library, which its `__init__` loads."""
    package = types.ModuleType("mlc_llm")
    package.__path__ = [str(checkout / "python" / "mlc_llm")]
    sys.modules["mlc_llm"] = package
    from tvm import relax

    if not hasattr(relax, "Constant"):
        relax.Constant = type("Constant", (), {})  # the name of an annotation that newer TVMs lack


def ported(checkout: Path) -> None:
    """Read the checkout's files as if their import lines said `nnfront.compat.tvm`."""
    read = SourceFileLoader.get_data

    def get_data(self, path):
        data = read(self, path)
        if not path.endswith(".py") or not Path(path).is_relative_to(checkout):
            return data
        return data.replace(
            b"from tvm.relax.frontend import nn", b"from nnfront.compat.tvm import nn"
        ).replace(b"tvm.relax.frontend.nn", b"nnfront.compat.tvm")

    sys.dont_write_bytecode = True
    SourceFileLoader.get_data = get_data


def small(value, key=""):
    """The preset with two layers."""
    if isinstance(value, dict):
        return {k: small(v, k) for k, v in value.items()}
    if key == "layer_types" and isinstance(value, list):
        return value[:2]
    return min(value, 2) if key in LAYERS and isinstance(value, int) else value


def config_of(name, cls, presets):
    """A small config of the class, and whether a preset gave it."""
    relative, more = LIKE.get(name, (name, {}))
    if found := presets[relative.replace("-", "_")]:
        return cls.from_dict(small(dict(found[0])) | more), True
    names = {f.name for f in fields(cls)}
    return cls.from_dict({k: v for k, v in (SIZES | OWN.get(name, {})).items() if k in names}), False


def exported(model):
    spec = model.get_default_spec()
    return model.export_tvm(spec=spec, allow_extern=True)[0]


def main() -> None:
    frontend, checkout, *only = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(20000)
    opened(Path(checkout))
    if frontend == "nnfront":
        ported(Path(checkout))
        from nnfront.compat.tvm import spec
    else:
        from tvm.relax.frontend.nn import spec

    read = spec.ModuleSpec.from_raw

    def without_creation(raw, module):
        if not isinstance(raw, dict):
            return raw
        kept = {k: v for k, v in raw.items() if not k.startswith(("create_", "_create"))}
        return read(kept, module)

    spec.ModuleSpec.from_raw = staticmethod(without_creation)
    presets = defaultdict(list)
    for preset in importlib.import_module("mlc_llm.model.model_preset").MODEL_PRESETS.values():
        presets[preset.get("model_type", "").replace("-", "_")].append(preset)
    results = {}
    for name, model in importlib.import_module("mlc_llm.model.model").MODELS.items():
        if only and name not in only:
            continue
        row = results[name] = {"preset": None, "result": "ok", "tir": []}
        try:
            config, row["preset"] = config_of(name, model.config, presets)
            for field, value in (("context_window_size", 512), ("prefill_chunk_size", 128)):
                if getattr(config, field, 1) in (0, None):
                    setattr(config, field, value)
            built = model.model(config)
            built.to("float16")
            ir = exported(built)
            row["tir"] = (
                sorted(set(re.findall(r'name="tir\.(\w+)"', str(ir)))) if frontend == "nnfront" else []
            )
        except Exception as error:
            if only:
                raise
            row["result"] = f"{type(error).__name__}: {error}".replace(str(checkout), "")
        print(name, row["result"].splitlines()[0][:150], file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
