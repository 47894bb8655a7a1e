# SPDX-License-Identifier: Apache-2.0
"""Artefacts: `load` makes a session of one, `export` makes one of a Hugging Face folder, `check` looks for damage.

Loading parses, verifies and lowers the program's text; it imports no model file, traces nothing and runs no code from the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nnfront.compiler import TARGETS, compile
from nnfront.dims import Symbol
from nnfront.errors import LoadError, NnfrontError
from nnfront.folder import compile_folder
from nnfront.ir import IRModule, admit
from nnfront.lower import Program
from nnfront.passes import inline
from nnfront.phases import Phases
from nnfront.runtime.cuda.cubin import Ahead
from nnfront.runtime.device import CPU, standing_in
from nnfront.session import Session
from nnfront.weights import Extras, Options, is_artefact
from nnfront.weights.artefact import PROGRAM, ArtefactFiles, check_files, read_artefact
from nnfront.weights.stored import read_weights, restored

__all__ = ["check", "export", "is_artefact", "load", "program_of", "session_of", "target_of"]


def load(path: str | Path, *, verify: bool = True) -> Session:
    """Load an artefact that `session.save` or `nnfront export` made. The weights are mapped.

    verify: read all weights once and compare them with the checksums that were written. Without it, sizes, headers and types of the
    weights are checked, not their bytes; all other files are compared in any case.
    Raises LoadError if the artefact is damaged, was made by a newer nnfront, or for a target that this build does not have.
    """
    return session_of(read_artefact(path, verify=verify))


def session_of(files: ArtefactFiles) -> Session:
    """Make a session of an artefact that has been opened. Raises LoadError as `load` does."""
    manifest = files.manifest
    if manifest.target not in TARGETS:
        raise LoadError(
            f"{files.folder} was made for the target {manifest.target!r}",
            details=[f"targets of this build are {', '.join(map(repr, TARGETS))}"],
            help="export the model again for one of them",
        )
    ir = _admitted(files)
    program = _compiled(files, ir)
    try:
        places = restored(program, manifest.weights)
        values, dims = read_weights(program, places, manifest.orders, files.tensors)
        known = _joined({Symbol(name): number for name, number in manifest.dims.items()}, dims)
    except NnfrontError as error:
        raise _about(files.folder, error) from None
    extras = Extras(manifest.llm, files.copies)
    return Session(program, values.pop(""), values, known, ir=ir, extras=extras, kernels=files.kernels)


def target_of(path: str | Path) -> str:
    """Return the target that an artefact was made for. Raises LoadError if it has no manifest that can be read."""
    return read_artefact(path, verify=False).manifest.target


def program_of(path: str | Path) -> IRModule:
    """Return the IR of an artefact; of its weights only sizes are checked. Raises LoadError as `load` does."""
    return _admitted(read_artefact(path, verify=False))


def kernels_of(path: str | Path) -> Ahead | None:
    """Return the compiled kernels of an artefact, None if it has none. Printed, they are a table. Raises LoadError as `load` does."""
    return read_artefact(path, verify=False).kernels


def check(path: str | Path) -> list[str]:
    """Return what is wrong with an artefact, a line for each problem: every byte is compared with its SHA-256, then it is loaded.

    One for a GPU is loaded as if it were here; its compiled kernels are not run. Raises LoadError if nothing can be said: it has no manifest, or one that cannot be read.
    """
    problems = check_files(path)
    if not problems:
        try:
            with standing_in(CPU):
                session_of(replace(read_artefact(path, verify=False), kernels=None))
        except NnfrontError as error:
            problems = [str(error)]
    return problems


def export(
    path: str | Path,
    output: str | Path,
    *,
    target: str = "cpu",
    dtype: str | None = None,
    quant: str | None = None,
    model_file: str | Path | None = None,
    sizes: Mapping[str, Sequence[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
    compiled: Callable[[int, int], None] | None = None,
    plan: Callable[[str], None] = lambda text: None,
) -> Phases:
    """Make an artefact of a Hugging Face folder, streaming its weights. Returns the time of each phase.

    target: `cuda:sm_90` and its like compile the kernels too, for calls of `sizes` (`Options.sizes`). dtype: compute in it instead of the
    checkpoint's dtype. quant: as for `LLM.load`. `compiled` is told how many kernels of how many are compiled, `progress` how many bytes of how many are written, `plan`, before
    anything is, what it will take. Raises LoadError if the folder is not what it should be or the output cannot be written.
    """
    if is_artefact(path):
        raise LoadError(
            f"{path} is an artefact already", help="give the Hugging Face folder that it was made of"
        )
    phases = Phases()
    folder = compile_folder(path, target, dtype, model_file, phases, quant)
    size = folder.checkpoint.size_bytes

    def tell(peak_bytes: int) -> None:
        plan(
            f"checkpoint {size / 1e6:.1f} MB; making its weights takes at most {peak_bytes / 1e6:.1f} MB of memory"
        )

    folder.executable.save(
        output,
        folder.checkpoint,
        cast=dtype is not None,
        extras=folder.extras,
        options=Options(sizes=sizes or {}, compiled=compiled, plan=tell, progress=progress, phase=phases.end),
    )
    phases.end("place")
    return phases


def _admitted(files: ArtefactFiles) -> IRModule:
    try:
        return admit(files.program)
    except NnfrontError as error:
        raise _about(files.folder / PROGRAM, error) from None


def _compiled(files: ArtefactFiles, ir: IRModule) -> Program:
    """The program. What a fused function says that its body computes is not taken on trust: it is found again in the body."""
    fused = [function.name for function in ir.functions if function.kind == "fused"]
    try:
        program = compile(inline(ir, fused), files.manifest.target).program
    except NnfrontError as error:
        raise _about(files.folder / PROGRAM, error) from None
    if sorted(program.methods) != sorted(files.manifest.methods):
        raise LoadError(
            f"{files.folder}: the program does not have the methods that the manifest lists",
            details=[
                f"got {', '.join(program.methods) or 'none'}",
                f"expected {', '.join(files.manifest.methods) or 'none'}",
            ],
        )
    return program


def _joined(written: Mapping[Symbol, int], said: Mapping[Symbol, int]) -> dict[Symbol, int]:
    """The sizes that are written down, and those that the weights say."""
    for symbol, number in written.items():
        if said.get(symbol, number) != number:
            raise LoadError(
                f"the manifest says that dim '{symbol}' is {number}, the weights that it is {said[symbol]}"
            )
    return {**written, **said}


def _about(file: Path, error: NnfrontError) -> LoadError:
    """The error, as one about a file of an artefact."""
    details = [
        error.what,
        *(f"  {line}" for line in error.details),
        *([f"  at {error.where}"] if error.where else []),
    ]
    return LoadError(f"{file} cannot be used", details=details, help=error.help)
