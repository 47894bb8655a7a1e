# SPDX-License-Identifier: Apache-2.0
"""`export` makes an artefact of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nnfront.artefact.save import Options
from nnfront.backends.registry import parts_of
from nnfront.errors import LoadError
from nnfront.llm.hf_folder import compile_folder
from nnfront.llm.lora import Loras
from nnfront.llm.methods import Methods
from nnfront.llm.timings import Timings
from nnfront.passes import QuantizeReport, QuantScheme
from nnfront.weights.checkpoint import is_artefact


def export(
    path: str | Path,
    output: str | Path,
    *,
    target: str = "cpu",
    dtype: str | None = None,
    quant: str | QuantScheme | None = None,
    model_file: str | Path | None = None,
    ignored: Sequence[str] = (),
    lora: Loras = (),
    mtp: bool = False,
    sizes: Mapping[str, Sequence[int]] | None = None,
    ranks: int = 1,
    progress: Callable[[int, int], None] | None = None,
    compiled: Callable[[int, int], None] | None = None,
    plan: Callable[[str], None] = lambda text: None,
    quantized: Callable[[QuantizeReport], None] = lambda report: None,
) -> Timings:
    """Make an artefact of a Hugging Face folder, streaming its weights. Returns the time of each phase.

    target: `cuda:sm_90` and its like compile the kernels too, for calls of `sizes` (`Options.sizes`). dtype: compute in it instead of the
    checkpoint's dtype. quant, ignored, lora, mtp: as for `LLM.load`. ranks: divide it among so many, each of which loads its own weights. `compiled` is told how many kernels of how many are compiled, `progress` how many bytes of how many are written, `plan`, before
    anything is, what it will take, `quantized` what becomes of which weight. Raises LoadError if the folder is not what it should be or the output cannot be written.
    """
    if is_artefact(path):
        raise LoadError(
            f"{path} is an artefact already", help="give the Hugging Face folder that it was made of"
        )
    if sizes and parts_of(target).arch is None:
        raise LoadError(
            "sizes say for which calls kernels are compiled",
            details=[f"the target {target!r} names no architecture to compile them for"],
            help="leave --sizes out, or name one: --device cuda:sm_90",
        )
    phases = Timings()
    folder = compile_folder(
        path, target, dtype, model_file, phases, quant, lora, ranks, methods=Methods.of(extends=True, mtp=mtp)
    )
    size = folder.checkpoint.size_bytes
    if folder.stored is not None:
        plan(str(folder.stored))
    if folder.quantized is not None:
        quantized(folder.quantized)

    def tell(peak_bytes: int) -> None:
        plan(
            f"checkpoint {size / 1e6:.1f} MB; making its weights takes at most {peak_bytes / 1e6:.1f} MB of memory"
        )

    folder.executable.save(
        output,
        folder.checkpoint,
        ignored=ignored,
        cast=dtype is not None,
        extras=folder.extras,
        options=Options(sizes=sizes or {}, compiled=compiled, plan=tell, progress=progress, phase=phases.end),
    )
    phases.end("place")
    return phases
