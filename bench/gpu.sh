#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Kernels, runtime and models on a GPU, in four calls of less than nine minutes each, without a network:
#
#     bench/gpu.sh --compile      # before, anywhere: machine code into bench/gpu/kernels/, so that the GPU's machine compiles nothing
#     bench/gpu.sh 1              # a model in Llama-3-8B's shape: right, then how fast; weights sent, steps replayed, memory as planned
#     bench/gpu.sh 2              # each kernel once, edges, full sizes, and every architecture against the CPU
#     bench/gpu.sh 3              # how fast each kernel is
#     bench/gpu.sh 4              # machine code as launched by Triton and by nnfront, memory checks
#     bench/gpu.sh [CALL] --dry   # the same small, in Triton's interpreter, on a machine without a GPU
#
# Each part is a process with a budget of seconds. What a case finds is written when it ends; a case that faults or hangs costs itself alone.
# Options: --parts NAME,...; --only KERNEL ...; --configs; --seconds N for each part; --out DIR, by default $OUT or bench/results/gpu.
# Needs python3 (or $PYTHON) with torch and triton, for models also numpy and safetensors, and transformers to compare with.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
case " $* " in
*" --compile "*) ;;
*" --dry "*) export TRITON_INTERPRET=1 ;;
esac
names=$(mktemp -d)
trap 'rm -r "$names"' EXIT
ln -s "$PWD/kernels" "$names/nnfront_kernels"
ln -s "$PWD/examples/models" "$names/nnfront_models"
ln -s "$PWD/nnfront" "$names/nnfront"
export PYTHONPATH="$names:$PWD/bench/gpu:$PWD/tests/kernels:$PWD/tests/runtime${PYTHONPATH:+:$PYTHONPATH}"
case " $* " in
*" --compile "*) "$python" bench/gpu/compiled.py "$@" ;;
*) "$python" bench/gpu/run.py "$@" ;;
esac
