# SPDX-License-Identifier: Apache-2.0
"""Other frontends' names for what is here, for models that were written for them."""
