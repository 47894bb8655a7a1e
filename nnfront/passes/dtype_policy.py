# SPDX-License-Identifier: Apache-2.0
"""In which dtype each op computes: the table that `apply_dtype_policy` uses.

compute   every float operand in the dtype of the policy: where the time goes
wide      every float operand in float32: sums over many terms, and functions that turn small errors into large ones
first     the first operand in the dtype of the policy, scales and tables as they are stored; the op itself accumulates in float32
follow    in the dtype of the policy if one of the operands is, else as they are: what moves elements or treats each for itself
result    operands as they are; who reads the result gets it in the dtype of the policy
given     operands as they are: the author says which dtype comes out

An op that is not listed gets its operands as it had them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.ir import OPS, Op

Treatment: TypeAlias = Literal["compute", "wide", "first", "follow", "result", "given"]

_NAMES: Mapping[Treatment, str] = {
    "compute": "matmul linear einsum conv1d conv1d_transpose conv2d conv3d attention scaled_dot_product_attention moe_mlp",
    "wide": "softmax log_softmax sum mean prod var cumsum exp log erf power square sqrt rsqrt reciprocal cos sin",
    "first": "rms_norm layer_norm group_norm rope",
    "follow": (
        "abs add subtract multiply divide negative sign floor ceil round maximum minimum clip where remainder floor_divide"
        " equal not_equal less less_equal greater greater_equal"
        " relu relu6 leaky_relu prelu elu silu gelu mish hardswish sigmoid tanh softplus swiglu geglu"
        " reshape permute_dims squeeze unsqueeze broadcast_to getitem flip pad tile repeat split chunk concat stack gather"
        " scatter scatter_add tril triu max min argmax argmin sort argsort topk interpolate"
        " zeros_like ones_like full_like stop_lift_params"
    ),
    "result": "take",
    "given": "astype",
}

POLICY: Mapping[Op, Treatment] = {
    OPS[name]: treatment for treatment, names in _NAMES.items() for name in names.split()
}
