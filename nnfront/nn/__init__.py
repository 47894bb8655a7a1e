# SPDX-License-Identifier: Apache-2.0
"""What an author of models writes with. `nnfront.op` is `functional`, `nnfront.spec` is `spec`.

Read the files in this order; each imports only from those above it:

    mode        what is active, a trace or an eager run, with source_location   shape   shapes as authors give them
    spec        what methods are called with
    foreign     torch, numpy and Python given tensors of ours, with elsewhere: what they call what is here
    tensor      Tensor: traced, formula or value; `apply`, the door of every op
    parameter   stored weights                 opaque, cache, effect   handles and state
    eager       running without a trace layer_equivalence  what makes two modules alike
    trace       ops to bindings, with trace_state, shared_layers, pytree    methods, dim_facts   methods to functions
    functional  the ops as functions           module          the tree, eager call, export
    containers, layers, conv, rotary, mutator, activations
    projections linear layers multiplied as one    causal_lm   what generates text    multi_token   and guesses several tokens    decoder   what most are made of    alibi
    experts     mixtures of experts    latent_attention   keys and values of low rank
    gated       parts under a gate             recurrent   parts that keep a state of a fixed size
    config      config.json, read and proved    encoder, encoder_decoder   what encoders of text share, and what writes about what one has read
    ranks       a model divided among several processes
"""

from nnfront.nn.activations import ACTIVATIONS
from nnfront.nn.alibi import ALiBi
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.causal_lm import NO_CACHE, CausalLM, NoCache, causal_lm_spec
from nnfront.nn.config import USUALLY_DIVIDED, Config, DecoderConfig, WindowedConfig
from nnfront.nn.containers import ModuleDict, ModuleList, ParameterDict, ParameterList, Sequential
from nnfront.nn.conv import Conv1D, Conv2D, Conv3D, ConvTranspose1D
from nnfront.nn.decoder import Attention, Decoder, DecoderLayer, ScaledEmbedding, decoder_spec
from nnfront.nn.eager import eager
from nnfront.nn.effect import Effect
from nnfront.nn.encoder import encoder_spec, mean_of_tokens
from nnfront.nn.encoder_decoder import (
    EncoderDecoder,
    KeysAndValues,
    Memory,
    cross_attention,
    encoder_decoder_spec,
)
from nnfront.nn.experts import (
    EXPERT_ACTIVATIONS,
    Experts,
    MixtureOfExperts,
    Router,
    StackedExperts,
    top_experts,
)
from nnfront.nn.gated import GatedAttention, GatedRMSNorm
from nnfront.nn.latent_attention import LatentAttention
from nnfront.nn.layers import (
    GELU,
    Dropout,
    Embedding,
    GroupNorm,
    Identity,
    LayerNorm,
    Linear,
    ReLU,
    RMSNorm,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from nnfront.nn.module import Module
from nnfront.nn.multi_token import MultiTokenLayer, MultiTokenLM
from nnfront.nn.mutator import Mutator
from nnfront.nn.opaque import Object
from nnfront.nn.parameter import Parameter, default_dtype, get_default_dtype, joined, set_default_dtype
from nnfront.nn.projections import MLP, Fused, GatedMLP, GateUpMLP, pairs_as_halves, part_by_part
from nnfront.nn.ranks import Plan, PlannedWeight, divide
from nnfront.nn.recurrent import (
    CausalConv,
    DeltaSizes,
    GatedDeltaNet,
    Mamba2Mixer,
    Mamba2Sizes,
    conv_state,
    step_limits,
)
from nnfront.nn.rotary import ROPE_KEYS, RotaryByLayerType, RotaryEmbedding, Rotation, rope_parameters
from nnfront.nn.tensor import Tensor
