# SPDX-License-Identifier: Apache-2.0
"""Real memory of one prefill in a fresh process, and the plan of it. Usage: nnfront_memory.py FOLDER PROMPT. Prints JSON.

Weights, cache, code and torch's own buffers are there before: all weights have been read, and the prompt has run once. Then what the
allocator holds but nobody uses goes back (malloc_trim), the kernel forgets its high-water mark (clear_refs), and the prompt runs again.
`rss` is the new mark above the memory before: pages that the process really had, whoever allocated them. `allocated` is the peak
of what torch's allocator gave out in another run, by its profiler.
"""

import ctypes
import gc
import json
import re
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import nnfront as nn
from nnfront.backends.table import memory_policy
from nnfront.memory.report import report_memory

MEMORY = memory_policy("cpu")

folder, prompt = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(2)
torch.manual_seed(0)


def status(field: str) -> int:
    """A number of bytes in /proc/self/status."""
    (kilobytes,) = re.findall(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


def settle() -> None:
    """Give back what nobody uses, and let the high-water mark of the process begin here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


llm = nn.LLM.load(folder)
session = llm.session
for weight in session.weights.values():
    weight.view(torch.uint8).view(-1)[::1024].sum()
ids = torch.randint(2, llm.config.vocab_size, (1, prompt))
cache = session.make_cache(batch=1, max_seq=prompt)
session["prefill"](ids, cache)
cache.reset()
settle()
before = status("VmRSS")
session["prefill"](ids, cache)
rss = status("VmHWM") - before

cache.reset()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
    session["prefill"](ids, cache)
events = found.profiler.kineto_results.events()
live = allocated = 0
for _, _, change in sorted(
    (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
):
    live += change
    allocated = max(allocated, live)

report = report_memory(session.program, {"batch": 1, "seq": prompt, "max_seq": prompt}, MEMORY)
plan = report.methods["prefill"].plan
print(
    json.dumps(
        {
            "planned": plan.peak,
            "allocated": allocated,
            "rss": rss,
            "weights": report.weights,
            "cache": report.methods["prefill"].caches,
            "at": f"{plan.steps[plan.peak_step].kernel} in {plan.steps[plan.peak_step].module}",
        }
    )
)
