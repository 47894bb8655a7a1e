# SPDX-License-Identifier: Apache-2.0
"""The wheel, with the kernels in C inside, in an environment where nnfront was not."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from nnfront.backends.cpu import extension

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
CHECK = """
import sys, torch, nnfront as nn
from nnfront.backends.cpu import extension, native
assert nn.__file__.startswith(sys.prefix), nn.__file__
assert native.__file__.startswith(sys.prefix), native.__file__
x, w, y = torch.ones(2, 64).bfloat16(), torch.ones(3, 64).bfloat16(), torch.zeros(2, 3).bfloat16()
for name in reversed(native.sets):  # the fastest is used then
    native.use_set(name)
    work = torch.empty(extension.work_bytes("multiply", {"rows": 2, "columns": 64, "with_tiles": 1}), dtype=torch.uint8)
    native.multiply(2, 64, 3, 0, 4, 1, 1, w, x, None, None, work, y.zero_())
    assert y.tolist() == [[64.0] * 3] * 2, name
llm = nn.LLM.load(sys.argv[1])
print(extension.instructions(), len(llm.generate_ids(torch.tensor([[5, 6, 7]]), max_new_tokens=4)[0]))
"""


@pytest.mark.matrix
@pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C")
def test_a_wheel_runs_its_kernels_in_an_environment_of_its_own(tmp_path):
    def run(*command: str, cwd: Path) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout

    built = run(sys.executable, "-W", "ignore", "-c", BUILD, str(tmp_path), cwd=ROOT).splitlines()[-1]
    assert "-cp311-abi3-" in built
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        str(tmp_path / built),
        cwd=tmp_path,
    )
    # What nnfront needs is where these tests have it; nnfront itself is not, as files that name further folders are not read there.
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "needs.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    said = run(python, "-c", CHECK, str(ROOT / "examples" / "checkpoints" / "pylib-3m"), cwd=tmp_path)
    assert said.endswith(" 4\n")
    assert said.startswith(extension.NATIVE.sets[0])
