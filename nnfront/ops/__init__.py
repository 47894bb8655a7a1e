# SPDX-License-Identifier: Apache-2.0
"""The vocabulary: every op, declared once as a type rule over dims, a torch reference and a docstring.

Importing this room registers all of them in `nnfront.ir.op.OPS`. `ops.matmul` is an `Op`, not a function to call on tensors:
authors use `nnfront.op.matmul`, which is made from it.

    elementwise, logic, activation    each element on its own
    matmul, conv, resize              products, convolutions, resolutions
    low_rank                          low-rank changes of products, by the sequence
    linear_int8                       products of integers
    reduce, norm                      along axes
    shape, join, slice, index         other shapes, parts, and elements chosen by positions
    create                            from nothing but a shape
    attention, rope, cache            transformers
    recurrent, delta_rule             state space models and linear attention
    quant, sample                     quantised numbers; tokens from probabilities
    loop                              steps along an axis that carry values
    control                           printing, external functions, which case it is
    collective                        what several processes compute together
    sliced_axes                       of which slices of operands a slice of a result is computed
    constants                         constants of the IR as torch tensors, and back
    first_calls                       what torch's elementary functions need before several threads call them
"""

from nnfront.ops.activation import (
    elu,
    geglu,
    gelu,
    hardswish,
    leaky_relu,
    mish,
    prelu,
    relu,
    relu6,
    silu,
    softplus,
    swiglu,
)
from nnfront.ops.attention import attention, scaled_dot_product_attention
from nnfront.ops.cache import cache_append, cache_join, cache_positions, cache_read, cache_split, cache_write
from nnfront.ops.collective import all_gather, all_reduce, all_to_all, shard
from nnfront.ops.control import (
    enter_case,
    extern,
    find_extern,
    print_,
    register_extern,
    stop_lift_params,
    within,
)
from nnfront.ops.conv import conv1d, conv1d_transpose, conv2d, conv3d
from nnfront.ops.create import arange, dim_value, empty, full, full_like, ones, ones_like, zeros, zeros_like
from nnfront.ops.delta_rule import gated_delta_rule
from nnfront.ops.elementwise import (
    abs,
    add,
    astype,
    ceil,
    clip,
    cos,
    divide,
    erf,
    exp,
    floor,
    floor_divide,
    log,
    maximum,
    minimum,
    multiply,
    negative,
    power,
    reciprocal,
    remainder,
    round,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    square,
    subtract,
    tanh,
)
from nnfront.ops.first_calls import make_first_calls
from nnfront.ops.index import gather, scatter, scatter_add, take, tril, triu
from nnfront.ops.join import chunk, concat, split, stack
from nnfront.ops.linear_int8 import linear_int8
from nnfront.ops.logic import (
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    equal,
    greater,
    greater_equal,
    left_shift,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_equal,
    right_shift,
    where,
)
from nnfront.ops.loop import scan
from nnfront.ops.low_rank import add_low_rank
from nnfront.ops.matmul import einsum, linear, matmul
from nnfront.ops.moe import moe_mlp
from nnfront.ops.norm import group_norm, layer_norm, log_softmax, rms_norm, softmax
from nnfront.ops.quant import dequantize, pack_int4, quantize, unpack_int4
from nnfront.ops.quant_blocks import dequantize_blocks, quantize_blocks
from nnfront.ops.quant_calibrated import quantize_calibrated
from nnfront.ops.recurrent import causal_conv1d, selective_scan, ssm_scan
from nnfront.ops.reduce import (
    all,
    any,
    argmax,
    argmin,
    argsort,
    cumsum,
    max,
    mean,
    min,
    prod,
    sort,
    sum,
    topk,
    var,
)
from nnfront.ops.resize import interpolate
from nnfront.ops.rope import get_timestep_embedding, rope
from nnfront.ops.sample import (
    multinomial_from_uniform,
    renormalize_top_p_top_k_prob,
    sample_top_p_top_k_from_sorted_prob,
)
from nnfront.ops.shape import (
    bitcast,
    broadcast_to,
    flip,
    permute_dims,
    repeat,
    reshape,
    squeeze,
    tile,
    unsqueeze,
)
from nnfront.ops.slice import getitem, pad

make_first_calls()
