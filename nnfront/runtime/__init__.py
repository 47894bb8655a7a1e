# SPDX-License-Identifier: Apache-2.0
"""The path of a call.

Read in this order: `method` (what a session holds), `fast_check`, `bind_arguments` and `argument_types` (is this call right), `execute`
(instructions to steps), `load_frame` and `results` (weights in, tensors out), `returned` (what functions of others gave), `dispatch_tree` and `cases` (what is found out while a method runs), `random_arguments` (calls to verify with), `out_of_memory`.
"""

from nnfront.runtime.method import Method

__all__ = ["Method"]
