# SPDX-License-Identifier: Apache-2.0
"""Time each step from a fresh process to the first token, as `nnfront run` takes them. Usage: nnfront_start.py ARTEFACT."""

import gc
import json
import sys
import time
from itertools import pairwise

CLOCKS = {"s": time.perf_counter, "cpu_s": time.process_time, "main_s": time.thread_time}
marks = [("python", {name: clock() for name, clock in CLOCKS.items()})]


def done(step: str) -> None:
    """Note that a step has ended."""
    marks.append((step, {name: clock() for name, clock in CLOCKS.items()}))


gc.disable()
import torch

assert torch
gc.freeze()
gc.enable()
done("import torch")

import argparse

import nnfront as nn
from nnfront.cli import loading

parser = argparse.ArgumentParser()
loading.add_arguments(parser)
args = parser.parse_args([])
args.path, args.model, args.ignore = sys.argv[1], None, []
gc.disable()
nn.kind_of_model(args.path)
assert nn.LLM
nn.backend_of("cpu")

from nnfront.artefact import loader
from nnfront.llm import load_options

done("import nnfront")


def timed(module, name, step):
    """Note when a function of a module has returned."""
    function = getattr(module, name)

    def call(*args, **kwargs):
        result = function(*args, **kwargs)
        done(step)
        return result

    setattr(module, name, call)


timed(load_options, "read_artefact", "open")
timed(loader, "_admitted", "read and verify the program")
timed(loader, "_compiled", "compile")
timed(loader, "restored", "wait for the weights' check")
timed(loader, "read_weights", "bind the weights")
llm = loading.load(args)
done("session")
text = llm.tokenizer.encode("def main():")
done("tokenizer")
llm.generate("def main():", 1)
done("first token")
llm.generate("def main():", 1)
done("the same once more")
found = {
    step: {name: now - before[name] for name, now in after.items()}
    for (_, before), (step, after) in pairwise(marks)
}
print(json.dumps(found))
