# SPDX-License-Identifier: Apache-2.0
"""TVM's `relax.frontend.nn` under its own names: a model file ports by its import line.

    from nnfront.compat.tvm import nn, op, spec     # before: from tvm.relax.frontend import nn; from ...nn import op, spec

The package is laid out as TVM's, so `tvm.relax.frontend.nn` may be replaced by `nnfront.compat.tvm` wherever it stands. Meanings are
nnfront's (docs/tvm.md lists the differences); what cannot be had is an error that says what to write.

    op      the ops as functions, which are names of this package too         spec      what methods are called with
    core    Module, Object, tensors                                           modules   layers
    llm     the paged key/value cache as external functions                  absent    what has no counterpart
    lambdas ops of TE and TIR, and what a port writes for them
"""

import sys

from nnfront.compat.tvm import core, modules, op, spec
from nnfront.compat.tvm.absent import (
    ExternModule,
    IOEffect,
    KVCache,
    ObjectModule,
    SourceModule,
    add_extern,
)
from nnfront.compat.tvm.core import (
    Effect,
    IntExpr,
    Module,
    ModuleDict,
    ModuleList,
    Mutator,
    Object,
    Parameter,
    ParameterDict,
    ParameterList,
    SubroutineMixin,
    Tensor,
    get_default_dtype,
    set_default_dtype,
    wrap_nested,
)
from nnfront.compat.tvm.lambdas import register_lambda
from nnfront.compat.tvm.modules import (
    GELU,
    Conv1D,
    Conv2D,
    Conv3D,
    ConvTranspose1D,
    Embedding,
    GroupNorm,
    Identity,
    LayerNorm,
    Linear,
    ReLU,
    RMSNorm,
    SiLU,
)

nn = sys.modules[__name__]
globals().update({name: getattr(op, name) for name in op.__all__})

__all__ = ["ExternModule", "IOEffect", "KVCache", "ObjectModule", "SourceModule", "add_extern"]
__all__ += ["nn", "op", "register_lambda", "spec"]
__all__ += core.__all__
__all__ += modules.__all__
__all__ += op.__all__
