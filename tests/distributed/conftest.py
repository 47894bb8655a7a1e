# SPDX-License-Identifier: Apache-2.0
"""Folders of tiny models, and ranks that have run them: started once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from few_of import few_of
from patience import HANGS_SECONDS

import nnfront as nn

NEW = {"self_attn.k_proj": (64, 64), "mlp.down_proj": (64, 256)}
"""Weights that an update brings, and their shapes."""

sys.path.append(str(Path(__file__).parents[1] / "models"))


class Folders(dict[str, Path]):
    """A folder for each of the models, made when it is asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __missing__(self, name: str) -> Path:
        from divided_models import save

        save(name, self.root / name)
        return self.setdefault(name, self.root / name)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session", params=few_of([2, 4]), ids=["2 ranks", "4 ranks"])
def ran(
    request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: Any
) -> list[dict[str, Any]]:
    """What each rank of so many has found; see rank_worker.py. Four compute every model, two those whose parts are cut in different ways."""
    from divided_models import MODELS, save

    out = tmp_path_factory.mktemp("ranks")
    for rank in range(request.param):  # as many checkpoints of one shape, each of its own training
        save("llama", out / f"unlike{rank}", rank)
    chosen = MODELS if request.param == 4 else ("llama", "qwen3_moe")
    models = {name: (str(folders[name]), None) for name in chosen}
    models["llama int4"] = (str(folders["llama"]), "int4")
    artefacts = {name: str(out / name) for name in ("qwen3_moe", "llama int4")}
    for name, path in artefacts.items():
        nn.artefact.export(models[name][0], path, quant=models[name][1], ranks=request.param)
    task = {"out": str(out), "models": models, "artefacts": artefacts, "unlike": str(out / "unlike")}
    new = {f"model.layers.0.{name}.weight": torch.randn(shape) / 8 for name, shape in NEW.items()}
    torch.save(new, out / "new.pt")
    (out / "task.json").write_text(json.dumps(task))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={request.param}",
    ]
    command += [str(Path(__file__).parent / "rank_worker.py"), str(out / "task.json")]
    subprocess.run(command, check=True, timeout=HANGS_SECONDS, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [torch.load(out / f"{rank}.pt") for rank in range(request.param)]
