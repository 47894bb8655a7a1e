# SPDX-License-Identifier: Apache-2.0
"""The back end of a GPU: Triton kernels and torch's, calls of few rows captured as graphs, kernels compiled ahead for a named architecture."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from nnfront.backends.backend import Backend, Capture, Frame, Progress, Upload
from nnfront.backends.cuda import graph_capture, graph_safety, upload
from nnfront.backends.cuda.ahead import enumerate_kernels, launcher
from nnfront.backends.cuda.ahead.launcher import launching
from nnfront.backends.cuda.graphs import Graphs
from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.cuda.linear import reads
from nnfront.backends.cuda.shared_workspace import sharing
from nnfront.backends.cuda.table import KERNELS
from nnfront.backends.cuda.workspace import launching_nothing, without_data
from nnfront.backends.device import CPU, stand_in
from nnfront.backends.kernel import Kernel
from nnfront.backends.lowering import takes
from nnfront.backends.registry import parts_of
from nnfront.backends.workspace import metered
from nnfront.dims import Symbol
from nnfront.errors import LoadError
from nnfront.lower import MethodProgram, Program
from nnfront.memory.allocations import Workspace
from nnfront.passes import PIPELINES
from nnfront.passes.pack_weights import with_layouts
from nnfront.quant_format import QuantFormat


class CudaBackend(Backend):
    """Tensors on the GPU that the target names by its number, else on the current one, or on the CPU where Triton interprets kernels."""

    name = "cuda"
    archs = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
    kernels = KERNELS
    ring_windows = False  # kernels find tokens at their positions
    gpus = 1
    collectives = "cpu:gloo,cuda:nccl"
    numbered = True
    captures = True
    decode_rows = graph_safety.ROWS
    prompt_tokens = 8192
    uploads = True

    def passes(self, target: str) -> Sequence[Any]:
        return with_layouts(PIPELINES["cuda"], (k.layout for k in self.kernels), partial(takes, target))

    def reads(self, format: QuantFormat) -> bool:
        return reads(format)

    def device(self, target: str) -> torch.device:
        """The GPU of the target's number, or the current one; the CPU under Triton's interpreter (TRITON_INTERPRET=1).

        Raises LoadError if there is no such GPU, or if it is not of the architecture that the target names.
        """
        if (device := stand_in()) is not None:
            return device
        if torch.version.hip is not None:
            raise LoadError(
                f"target {target!r} needs a GPU of NVIDIA, and this torch is built for AMD's (ROCm {torch.version.hip})",
                help="install a build of torch for CUDA, or compile for 'cpu'",
            )
        if not torch.cuda.is_available():
            if os.environ.get("TRITON_INTERPRET") == "1":
                return CPU
            raise LoadError(
                f"target {target!r} needs a GPU, and torch finds none",
                details=[_built_for()],
                help="compile for 'cpu'; TRITON_INTERPRET=1, set before the start, runs the kernels without a GPU, slowly",
            )
        _, arch, number = parts_of(target)
        if number is not None and number >= torch.cuda.device_count():
            raise LoadError(
                f"target {target!r} needs the GPU of number {number}, and torch finds {torch.cuda.device_count()}",
                help="numbers begin with 0; CUDA_VISIBLE_DEVICES in the environment says which GPUs are seen",
            )
        which = () if number is None else (number,)
        major, minor = torch.cuda.get_device_capability(*which)
        if arch and arch != f"sm_{major}{minor}":
            raise LoadError(
                f"this program was compiled for {arch}, the GPU here is sm_{major}{minor}",
                details=[f"GPU: {torch.cuda.get_device_name(*which)}"],
                help=f"compile it for 'cuda:sm_{major}{minor}', or for 'cuda'",
            )
        return torch.device("cuda", torch.cuda.current_device() if number is None else number)

    def page_sizes(self, target: str) -> tuple[int, ...] | None:
        sizes: tuple[int, ...] = kernel_module("cache").PAGES
        return sizes

    def metered(self, kernel: Kernel, target: str) -> Workspace:
        return metered(kernel.bind, partial(launching_nothing, target), without_data)

    def capture(
        self, program: MethodProgram, device: torch.device, run: Callable[[Frame], None]
    ) -> Capture | None:
        capturer = None if graph_safety.why_not(program) else graph_capture.graph_capture_for(device)
        return None if capturer is None else Graphs(program, capturer, run)

    def why_not_captured(self, program: MethodProgram) -> str:
        return graph_safety.why_not(program)

    def notes(self, program: Program) -> Iterator[str]:
        return graph_safety.captured(program)

    def upload(
        self, target: str, progress: Progress | None = None, total: int = 0
    ) -> AbstractContextManager[Upload]:
        return upload.uploading(self.device(target), progress, total)

    def compile_ahead(
        self,
        program: Program,
        known: Mapping[Symbol, int],
        sizes: Mapping[str, Sequence[int]] | None = None,
        progress: Progress | None = None,
        *,
        draws: bool = False,
    ) -> Any:
        return enumerate_kernels.kernels_of(program, known, sizes, progress, draws=draws)

    def launcher(self, compiled: Any, device: torch.device) -> Any:
        return launcher.launcher_for(compiled, device)

    @contextmanager
    def launching(self, launcher: Any) -> Iterator[None]:
        with launching(launcher), sharing():
            yield


def _built_for() -> str:
    """What to look at where torch finds no GPU."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: no GPU is found whatever is there"
    return f"torch {torch.__version__} is built for CUDA {torch.version.cuda}: `nvidia-smi` says whether the driver finds a GPU"


CUDA = CudaBackend()
