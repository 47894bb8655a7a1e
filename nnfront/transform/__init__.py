# SPDX-License-Identifier: Apache-2.0
"""The weight transform: formulas over weights, computed once, streaming.

run           runs one;  schedule, plan  in which order, and what is in memory meanwhile;  source  where weights are read from
formula, weight_usage, content_keys  who needs which weight, and the name of a result by its content;  inverse  back to the checkpoint's weights
blockwise                            how the peak stays low
"""
