# SPDX-License-Identifier: Apache-2.0
"""Program and weights and inputs to outputs.

Read in this order: `session` (what a user holds), `check` and `signature` (is this call right), `execute` (instructions to steps), `cpu` (its
kernels), `cache` and `lengths` (key/value caches), `match` (shapes found while a method runs), `transform` (weights, once).
"""

from nnfront.runtime.cache import Cache, CacheLayer, make_cache
from nnfront.runtime.session import Method, Session

__all__ = ["Cache", "CacheLayer", "Method", "Session", "make_cache"]
