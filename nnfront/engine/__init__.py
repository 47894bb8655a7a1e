# SPDX-License-Identifier: Apache-2.0
"""Many sequences at once from one model, in the thread of whoever asks.

sequence, pages, prefixes, schedule  what to do next: numbers alone, no tensor; changes are what it says of sequences, pace when a chunk waits for answers
pool, params, draw, likely           doing it: sequences in one cache, a draw for each row
speculate                            tokens that are likely to come, computed together and kept as far as they would have been drawn
runner                               one step after the other
"""
