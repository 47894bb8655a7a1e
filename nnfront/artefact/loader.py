# SPDX-License-Identifier: Apache-2.0
"""`load` makes a session of an artefact, `check` looks for damage.

Loading parses, verifies and lowers the program's text; it imports no model file, traces nothing and runs no code from the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from nnfront.artefact.folder import PROGRAM, ArtefactFiles, check_files, read_artefact
from nnfront.artefact.save import Extras
from nnfront.artefact.tensor_names import (
    at_rank,
    own_name,
    own_tensors,
    rank_programs,
    read_weights,
    restored,
    weight_types,
)
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.device import CPU, overriding_device
from nnfront.backends.registry import is_target, targets
from nnfront.compiler import all_passes, compile_admitted
from nnfront.dims import Symbol, describe_facts, satisfies
from nnfront.errors import LoadError, NnfrontError
from nnfront.ir import IRModule, admit
from nnfront.lower import Program, of_rank, world_of
from nnfront.session import Session


def load(path: str | Path, *, verify: bool = True, rank: int = 0, ranks: int = 1) -> Session:
    """Load an artefact that `session.save` or `nnfront export` made. The weights are mapped.

    verify: read all weights once and compare them with the checksums that were written. Without it, sizes, headers and types of the
    weights are checked, not their bytes; all other files are compared in any case. rank: which of so many `ranks` this process is; it reads its own weights only.
    Raises LoadError if the artefact is damaged, was made by a newer nnfront, or for a target that this build does not have.
    """
    return session_of(read_artefact(path, verify=verify, rank=rank), rank=rank, ranks=ranks)


def session_of(files: ArtefactFiles, number: int | None = None, *, rank: int = 0, ranks: int = 1) -> Session:
    """Make a session of an artefact that has been opened for a rank, on the device of a number if there are several. Raises LoadError as `load` does."""
    manifest = files.manifest
    if manifest.ranks != ranks:
        raise LoadError(
            f"{files.folder} was made for {_counted(manifest.ranks)}",
            details=[f"got {_counted(ranks)}"],
            help=f"load it {_flag(manifest.ranks)}, or export the model again {_flag(ranks)}",
        )
    if not is_target(manifest.target):
        raise LoadError(
            f"{files.folder} was made for the target {manifest.target!r}",
            details=[f"targets of this build are {', '.join(map(repr, targets()))}"],
            help="export the model again for one of them",
        )
    ir = _admitted(files)
    target = manifest.target if number is None else f"{manifest.target}:{number}"
    whole = _compiled(files, ir, target, rank)
    program = of_rank(whole, rank) if ranks > 1 else whole
    files.check_weights()  # now: they are compared while the program is compiled
    with _about(files.folder):
        places = restored(program, manifest.weights)
        written = _dims(program, manifest.dims)
        places = at_rank(places, own_tensors(rank_programs(whole), places, written), rank)
        mine = rank if ranks > 1 else None
        values, dims = read_weights(program, places, manifest.orders, files.tensors, written, mine)
        known = _joined(written, dims)
    files.close()
    extras = Extras(manifest.llm, files.copies)
    return Session(program, values.pop(""), values, known, ir=ir, extras=extras, kernels=files.kernels)


def target_of(path: str | Path) -> str:
    """Return the target that an artefact was made for. Raises LoadError if it has no manifest that can be read."""
    return read_artefact(path, verify=False).manifest.target


def program_of(path: str | Path) -> IRModule:
    """Return the IR of an artefact; of its weights only sizes are checked. Raises LoadError as `load` does."""
    return _admitted(read_artefact(path, verify=False))


def kernels_of(path: str | Path) -> CompiledKernels | None:
    """Return the compiled kernels of an artefact, None if it has none. Printed, they are a table. Raises LoadError as `load` does."""
    return read_artefact(path, verify=False).kernels


def check(path: str | Path) -> list[str]:
    """Return what is wrong with an artefact, a line for each problem: every byte is compared with its SHA-256, then it is loaded.

    One for a GPU is loaded as if it were here; its compiled kernels are not run. Raises LoadError if nothing can be said: it has no manifest, or one that cannot be read.
    """
    problems = check_files(path)
    if not problems:
        try:
            with overriding_device(CPU):
                ranks = read_artefact(path, verify=False).manifest.ranks
                for rank in range(ranks):
                    files = replace(read_artefact(path, verify=False, rank=rank), kernels=None)
                    session_of(files, rank=rank, ranks=ranks)
        except NnfrontError as error:
            problems = [str(error)]
    return problems


def _admitted(files: ArtefactFiles) -> IRModule:
    with _about(files.folder / PROGRAM):
        return admit(files.program)


def _compiled(files: ArtefactFiles, ir: IRModule, target: str, rank: int) -> Program:
    with _about(files.folder / PROGRAM):
        # Weights lie in the order that kernels wanted where it was written.
        programs = (compile_admitted(ir, target, passes).program for passes in all_passes(target))
        program = next(programs)
        if not _are_there(files, program, rank):
            program = next((other for other in programs if _are_there(files, other, rank)), program)
    if sorted(program.methods) != sorted(files.manifest.methods):
        raise LoadError(
            f"{files.folder}: the program does not have the methods that the manifest lists",
            details=[
                f"got {', '.join(program.methods) or 'none'}",
                f"expected {', '.join(files.manifest.methods) or 'none'}",
            ],
        )
    if (world := world_of(program)) != files.manifest.ranks:
        raise LoadError(
            f"{files.folder}: the program is not for as many ranks as the manifest says",
            details=[f"got {_counted(world)}", f"expected {_counted(files.manifest.ranks)}"],
        )
    return program


def _are_there(files: ArtefactFiles, program: Program, rank: int) -> bool:
    """Whether the files have a tensor for each weight that methods read, maybe one of the rank's own."""
    placed = files.manifest.weights
    names = ((placed.get(o, {}), name) for o, types in weight_types(program).items() for name in types)
    stored = {of_origin.get(name, name) for of_origin, name in names}
    return all(name in files.tensors or own_name(name, rank) in files.tensors for name in stored)


def _flag(ranks: int) -> str:
    return "without --tp" if ranks == 1 else f"with --tp {ranks}"


def _counted(ranks: int) -> str:
    return "one process" if ranks == 1 else f"{ranks} ranks"


def _dims(program: Program, written: Mapping[str, int]) -> dict[Symbol, int]:
    """The sizes that are written down: each is one that the methods take."""
    for method in program.methods.values():
        for symbol in (binding.symbol for binding in method.dims):
            if symbol.name in written and satisfies(written[symbol.name], symbol) is not True:
                raise LoadError(
                    f"the manifest says that dim '{symbol}' is {written[symbol.name]}",
                    details=[f"in {method.name} it is {describe_facts(*symbol.facts)}"],
                )
    return {Symbol(name): number for name, number in written.items()}


def _joined(written: Mapping[Symbol, int], said: Mapping[Symbol, int]) -> dict[Symbol, int]:
    """The sizes that are written down, and those that the weights say."""
    for symbol, number in written.items():
        if said.get(symbol, number) != number:
            raise LoadError(
                f"the manifest says that dim '{symbol}' is {number}, the weights that it is {said[symbol]}"
            )
    return {**written, **said}


@contextmanager
def _about(file: Path) -> Iterator[None]:
    """Errors inside of this are of a file of an artefact."""
    try:
        yield
    except NnfrontError as error:
        where = [f"  at {error.where}"] if error.where else []
        details = [error.what, *(f"  {line}" for line in error.details), *where]
        raise LoadError(f"{file} cannot be used", details=details, help=error.help) from None
