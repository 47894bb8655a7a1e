#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Kernels on a GPU: right first (edges, full sizes, compute-sanitizer, launched from machine code as by Triton,
# weights sent, steps recorded, memory as planned), then how fast, then a whole model in Llama-3-8B's shape. One call, under ten minutes, no network.
#
#     bench/gpu.sh [--only NAME ...] [--parts edges,full,sanitizer,cubin,runtime,speed,model] [--configs] [--seconds 540] [--out FILE]
#     bench/gpu.sh --dry          # every case small, in Triton's interpreter, on a machine without a GPU
#
# Needs python3 (or $PYTHON) with torch and triton, for the model also numpy and safetensors, and transformers to compare it with.
# Writes bench/results/gpu.json and a table.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
case " $* " in
*" --dry "*) export TRITON_INTERPRET=1 ;;
*)
    if ! "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation -e .; then
        # No pip or no setuptools: import names will do.
        names=$(mktemp -d)
        ln -s "$PWD/kernels" "$names/nnfront_kernels"
        ln -s "$PWD/examples/models" "$names/nnfront_models"
        ln -s "$PWD/nnfront" "$names/nnfront"
        export PYTHONPATH="$names${PYTHONPATH:+:$PYTHONPATH}"
    fi
    ;;
esac
exec "$python" bench/gpu/run.py "$@"
