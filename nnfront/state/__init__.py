# SPDX-License-Identifier: Apache-2.0
"""What a model keeps between calls: keys and values of earlier tokens.

cache         what all caches have in common;  layer  one layer of a cache, and the one whose tokens lie in a ring
contiguous    the contiguous cache, and making either;  paged, page_table, page_pool  the one whose sequences share a pool
lengths       how many tokens each sequence has;  quantize  tokens stored in 8 bits;  type  whether a cache fits a method
new, fit      making one of the sizes that are given, or of as much as fits;  captured  a cache as a captured call sees it
"""
