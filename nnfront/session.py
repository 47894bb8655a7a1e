# SPDX-License-Identifier: Apache-2.0
"""`Session`: methods with their weights, ready to be called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nnfront.artefact.save import Extras, save_values
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.registry import backend_of
from nnfront.backends.table import explain_kernels, memory_policy
from nnfront.dims import Symbol
from nnfront.errors import LoadError, RunError
from nnfront.ir import IRModule
from nnfront.lower import Program, StateType, world_of
from nnfront.memory.report import MemoryReport, report_memory
from nnfront.runtime import Method
from nnfront.runtime.bind_arguments import Known
from nnfront.runtime.cases import CaseList, Explanation
from nnfront.runtime.load_frame import Values, learn_dims
from nnfront.runtime.method import LoadedMethods
from nnfront.runtime.profile import Profile
from nnfront.runtime.random_arguments import RandomArguments
from nnfront.state.cache import Cache
from nnfront.state.new import Amount, new_cache
from nnfront.state.type import describe, layout
from nnfront.weights import BoundWeights
from nnfront.weights.export_checkpoint import export_checkpoint
from nnfront.weights.session_weights import Layout, Results, SessionWeights
from nnfront.weights.update import renew
from nnfront.weights.write import SHARD_BYTES


class Session(Mapping[str, Method]):
    """The methods of a program by name, over one set of weights that only `update` replaces."""

    def __init__(
        self,
        program: Program,
        weights: Mapping[str, Any],
        transformed: Mapping[str, Mapping[str, Any]] | None = None,
        dims: Mapping[Symbol, int] | None = None,
        *,
        sources: BoundWeights | None = None,
        ir: IRModule | None = None,
        extras: Extras | None = None,
        kernels: CompiledKernels | None = None,
    ) -> None:
        """`weights` are the raw ones by name, `transformed` the results of each transform by its name and theirs.

        `dims` are sizes that weights have said which are not among these; `sources` is the checkpoint that all this was made of,
        where there is one; `ir` is the module that was compiled, `extras` what `save` adds to an artefact; `kernels` are compiled already.
        Raises LoadError for weights that do not fit, and for kernels that cannot run on the GPU here.
        """
        self.program = program
        self.backend = backend_of(program.target)
        self.sources = sources
        self.extras = extras or Extras()
        self._ir = ir
        read = [w.name for method in program.methods.values() for w in method.weights if w.role == "weight"]
        given = {name: weights[name] for name in dict.fromkeys(read) if name in weights}
        weights, results = _placed(program.target, given, transformed or {})
        values: dict[str, Values] = {
            name: {"weight": weights, "transformed": results.get(method.transform or "", {})}
            for name, method in program.methods.items()
        }
        self._known: Known = {symbol: (number, "the weights") for symbol, number in (dims or {}).items()}
        while any(
            [learn_dims(self._known, method, values[name]) for name, method in program.methods.items()]
        ):
            pass  # what one has learned may tell more to another, and is to be checked against all
        numbers = {symbol: number for symbol, (number, _) in self._known.items()}
        self._current = SessionWeights(Layout(program, results, numbers), weights, results)
        self._loaded_methods = LoadedMethods()
        self._ahead = kernels
        self.kernels = None if kernels is None else self.backend.launcher(kernels, self.device)
        """What launches the kernels that were compiled ahead; printed, it says which ran and which others were compiled here, and why."""
        self._methods = {
            name: Method(m, values[name], self._known, self._loaded_methods, self.kernels)
            for name, m in program.methods.items()
        }
        self._updating = threading.Lock()

    @property
    def device(self) -> torch.device:
        """Where its tensors live: what methods take and return, weights, and caches."""
        return self.backend.device(self.program.target)

    @property
    def weights(self) -> Mapping[str, Any]:
        """All that the session holds, by name: weights as they are, and results of transforms."""
        return self._current.weights

    def __getitem__(self, name: str) -> Method:
        method = self._methods.get(name)
        if method is None:
            raise RunError(
                f"there is no method {name!r}",
                help=f"methods are {', '.join(map(repr, self._methods)) or 'none'}",
            )
        return method

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def __len__(self) -> int:
        return len(self._methods)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(self._methods)

    def update(self, weights: Mapping[str, torch.Tensor], *, cast: bool = False) -> tuple[str, ...]:
        """Replace some of the checkpoint's weights; return the names of what is new in `weights`, the rest stays as it is.

        `weights`: by the checkpoint's names, of the model's shapes and dtypes; with `cast` in other float dtypes. They are copied.
        What is made of them is made again. A call in flight, and any that begins before this returns, sees all old or all new weights.
        Raises LoadError if something does not fit; nothing has changed then.
        """
        with self._updating:
            with self.backend.upload(self.program.target) as send:
                renewed, raw, results = renew(self._current, weights, self.sources, cast=cast, send=send)
            loaded = dict(self._loaded_methods.loaded)
            for name, method in self._methods.items():
                made = results.get(method.program.transform or "", {})
                changed: Values = {"weight": raw, "transformed": made}
                if any(w.name in changed.get(w.role, {}) for w in method.program.weights):
                    loaded[name] = method.with_weights(changed)
            before, self._current = self._current, renewed
            self._loaded_methods.loaded = loaded
        return tuple(n for n, value in self.weights.items() if value is not before.weights[n])

    def save(self, folder: str | Path) -> None:
        """Write an artefact: the methods and the weights as they are now, in a folder that `nnfront.load` reads.

        With a target that names a GPU's architecture, its kernels are compiled as well, if they have not been.
        An artefact that is there already is replaced in one step; a failure or a crash leaves it as it was.
        Raises LoadError if the folder holds anything else, if it cannot be written, and for a session that was made without its IR.
        """
        if (ranks := world_of(self.program)) > 1:
            raise LoadError(
                f"this session has the weights of one of {ranks} ranks, so it cannot be saved",
                help=f"make the artefact of the folder: nnfront export DIR --tp {ranks} -o OUT",
            )
        if self._ir is None:
            raise LoadError(
                "this session was made without its IR, so it cannot be saved",
                help="make it with nnfront.compile(ir).load(...)",
            )
        current = self._current
        values = {"": current.raw, **current.results}
        dims = {symbol: number for symbol, (number, _) in self._known.items()}
        draws = self.extras.text is not None
        kernels = (
            self.backend.compile_ahead(self.program, dims, draws=draws)
            if self._ahead is None
            else self._ahead
        )
        save_values(Path(folder), self._ir, self.program, values, dims, self.extras, kernels=kernels)

    def export_checkpoint(
        self,
        folder: str | Path,
        *,
        shard_bytes: int = SHARD_BYTES,
        overwrite: bool = False,
        writes: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Path]:
        """Write the weights as they are now as a checkpoint, in the layout, under the names and in the dtypes that it had; return the files.

        `shard_bytes`: from this size on there are several files and an index. `overwrite`: replace the weights in a folder that is not
        empty; its other files stay. `writes`: of ranks that divide the model all call this, and one of them writes. `progress` is told how many bytes of how many are written. The folder appears whole or not at all.
        Raises LoadError that lists weights that cannot be had back (quantised ones), and if the folder cannot be written.
        """
        return export_checkpoint(
            self._current,
            self.sources,
            Path(folder),
            shard_bytes=shard_bytes,
            overwrite=overwrite,
            writes=writes,
            progress=progress,
        )

    def explain(self, method: str | None = None, *args: Any, **kwargs: Any) -> Explanation | CaseList | str:
        """Without a method, return the table of what runs that `Executable.explain` gives: `explain(batch=1)` gives numbers for dims.

        With one, say which special case a call with these arguments takes, which checks fail for the others and why, and what
        each check costs; nothing runs. Without arguments, list the cases and how often each was taken.

        Raises RunError for a method that is not there, and if the arguments do not fit its signature.
        """
        return (
            explain_kernels(self.program, kwargs) if method is None else self[method].explain(*args, **kwargs)
        )

    def profile(self, method: str, *args: Any, **kwargs: Any) -> Profile:
        """Run a method with these arguments, each of its instructions by itself as well, and say where the time goes; it prints as a table.

        Caches are left as they were. Raises RunError as a call does.
        """
        return self[method].profile(*args, **kwargs)

    def random_arguments(self, method: str, *, seed: int = 0, filled: int = 3, **sizes: int) -> list[Any]:
        """Return random arguments for a method: normal floats, indices inside their tables, caches that hold `filled` random tokens.

        `sizes` are numbers for dims; others are the least that they can be, those of caches large enough. Raises RunError for a
        name that is no dim of the method, and if there are no such arguments.
        """
        called = self[method]
        names = [b.symbol.name for b in called.program.dims]
        for name in sizes:
            if name not in names:
                raise RunError(
                    f"{name!r} is not a dim of {method}", details=[f"dims are {', '.join(names) or 'none'}"]
                )
        drawn = RandomArguments(called, sizes, {}, seed, filled).arguments(None, 0)
        if drawn is None:
            raise RunError(f"{method}: no arguments were found for {sizes}")
        return drawn[0]

    def hits(self, method: str) -> dict[str, int]:
        """Return how many calls took each special case of a method, by the case's text, `general` for none of them."""
        return self[method].hits

    def make_cache(
        self,
        argument: str | None = None,
        *,
        pages: Amount | None = None,
        page_size: int | None = None,
        calls: Mapping[str, int] | None = None,
        stored_as: str | None = None,
        **sizes: Amount,
    ) -> Cache:
        """Make an empty cache for the methods of this session; `sizes` are its dims by name: `make_cache(batch=1, max_seq=4096)`.

        `argument`: which argument the cache is for, where methods take several that differ: `make_cache("memory", batch=1, max_source=512)`.

        With a `page_size`, a power of two, its sequences take pages of so many tokens from a pool when they need them; `pages` is how
        many the pool has, by default enough for all sequences at their longest.

        `pages`, or one of the dims, may be "fit": as much as the memory that is free now holds beside the calls to come, by their plans;
        nothing runs for that. `calls` are sizes of these calls, such as the longest prompt: `calls={"seq": 2048}`; what is not given counts
        as the largest it can be, up to `max_seq`. A thirty-second of the device is left alone.

        `stored_as`: "float8_e4m3fn" keeps keys and values in 8 bits, with a scale for each token and head: about half the memory of a
        half type, and an error of up to 1/16 of a value.

        Raises RunError for a dim that is missing, unknown or outside its range, for pages that cannot be, if no method takes a cache,
        and if the memory is too little: then it says what fits.
        """
        types = {
            a.type: None
            for m in self.program.methods.values()
            for a in m.arguments
            if isinstance(a.type, StateType) and argument in (None, a.name)
        }
        if not types:
            named = "" if argument is None else f" {argument!r}"
            raise RunError(f"no method takes a cache{named}")
        if len({layout(type) for type in types}) > 1:
            raise RunError(
                "the methods take different caches",
                details=[describe(layout(type)) for type in types],
                help="make_cache(ARGUMENT, ...) makes the one for an argument of that name",
            )
        type = next(iter(types))
        known = {symbol.name: number for symbol, (number, _) in self._known.items()}
        return new_cache(
            self.program,
            type,
            sizes,
            known,
            pages=pages,
            page_size=page_size,
            calls=calls,
            stored_as=stored_as,
        )

    def memory(self, **sizes: int) -> MemoryReport:
        """Return what weights, caches and calls take in memory, as `Executable.memory` does."""
        return report_memory(self.program, sizes, memory_policy(self.program.target))


def _placed(
    target: str, weights: Mapping[str, Any], results: Results
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Weights and results of transforms where the target's kernels read them; what is one value under several names stays one."""
    placed: dict[int, Any] = {}
    with backend_of(target).upload(target) as send:

        def place(name: str, value: Any) -> Any:
            if id(value) not in placed:
                placed[id(value)] = send(name, value)
            return placed[id(value)]

        raw = {name: place(name, value) for name, value in weights.items()}
        made = {
            transform: {name: place(name, value) for name, value in found.items()}
            for transform, found in results.items()
        }
    return raw, made
