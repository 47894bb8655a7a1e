# SPDX-License-Identifier: Apache-2.0
"""The parts of the pass `special_cases`: the choice among variants, and the report on them."""
