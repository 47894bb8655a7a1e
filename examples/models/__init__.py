# SPDX-License-Identifier: Apache-2.0
"""Model files: one flat file for each architecture, named by Hugging Face's model type."""

FILES = {
    "camembert": "bert",
    "iquestcoder": "llama",
    "ministral": "llama",
    "mistral": "llama",
    "roberta": "bert",
    "seed_oss": "llama",
    "xlm-roberta": "bert",
}
"""Model types that the file of another one computes."""
