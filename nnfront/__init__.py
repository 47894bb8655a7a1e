# SPDX-License-Identifier: Apache-2.0
"""Write a neural network, export it, and ship it.

    import nnfront as nn
    from nnfront import op, spec

The rooms, in reading order; each imports only from those above it, `kernels/` from none:

    errors, dims, dtypes   what everything stands on
    ir                     types, expressions, text form, verifier
    ops                    the vocabulary: type rule + torch reference + docs
    nn                     the author's API: Module, Parameter, derived tensors, layers, spec, export
    compat                 other frontends' names for what is above
    passes                 IRModule -> IRModule
    lower, memory          IRModule -> Program, and what it holds in memory
    backends               the kernels of each target, and which of them runs a call
    state, runtime         caches; the path of a call
    transform, weights     the weight transform; checkpoints
    session, compiler      the whole path
    distributed            several processes that compute one model
    artefact, llm          compiled models as folders; language models
    vllm                   models as plugins of vLLM
    inspection, cli        models as data, as a page, compared; the command line

Names are resolved on first use, so that importing the package is quick.
"""

from __future__ import annotations

import importlib
from typing import Any

from nnfront.errors import UnknownName, nearest

__version__ = "0.1.0"

# The names by the module below this one that has them, and the modules that are public themselves.
_NAMES: dict[str, list[str]] = {
    "artefact.loader": ["load"],
    "backends.backend": ["Backend"],
    "backends.kernel": ["Kernel"],
    "backends.registry": ["backend_of"],
    "compiler": ["Executable", "check", "compile"],
    "dims": ["Dim"],
    "inspection.compare": ["diff"],
    "inspection.write_page": ["page"],
    "llm.calibrate": ["calibrate"],
    "llm.embedder": ["Embedder"],
    "llm.evaluate": ["evaluate"],
    "llm.find_model": ["find_model", "model_name"],
    "llm.hf_folder": ["compile_folder", "export_folder"],
    "llm.language_model": ["LLM"],
    "llm.load_options": ["kind_of_model"],
    "llm.methods": ["Methods"],
    "llm.seq2seq": ["Seq2Seq"],
    "llm.sounds": ["read_wav"],
    "llm.speed": ["Speed", "measure_speed"],
    "llm.verify": ["verify"],
    "llm.vision_language": ["VisionLanguageModel"],
    "nn.activations": ["ACTIVATIONS"],
    "nn.alibi": ["ALiBi"],
    "nn.cache": ["Cache", "CacheLayer"],
    "nn.causal_lm": ["CausalLM", "NO_CACHE", "NoCache", "causal_lm_spec"],
    "nn.config": ["Config", "DecoderConfig", "USUALLY_DIVIDED", "WindowedConfig"],
    "nn.containers": ["ModuleDict", "ModuleList", "ParameterDict", "ParameterList", "Sequential"],
    "nn.conv": ["Conv1D", "Conv2D", "Conv3D", "ConvTranspose1D"],
    "nn.decoder": ["Attention", "Decoder", "DecoderLayer", "ScaledEmbedding", "decoder_spec"],
    "nn.eager": ["eager"],
    "nn.effect": ["Effect"],
    "nn.encoder": ["encoder_spec", "mean_of_tokens"],
    "nn.encoder_decoder": [
        "EncoderDecoder",
        "KeysAndValues",
        "Memory",
        "cross_attention",
        "encoder_decoder_spec",
    ],
    "nn.experts": [
        "EXPERT_ACTIVATIONS",
        "Experts",
        "MixtureOfExperts",
        "Router",
        "StackedExperts",
        "top_experts",
    ],
    "nn.functional": ["op"],
    "nn.gated": ["GatedAttention", "GatedRMSNorm"],
    "nn.latent_attention": ["LatentAttention"],
    "nn.layers": [
        "Dropout",
        "Embedding",
        "GELU",
        "GroupNorm",
        "Identity",
        "LayerNorm",
        "Linear",
        "RMSNorm",
        "ReLU",
        "SiLU",
        "Sigmoid",
        "Softmax",
        "Tanh",
    ],
    "nn.module": ["Module"],
    "nn.multi_token": ["MultiTokenLM", "MultiTokenLayer"],
    "nn.mutator": ["Mutator"],
    "nn.opaque": ["Object"],
    "nn.parameter": ["Parameter", "default_dtype", "get_default_dtype", "joined", "set_default_dtype"],
    "nn.projections": ["Fused", "GateUpMLP", "GatedMLP", "MLP", "pairs_as_halves", "part_by_part"],
    "nn.ranks": ["Plan", "divide"],
    "nn.recurrent": [
        "CausalConv",
        "DeltaSizes",
        "GatedDeltaNet",
        "Mamba2Mixer",
        "Mamba2Sizes",
        "conv_state",
        "step_limits",
    ],
    "nn.rotary": ["ROPE_KEYS", "RotaryByLayerType", "RotaryEmbedding", "Rotation", "rope_parameters"],
    "nn.tensor": ["Tensor"],
    "ops": ["register_extern"],
    "passes": ["causal", "multiple_of", "zeros"],
    "plugins": ["register_kernel", "unregister_kernel"],
    "session": ["Session"],
    "verify_special_cases": ["verify_variants"],
    "weights": ["Checkpoint"],
}
_MODULES = {
    "artefact": "artefact",
    "dims": "dims",
    "errors": "errors",
    "ir": "ir",
    "passes": "passes",
    "spec": "nn.spec",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names} | _MODULES

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        # Tools ask for names with an underscore again and again.
        near = "" if name.startswith("_") else nearest(name, _MODULE_OF)
        raise UnknownName(f"module 'nnfront' has no attribute {name!r}", help=near)
    if name == "ir":
        importlib.import_module("nnfront.ops")  # the parser finds ops by name once they are declared
    module = importlib.import_module(f"nnfront.{_MODULE_OF[name]}")
    found = globals()[name] = module if name in _MODULES else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
