# SPDX-License-Identifier: Apache-2.0
"""Model files: one flat file for each architecture, named by Hugging Face's model type."""

FILES = {
    "mistral": "llama",
}
"""Model types that the file of another one computes."""
