# SPDX-License-Identifier: Apache-2.0
"""`compile`: IR to an `Executable`, which turns weights into a `Session`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nnfront.artefact.save import Extras, Options, save_stream
from nnfront.artefact.tensor_names import place_weights, rank_programs
from nnfront.backends.lowering import lower
from nnfront.backends.registry import backend_of
from nnfront.backends.table import explain_kernels, memory_policy
from nnfront.dims import Symbol, bounded_work
from nnfront.errors import LoadError, LowerError
from nnfront.ir import MAX_DIM_TERMS, IRModule, admissible
from nnfront.lower import Program, lower_weights, of_rank, world_of
from nnfront.memory.report import MemoryReport, report_memory
from nnfront.passes import inline, pack_weights
from nnfront.passes.base import Step, run_steps, step_name
from nnfront.session import Session
from nnfront.transform.plan import TransformPlan, plan_load
from nnfront.transform.run import run_transform, stream_transform
from nnfront.transform.weight_usage import weight_uses
from nnfront.weights import (
    BoundWeights,
    Checkpoint,
    CheckReport,
    TransformCache,
    check_report,
    check_weights,
    tensor_types,
)

Progress: TypeAlias = Callable[[int, int], None]
Weights: TypeAlias = Checkpoint | Mapping[str, torch.Tensor]


def compile(ir: IRModule, target: str = "cpu") -> Executable:
    """Compile a module for a target: its passes, then the choice of kernels. The module may be lifted or not.

    Raises VerifyError for IR that breaks a rule or is larger than anything that is meant, and LowerError for a target that this build does
    not have, and for IR that cannot run.
    """
    if not isinstance(ir, IRModule):
        raise LowerError(
            f"compile takes an IRModule, got a {type(ir).__name__}",
            help="export the model first: nnfront.compile(model.export(spec))",
        )
    backend_of(target)  # one that there is not is said before what is wrong with the module
    return compile_admitted(admissible(ir), target)


def all_passes(target: str) -> Iterator[Sequence[Step]]:
    """The passes of a target, by the orders that weights may lie in: the one that kernels want here, those that they want on other machines, their own."""
    backend = backend_of(target)
    here = backend.passes(target)
    yield from (here, *backend.other_passes(target))
    yield [step for step in here if step_name(step) != pack_weights.name]


def compile_admitted(source: IRModule, target: str, passes: Sequence[Step] | None = None) -> Executable:
    """Compile a module that is `admissible`, as what `admit` returns, with these passes, or those that the target has here. Raises LowerError as `compile` does."""
    passes = next(all_passes(target)) if passes is None else passes
    with bounded_work(MAX_DIM_TERMS):
        # A fused function that was parsed says what its body says. What a kernel can compute of it is found again.
        ir = inline(source, [f.name for f in source.functions if f.kind == "fused" and not f.is_outlined])
        ir = run_steps(ir, passes)
        return Executable(ir, lower(ir, target), source)


def check(
    ir: IRModule, checkpoint: Checkpoint, *, ignored: Sequence[str] = (), cast: bool = False
) -> CheckReport:
    """Report what a module would make of a checkpoint, as `Executable.check` does, without compiling what its methods compute."""
    return _report(ir, lower_weights(ir), checkpoint, ignored, cast)


def _report(
    ir: IRModule, program: Program, checkpoint: Checkpoint, ignored: Sequence[str], cast: bool
) -> CheckReport:
    return check_report(
        weight_uses(program), checkpoint, aliases=program.aliases, ignored=_allowed(ir, ignored), cast=cast
    )


def _allowed(ir: IRModule, ignored: Sequence[str]) -> list[str]:
    """What may be left over: what the caller or the model file says, and parameters that no method reads, by any of their names."""
    if isinstance(ignored, str):  # its letters would be patterns
        raise LoadError(f"ignored is {ignored!r}, expected a list of names and patterns")
    unread = ir.attrs.get("unread", ())
    aliases = [alias for alias, name in ir.attrs.get("aliases", {}).items() if name in unread]
    return [*ignored, *ir.attrs.get("ignored", ()), *unread, *aliases]


class TransformedWeights(dict[str, Any]):
    """What `transform_params` returns: the results of a weight transform by name. Kept apart from raw weights by its class.

    `dims` are the sizes that the raw weights have said.
    """

    def __init__(self, results: Mapping[str, Any], dims: Mapping[Symbol, int] | None = None) -> None:
        super().__init__(results)
        self.dims = dims or {}


class Executable:
    """A compiled module. `load` gives it weights, `explain` says what it will run, `program` is the plan itself.

    `source` is the module that was compiled, `ir` what the target's passes have made of it.
    """

    def __init__(self, ir: IRModule, program: Program, source: IRModule) -> None:
        self.ir = ir
        self.source = source
        self.program = program
        self.target = program.target
        self._backend = backend_of(program.target)

    def of_rank(self, rank: int) -> Executable:
        """Return what one of several ranks runs: its parts of weights are known, all else is the same for all of them.

        Raises LoadError for a rank that there is not.
        """
        world = world_of(self.program)
        if type(rank) is not int or not 0 <= rank < world:
            raise LoadError(f"rank {rank!r} is none of {world}: they are 0 to {world - 1}")
        return Executable(self.ir, of_rank(self.program, rank), self.source)

    def load(
        self,
        weights: Weights,
        *,
        ignored: Sequence[str] = (),
        cast: bool = False,
        cache: str | PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Session:
        """Check the weights, run the transforms over them, and return a session.

        `weights`: a checkpoint or a dict, under the checkpoint's names. `ignored`: names or patterns of tensors that may be left
        over. `cast`: floats stored in another float dtype than the model's are converted. `cache`: a folder that keeps what is computed
        by content, for the next load of these weights or of some of them, by this or any other model. `progress` is told how many steps of
        how many are done; for a CUDA target, by another thread, how many bytes of how many are sent, unless there is a cache.
        Raises LoadError that lists everything that does not fit.
        """
        sources = self._bound(weights, ignored, cast)
        transforms = self.program.used_transforms.items()
        raw: Mapping[str, Any] = sources
        kept = TransformCache(Path(cache), sources) if cache is not None else None
        sources.check_ties(kept.are_equal if kept is not None else None)
        if kept is not None:
            transformed = {name: kept.transform(t, progress=progress) for name, t in transforms}
        elif not self._backend.uploads:
            transformed = {name: run_transform(t, sources, progress=progress) for name, t in transforms}
        else:
            raw, transformed = self._sent(sources, progress)
        return Session(
            self.program, raw, transformed, sources.found.dims, sources=sources.borrowed(), ir=self.source
        )

    def _sent(
        self, sources: BoundWeights, progress: Progress | None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Send each weight as soon as it is made: raw weights by name, and the results of each transform.

        What has the same formula is made and sent once.
        """
        transforms = self.program.used_transforms
        places = place_weights(self.program, sources.found.dims)
        total = sum(result.size_bytes for result in plan_load(self.program, sources).results)
        there: dict[str, Any] = {}
        with self._backend.upload(self.target, progress, total) as send:
            for origin, names in places.items():
                first = {stored: name for name, stored in reversed(names.items()) if stored not in there}
                made = (
                    stream_transform(transforms[origin], sources, only=set(first.values()))
                    if origin
                    else ((name, sources[name]) for name in first.values())
                )
                for name, value in made:
                    there[names[name]] = send(name, value)
                    del value  # or it would live until the next one is made
        found = {
            origin: {name: there[stored] for name, stored in names.items()}
            for origin, names in places.items()
        }
        return found.pop(""), found

    def plan(self, weights: Weights, *, ignored: Sequence[str] = (), cast: bool = False) -> TransformPlan:
        """Say what `load` would make of these weights, and the most memory it would take at once. Reads headers only.

        Prints as text. Raises LoadError like `load`.
        """
        return plan_load(self.program, self._bound(weights, ignored, cast))

    def transform_params(
        self,
        weights: Weights,
        *,
        ignored: Sequence[str] = (),
        cast: bool = False,
        progress: Progress | None = None,
    ) -> TransformedWeights:
        """Run the weight transform and return its results by name; with several transforms, a dict for each by its name.

        Raises LoadError like `load`, and if the module has no transform.
        """
        transforms = self.program.used_transforms
        if not transforms:
            raise LoadError(
                "this module has no weight transform",
                help="lift it first: nn.passes.lift_transform_params(ir)",
            )
        sources = self.named(weights, ignored, cast)
        results = {name: run_transform(t, sources, progress=progress) for name, t in transforms.items()}
        found = next(iter(results.values())) if len(results) == 1 else results
        return TransformedWeights(found, sources.found.dims)

    def stream_params(self, weights: Weights, *, cast: bool = False) -> Iterator[tuple[str, Any]]:
        """Yield each result of the weight transform by name as soon as it is made; what the caller lets go of is given back. Tensors left over are ignored."""
        sources = self.named(weights, ["*"], cast)
        for transform in self.program.used_transforms.values():
            yield from stream_transform(transform, sources)

    def bind(
        self, transformed: TransformedWeights, weights: Mapping[str, torch.Tensor] | None = None
    ) -> Session:
        """Return a session over weights that were transformed before; `weights` are those that methods read as they are.

        Raises LoadError for raw weights in the place of transformed ones.
        """
        if not isinstance(transformed, TransformedWeights):
            raise LoadError(
                "these are not transformed weights",
                details=[f"got {type(transformed).__name__}, expected what transform_params returned"],
                help="call load(...) with the checkpoint's own weights",
            )
        transforms = self.program.used_transforms
        results = (
            {next(iter(transforms), ""): dict(transformed)} if len(transforms) <= 1 else dict(transformed)
        )
        return Session(self.program, weights or {}, results, transformed.dims, ir=self.source)

    def save(
        self,
        folder: str | Path,
        weights: Weights,
        *,
        ignored: Sequence[str] = (),
        cast: bool = False,
        extras: Extras | None = None,
        options: Options | None = None,
    ) -> None:
        """Write the artefact that `load(weights).save(folder)` would write, streaming: no more of the weights is in memory than at most is needed for one result.

        What several ranks run is written for all of them. For a target that names a GPU's architecture the kernels are compiled as well. `extras` goes into the artefact too; `options` says
        how to write, and who is told of the progress. Raises LoadError like both.
        """
        programs = rank_programs(self.program)
        parts = [Executable(self.ir, program, self.source) for program in programs]
        sources = [part._bound(weights, ignored, cast) for part in parts]
        sources[0].check_ties()
        options = options or Options()
        extras = extras or Extras()
        kernels = self._backend.compile_ahead(
            self.program,
            sources[0].found.dims,
            options.sizes,
            options.compiled,
            draws=extras.text is not None,
        )
        if kernels is not None:
            options.phase("kernels")
        save_stream(Path(folder), self.source, programs, sources, extras, options, kernels=kernels)

    def explain(self, method: str | None = None, /, **sizes: int) -> str:
        """Return a table of what runs: method, op, kernel, bytes, flops and why; of one method if it is given. `sizes` gives numbers for dims.

        Lines below it say, for a CUDA target, which methods are captured as CUDA graphs, and why others are not; for a CPU which kernels in C run.
        """
        return explain_kernels(self.program, sizes, method)

    def memory(self, **sizes: int) -> MemoryReport:
        """Return what weights, caches and calls take in memory, and what is there at the peak; it prints as a table.

        `sizes` gives numbers for dims; others count as the largest they can be. Raises LowerError for a dim that has no greatest
        value and is not given, for a name that no method has, and for a number that a dim cannot be.
        """
        return report_memory(self.program, sizes, memory_policy(self.target))

    def __repr__(self) -> str:
        return f"<Executable for {self.target}: {', '.join(self.program.methods)}>"

    def check(
        self, checkpoint: Checkpoint, *, ignored: Sequence[str] = (), cast: bool = False
    ) -> CheckReport:
        """Report what the module would make of each tensor of a checkpoint, and what does not fit. Reads headers only, raises nothing."""
        return _report(self.ir, self.program, checkpoint, ignored, cast)

    def named(self, weights: Weights, ignored: Sequence[str] = (), cast: bool = False) -> BoundWeights:
        """Return weights by the model's names. Raises LoadError like `load` if they are not what the module wants."""
        bound = self._bound(weights, ignored, cast)
        bound.check_ties()
        return bound

    def _bound(self, weights: Weights, ignored: Sequence[str], cast: bool) -> BoundWeights:
        """Prove from types alone that the weights are what the module wants."""
        if isinstance(weights, TransformedWeights):
            raise LoadError(
                "these weights are transformed already",
                help="give load the checkpoint's own weights, or call bind(...)",
            )
        if not isinstance(weights, Mapping):
            raise LoadError(
                f"the weights are a {type(weights).__name__}, not a checkpoint or a dict from names to tensors",
                help="give nnfront.Checkpoint(folder) or model.state_dict(), and {} if there are none",
            )
        uses = weight_uses(self.program)
        found = check_weights(
            uses.wanted,
            weights.infos if isinstance(weights, Checkpoint) else tensor_types(weights),
            aliases=self.program.aliases,
            ignored=_allowed(self.ir, ignored),
            needed_by=uses.needed_by,
            cast=cast,
        )
        return BoundWeights(weights, found)
