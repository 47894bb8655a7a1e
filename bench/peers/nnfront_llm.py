# SPDX-License-Identifier: Apache-2.0
"""Time our LLM on a checkpoint. Usage: nnfront_llm.py FOLDER {speed,start} [FORMAT | FORMAT-int8 | keep-int8]. Prints JSON. Behind a dash: what activations are rounded to.

Tokens are given, as llama-bench gives them: none is chosen by what is computed.
"""

import time

BEGIN = time.perf_counter()

import json
import os
import resource
import sys

import torch

IMPORT_TORCH = time.perf_counter() - BEGIN

import nnfront as nn
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.linear import BFLOAT16
from nnfront.lower import Run, Structure

folder, mode, *quant = sys.argv[1:]
torch.set_num_threads(2)
torch.manual_seed(0)
PROMPT, NEW, REPEATS = 512, 64, 4


def products_gb_s(session) -> float:
    """Read all matrices by their products with one row, called one after the other from Python, and nothing else."""
    matrices = [w for w in session.weights.values() if w.ndim == 2 and w.dtype == torch.bfloat16]
    rows = {w.shape[1]: torch.ones(w.shape[1], dtype=torch.bfloat16) for w in matrices}
    multiply, times = BFLOAT16.bind(Run(BFLOAT16.name, "linear", (), Structure(0))), []
    for _ in range(12):
        begin = time.perf_counter()
        for w in matrices:
            multiply(rows[w.shape[1]], w, None)
        times.append(time.perf_counter() - begin)
    return sum(w.nbytes for w in matrices) / 1e9 / sorted(times)[len(times) // 2]


def read_gb_s() -> float:
    """The better of two ways to read a quarter of a gigabyte, as in limits.py; the host's memory wanders within seconds."""
    best = 0.0
    for read in (words.sum, lambda: torch.mv(matrix, vector)):
        for _ in range(3):
            begin = time.perf_counter()
            read()
            best = max(best, words.nbytes / 1e9 / (time.perf_counter() - begin))
    return best


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


format, _, activations = "".join(quant).partition("-")
scheme = nn.passes.QuantScheme(format, activations=activations or None) if format else None
llm = nn.LLM.load(folder, quant=scheme)
loaded = time.perf_counter() - BEGIN
ids = torch.randint(2, llm.config.vocab_size, (1, PROMPT))
result = {"import_torch_s": IMPORT_TORCH}
if mode == "start":
    llm.generate_ids(ids[:, :16], max_new_tokens=1)
    result |= {
        "loaded_s": loaded,
        "first_token_s": time.time() - float(os.environ["BENCH_START"]),
        "peak_mib": peak_mib(),
    }
else:
    session = llm.session
    cache = session.make_cache(batch=1, max_seq=PROMPT + NEW)
    session["prefill"](ids, cache)
    session["prefill"](ids, session.make_cache(batch=1, max_seq=PROMPT + NEW))
    tokens = torch.randint(2, llm.config.vocab_size, (NEW, 1, 1))
    for token in tokens[:3]:
        session["decode"](token, cache)
    peak = peak_mib()
    prefill, decode, shares, speeds = [], [], [], []
    words = torch.ones(2**26)
    matrix, vector = torch.ones((2**14, 2**13), dtype=torch.bfloat16), torch.ones(2**13, dtype=torch.bfloat16)
    weights = (
        sum(w.nbytes for w in session.weights.values()) / 1e9
    )  # a head that is the embedding as well is one of them
    for _ in range(REPEATS):
        cache = session.make_cache(batch=1, max_seq=PROMPT + NEW)
        start = time.perf_counter()
        session["prefill"](ids, cache)
        prefill.append(PROMPT / (time.perf_counter() - start))
        before, start = read_gb_s(), time.perf_counter()
        for token in tokens:
            session["decode"](token, cache)
        decode.append(NEW / (time.perf_counter() - start))
        speeds.append((before + read_gb_s()) / 2)
        shares.append(decode[-1] * weights / speeds[-1])
    # The peak is taken before anything is made to measure the bandwidth with.
    result |= {
        "prefill": sorted(prefill),
        "decode": sorted(decode),
        "decode_share": sorted(shares),
        "read_gb_s": sorted(speeds),
        "peak_mib": peak,
        "weights_mib": sum(w.nbytes for w in session.weights.values()) / 2**20,
    }
    if NATIVE is not None:
        result["products_gb_s"] = products_gb_s(session)
print(json.dumps(result))
