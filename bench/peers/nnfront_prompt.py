# SPDX-License-Identifier: Apache-2.0
"""Time one long prompt of our LLM, and what it takes of memory besides weights and cache. Usage: nnfront_prompt.py FOLDER TOKENS [FORMAT | FORMAT-int8 | keep-int8]. Prints JSON.

It is read as texts are: by `generate_ids`, so many tokens in a call. Weights have been read, and a prompt of one call has run, before the kernel forgets its
high-water mark (clear_refs): `above_mib` is the new mark over the memory before, less the cache, which grows with the prompt; `above_512_mib` the same of 512 tokens.
"""

import ctypes
import gc
import json
import re
import sys
import time
from pathlib import Path

import torch

import nnfront as nn
from nnfront.backends.table import memory_policy
from nnfront.memory.report import report_memory

MIB = 2**20
folder, tokens, *quant = sys.argv[1:]
torch.set_num_threads(2)
torch.manual_seed(0)


def status(field: str) -> float:
    """A number of /proc/self/status, in MiB."""
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kilobytes) / 1024


def settle() -> None:
    """Give back what nobody uses, and let the high-water mark of the process begin here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def read(ids: torch.Tensor) -> tuple[float, float]:
    """Tokens a second of a prompt, and the MiB that it took besides its cache."""
    settle()
    before, begin = status("VmRSS"), time.perf_counter()
    llm.generate_ids(ids, max_new_tokens=1)
    seconds, count = time.perf_counter() - begin, ids.shape[1] + 1
    sizes = {"batch": 1, "seq": min(count, llm.session.backend.prompt_tokens), "max_seq": count}
    report = report_memory(llm.session.program, sizes, memory_policy("cpu"))
    return ids.shape[1] / seconds, status("VmHWM") - before - report.methods["prefill"].caches / MIB


format, _, activations = "".join(quant).partition("-")
scheme = nn.passes.QuantScheme(format, activations=activations or None) if format else None
llm = nn.LLM.load(folder, quant=scheme)
ids = torch.randint(2, llm.config.vocab_size, (1, int(tokens)))
for weight in llm.session.weights.values():
    weight.contiguous().view(torch.uint8).flatten()[::1024].sum()
llm.generate_ids(ids[:, :512], max_new_tokens=2)
short = read(ids[:, :512])[1]
speed, long = read(ids)
print(json.dumps({"prefill": speed, "above_mib": long, "above_512_mib": short, "peak_mib": status("VmHWM")}))
