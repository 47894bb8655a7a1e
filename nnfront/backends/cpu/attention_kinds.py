# SPDX-License-Identifier: Apache-2.0
"""Which attention a call is: what a kernel asks before it takes it, one question each."""

from __future__ import annotations

from nnfront.backends.kernel import ACCEPTED, Context
from nnfront.lower import Run


def with_cache(run: Run, context: Context) -> str:
    """Accept keys and values that are appended to a layer of a cache."""
    if not run.attrs.get("is_causal", True):
        return "it sees later tokens too"
    return why_not_keys_and_values(run, context) or stored(run, context)


def stored(run: Run, context: Context) -> str:
    """Accept whatever a layer of a cache holds."""
    return "there is no cache" if context.is_none(run.inputs[3]) else ACCEPTED


def to_all(run: Run, context: Context) -> str:
    """Accept queries of what has been stored before, without order."""
    if run.attrs.get("is_causal", True):
        return "it is causal"
    if not context.is_none(run.inputs[1]):
        return "it appends"
    if not all(context.is_none(slot) for slot in run.inputs[5:]):
        return "it has a bias"
    return stored(run, context) or softmax_only(run, context) or ACCEPTED


def without_cache(run: Run, context: Context) -> str:
    """Accept keys and values alone."""
    if not context.is_none(run.inputs[3]):
        return "there is a cache"
    return why_not_keys_and_values(run, context) or softmax_only(run, context)


def why_not_keys_and_values(run: Run, context: Context) -> str:
    """Why attention is to more, or less, than the keys and values that it is given; ACCEPTED if it is not."""
    if any(context.is_none(slot) for slot in run.inputs[1:3]):
        return "it is to what a layer holds, or values are parts of keys"
    has_bias = any(not context.is_none(slot) for slot in run.inputs[5:])
    return "it has a bias" if has_bias else ACCEPTED


def softmax_only(run: Run, context: Context) -> str:
    """Whether torch's attention is all that there is to do, or what more there is."""
    if not context.is_none(run.inputs[4]):
        return "it has sinks"
    return "it has a softcap" if "softcap" in run.attrs else ACCEPTED


def no_scale_dtype(run: Run, context: Context) -> str:
    """Accept scores in the dtype that torch computes them in."""
    return "it computes scores in another dtype" if "scale_dtype" in run.attrs else ACCEPTED
