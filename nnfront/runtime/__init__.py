# SPDX-License-Identifier: Apache-2.0
"""Program and weights and inputs to outputs.

Read in this order: `method` (what a session holds), `check`, `signature` and `convert` (is this call right), `execute` (instructions to
steps), `kernels` and `cpu` (what they run), `cache` (keys and values of earlier tokens), `loading` and `results` (weights in, tensors
out), `match`, `route` and `cases` (what is found out while a method runs), `transform` (weights, once), `cuda` (all of it on a GPU).
"""

from nnfront.runtime.cache.base import Cache
from nnfront.runtime.cache.layer import CacheLayer
from nnfront.runtime.cache.ring import make_cache
from nnfront.runtime.kernels import KERNELS, Maker
from nnfront.runtime.method import Method

__all__ = ["KERNELS", "Cache", "CacheLayer", "Maker", "Method", "make_cache"]
