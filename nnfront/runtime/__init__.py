# SPDX-License-Identifier: Apache-2.0
"""Program and weights and inputs to outputs.

Read in this order: `method` (what a session holds), `check`, `signature` and `convert` (is this call right), `execute` (instructions to
steps), `kernels`, `cpu`, `gemv` and `attention` (what they run), `cache`, `cache_layer` and `lengths` (key/value caches; `caches` makes
them, `paged`, `page_table` and `pages` are the one with pages), `loading` and `results` (weights in, tensors out), `match` (shapes found while a method runs), `transform` and what it imports (weights, once).
"""

from nnfront.runtime.cache import Cache
from nnfront.runtime.cache_layer import CacheLayer
from nnfront.runtime.caches import make_cache
from nnfront.runtime.kernels import KERNELS, Maker
from nnfront.runtime.method import Method

__all__ = ["KERNELS", "Cache", "CacheLayer", "Maker", "Method", "make_cache"]
