# SPDX-License-Identifier: Apache-2.0
"""One file for each architecture, named as Hugging Face names its `model_type`. A file is found by its name; nothing is registered."""
