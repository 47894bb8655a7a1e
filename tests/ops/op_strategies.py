# SPDX-License-Identifier: Apache-2.0
"""For every op a strategy for operands and attributes, mostly well-formed: `CASES[name]`."""

import op_cases_elements
import op_cases_models
import op_cases_programs
import op_cases_shapes
from op_cases import CASES

__all__ = ["CASES", "op_cases_elements", "op_cases_models", "op_cases_programs", "op_cases_shapes"]
