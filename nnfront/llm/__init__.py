# SPDX-License-Identifier: Apache-2.0
"""Language models: from a folder to text.

language_model   `LLM`;  hf_folder  a Hugging Face folder, compiled;  model_files  model files by architecture
tokenizer, sampling  text to tokens, and the next tokens;  timings  where the time went
"""
