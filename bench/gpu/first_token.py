# SPDX-License-Identifier: Apache-2.0
"""Load an artefact and compute one token after a prompt of 16. Usage: first_token.py FOLDER. Prints JSON: seconds since BENCH_START, and which kernels it compiled."""

import json
import os
import sys
import time

begin = float(os.environ["BENCH_START"])

import torch  # noqa: E402

import nnfront as nn  # noqa: E402

imported = time.time() - begin
session = nn.load(sys.argv[1])
loaded = time.time() - begin
with torch.inference_mode():
    ids = torch.arange(16, device=session.device)[None]
    token = session["prefill"](ids, session.make_cache(batch=1, max_seq=32))[:, -1].argmax(-1).tolist()
first = time.time() - begin
here = {} if session.kernels is None else session.kernels.compiled_here
print(json.dumps({"import_s": imported, "loaded_s": loaded, "first_token_s": first, "compiled_here": here}))
