# SPDX-License-Identifier: Apache-2.0
"""What is of language models alone."""
