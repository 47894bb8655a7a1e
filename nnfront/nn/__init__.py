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

from typing import Any

import nnfront


def __getattr__(name: str) -> Any:
    """The public names are here as well: whoever has `nnfront.nn` finds what `nnfront` has."""
    return getattr(nnfront, name)
