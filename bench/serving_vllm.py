# SPDX-License-Identifier: Apache-2.0
"""vLLM's client for measuring servers against `nnfront serve`: one that nobody here has written.

    python bench/serving_vllm.py --vllm ENVIRONMENT/bin/python [--folder FOLDER] [-- options of vLLM's client]

ENVIRONMENT is one with vLLM (`make test-vllm` makes one); its client runs there as `vllm bench serve` does, over completions and over chats, with prompts of
random tokens, and fails where an answer does. The client's work is on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from serving import FOLDER, start

# Not the command `vllm`: that of builds for a CPU looks for a package of another name.
CLIENT = """
import argparse
from vllm.benchmarks import serve
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
KEPT = ["completed", "failed", "total_input_tokens", "total_output_tokens", "output_throughput"]
KEPT += [f"{which}_{name}_ms" for name in ("ttft", "itl") for which in ("median", "p99")]


def measured(url: str, folder: Path, name: str, args: argparse.Namespace) -> dict[str, float]:
    """What the client says of one way to ask."""
    with tempfile.TemporaryDirectory() as out:
        command = [args.vllm, "-c", CLIENT, "--backend", name, "--endpoint", ENDPOINTS[name]]
        command += ["--base-url", url, "--model", folder.name, "--tokenizer", str(folder)]
        command += ["--dataset-name", "random", "--random-input-len", "100", "--random-output-len", "24"]
        command += ["--num-prompts", "40", "--max-concurrency", "8", "--ignore-eos", *args.more]
        command += ["--save-result", "--result-dir", out, "--result-filename", "result.json"]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        ran = subprocess.run(command, env=offline, capture_output=True, text=True, cwd=out)
        if ran.returncode:
            raise SystemExit(ran.stdout + ran.stderr)
        found = json.loads((Path(out) / "result.json").read_text())
    return {key: round(found[key], 1) for key in KEPT if key in found}


def main() -> None:
    """Serve, have the client measure, and print what it says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("more", nargs="*", help="behind --: options of the client")
    args = parser.parse_args()
    folder = args.folder.resolve()
    with tempfile.NamedTemporaryFile("w", suffix=".jinja") as template:
        template.write(TEMPLATE)
        template.flush()
        process, url = start(folder, ["--chat-template", template.name])
        try:
            for name in ENDPOINTS:
                print(json.dumps({name: measured(url, folder, name, args)}), flush=True)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
