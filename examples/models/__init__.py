# SPDX-License-Identifier: Apache-2.0
"""Model files: one flat file for each architecture, named by Hugging Face's model type."""

FILES = {
    "iquestcoder": "llama",
    "ministral": "llama",
    "mistral": "llama",
    "seed_oss": "llama",
}
"""Model types that the file of another one computes."""
