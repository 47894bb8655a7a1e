# SPDX-License-Identifier: Apache-2.0
"""Keys and values of earlier tokens.

base       what all caches have in common;  layer  one layer of a cache, and the one whose tokens lie in a ring
ring       the contiguous cache, and making either;  paged, page_table, pages  the one whose sequences share a pool
lengths    how many tokens each sequence has;  codec  how tokens are stored in 8 bits;  type  does a cache fit a method
new, fit   making one of the sizes that are given, or of as much as fits;  still  a cache as a recorded call sees it
"""
