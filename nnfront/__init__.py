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

# public name -> (module, name in it; empty for the module itself)
_PUBLIC: dict[str, tuple[str, str]] = {
    **{name: ("nnfront.dims", name) for name in ("Dim",)},
    **{
        name: ("nnfront.nn", name)
        for name in (
            "ACTIVATIONS",
            "ALiBi",
            "Attention",
            "Cache",
            "CacheLayer",
            "CausalConv",
            "CausalLM",
            "Config",
            "Conv1D",
            "Conv2D",
            "Conv3D",
            "ConvTranspose1D",
            "Decoder",
            "DecoderConfig",
            "DecoderLayer",
            "DeltaSizes",
            "Dropout",
            "EncoderDecoder",
            "EXPERT_ACTIVATIONS",
            "Effect",
            "Embedding",
            "Experts",
            "Fused",
            "GELU",
            "GateUpMLP",
            "GatedAttention",
            "GatedDeltaNet",
            "GatedMLP",
            "GatedRMSNorm",
            "GroupNorm",
            "Identity",
            "KeysAndValues",
            "LatentAttention",
            "LayerNorm",
            "Linear",
            "Mamba2Mixer",
            "Mamba2Sizes",
            "Memory",
            "MixtureOfExperts",
            "MLP",
            "Module",
            "ModuleDict",
            "ModuleList",
            "MultiTokenLayer",
            "MultiTokenLM",
            "Mutator",
            "NO_CACHE",
            "NoCache",
            "Object",
            "Parameter",
            "ParameterDict",
            "ParameterList",
            "Plan",
            "RMSNorm",
            "ROPE_KEYS",
            "ReLU",
            "RotaryByLayerType",
            "RotaryEmbedding",
            "Rotation",
            "Router",
            "ScaledEmbedding",
            "Sequential",
            "SiLU",
            "Sigmoid",
            "Softmax",
            "StackedExperts",
            "Tanh",
            "Tensor",
            "USUALLY_DIVIDED",
            "WindowedConfig",
            "causal_lm_spec",
            "conv_state",
            "cross_attention",
            "decoder_spec",
            "default_dtype",
            "divide",
            "eager",
            "encoder_decoder_spec",
            "encoder_spec",
            "get_default_dtype",
            "joined",
            "mean_of_tokens",
            "pairs_as_halves",
            "part_by_part",
            "rope_parameters",
            "set_default_dtype",
            "step_limits",
            "top_experts",
        )
    },
    "Backend": ("nnfront.backends.backend", "Backend"),
    "Kernel": ("nnfront.backends.kernel", "Kernel"),
    "backend_of": ("nnfront.backends.registry", "backend_of"),
    "Checkpoint": ("nnfront.weights", "Checkpoint"),
    "Embedder": ("nnfront.llm.embedder", "Embedder"),
    "Executable": ("nnfront.compiler", "Executable"),
    "LLM": ("nnfront.llm.language_model", "LLM"),
    "Seq2Seq": ("nnfront.llm.seq2seq", "Seq2Seq"),
    "Session": ("nnfront.session", "Session"),
    "Speed": ("nnfront.llm.speed", "Speed"),
    "VisionLanguageModel": ("nnfront.llm.vision_language", "VisionLanguageModel"),
    "artefact": ("nnfront.artefact", ""),
    "causal": ("nnfront.passes", "causal"),
    "check": ("nnfront.compiler", "check"),
    "compile": ("nnfront.compiler", "compile"),
    "compile_folder": ("nnfront.llm.hf_folder", "compile_folder"),
    "diff": ("nnfront.inspection.compare", "diff"),
    "dims": ("nnfront.dims", ""),
    "calibrate": ("nnfront.llm.calibrate", "calibrate"),
    "errors": ("nnfront.errors", ""),
    "evaluate": ("nnfront.llm.evaluate", "evaluate"),
    "Methods": ("nnfront.llm.methods", "Methods"),
    "export_folder": ("nnfront.llm.hf_folder", "export_folder"),
    "find_model": ("nnfront.llm.find_model", "find_model"),
    "ir": ("nnfront.ir", ""),
    "kind_of_model": ("nnfront.llm.kind", "kind_of_model"),
    "load": ("nnfront.artefact.loader", "load"),
    "measure_speed": ("nnfront.llm.speed", "measure_speed"),
    "model_name": ("nnfront.llm.find_model", "model_name"),
    "multiple_of": ("nnfront.passes", "multiple_of"),
    "op": ("nnfront.nn.functional", "op"),
    "page": ("nnfront.inspection.write_page", "page"),
    "passes": ("nnfront.passes", ""),
    "read_wav": ("nnfront.llm.sounds", "read_wav"),
    "register_extern": ("nnfront.ops", "register_extern"),
    "register_kernel": ("nnfront.plugins", "register_kernel"),
    "unregister_kernel": ("nnfront.plugins", "unregister_kernel"),
    "spec": ("nnfront.nn.spec", ""),
    "verify": ("nnfront.llm.verify", "verify"),
    "verify_variants": ("nnfront.verify_special_cases", "verify_variants"),
    "zeros": ("nnfront.passes", "zeros"),
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        near = "" if name.startswith("_") else nearest(name, _PUBLIC)  # tools ask for those again and again
        raise UnknownName(f"module 'nnfront' has no attribute {name!r}", help=near)
    if name == "ir":
        importlib.import_module("nnfront.ops")  # the parser finds ops by name once they are declared
    module, attribute = _PUBLIC[name]
    found = importlib.import_module(module)
    if attribute:
        found = getattr(found, attribute)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
