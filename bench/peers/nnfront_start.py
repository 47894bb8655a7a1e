# SPDX-License-Identifier: Apache-2.0
"""Time each step from a fresh process to the first token, as `nnfront run` takes them. Usage: nnfront_start.py ARTEFACT."""

import json
import sys
import time
from itertools import pairwise

marks = [("python", time.perf_counter(), time.process_time())]


def done(step: str) -> None:
    """Note that a step has ended."""
    marks.append((step, time.perf_counter(), time.process_time()))


import torch

assert torch
done("import torch")

import argparse

import nnfront as nn
from nnfront.cli import loading

done("import nnfront")
parser = argparse.ArgumentParser()
loading.add_arguments(parser)
args = parser.parse_args([])
args.path, args.model, args.ignore = sys.argv[1], None, []
nn.backend_of("cpu")
llm = loading.load(args)
done("load")
text = llm.tokenizer.encode("def main():")
done("tokenizer")
llm.generate("def main():", 1)
done("first token")
llm.generate("def main():", 1)
done("the same once more")
found = {
    step: {"s": wall - before[1], "cpu_s": cpu - before[2]} for before, (step, wall, cpu) in pairwise(marks)
}
print(json.dumps(found))
