# SPDX-License-Identifier: Apache-2.0
"""`Module`: a tree of parameters, derived tensors and further modules, with methods that can be exported or run."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from nnfront.errors import LoadError, SpecError, TraceError, UnknownName, nearest
from nnfront.ir import IRModule, verify
from nnfront.nn import elsewhere, layer_equivalence
from nnfront.nn.eager import eager
from nnfront.nn.effect import Effect
from nnfront.nn.foreign import refuse_torch
from nnfront.nn.methods import refuse_additions, trace
from nnfront.nn.mode import active_mode, outside_place
from nnfront.nn.parameter import Parameter
from nnfront.nn.spec import ModuleSpec
from nnfront.nn.tensor import Tensor
from nnfront.nn.trace_state import Tree
from nnfront.ops.rules import dtype_name

Self = TypeVar("Self", bound="Module")
Result = TypeVar("Result")
Items: TypeAlias = list[Any] | tuple[Any, ...] | dict[Any, Any]


def _of_a_model(method: Callable[..., Result]) -> Callable[..., Result]:
    """Refuse a call on the class, in which the first argument takes the model's place."""

    @functools.wraps(method)
    def called(self: Any, *args: Any, **kwargs: Any) -> Result:
        if not isinstance(self, Module):
            raise SpecError(
                f"{method.__name__} is called on a class, not on a model",
                where=outside_place(),
                help=f"make one first, as in Model(config).{method.__name__}(spec)",
            )
        return method(self, *args, **kwargs)

    return called


_NOTHING = object()  # what no attribute holds
_PLAIN = frozenset((bool, int, float, str, type(None)))  # most attributes, which hold no part of a model


class Module:
    """Base of all layers and models. Assign parameters, derived tensors and modules to attributes; define `forward`.

    Attribute paths are checkpoint names; lists, tuples and dicts of modules or parameters count as well, by index or key.
    Called with torch tensors a module runs eagerly; `export` makes IR of it and leaves it unchanged.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute; defined by subclasses."""
        raise self._lacks_forward()

    def _lacks_forward(self) -> TraceError:
        return TraceError(
            f"{type(self).__name__} defines no forward",
            help="define forward(self, x): it is what a call runs",
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = active_mode.get()
        if mode is not None:
            return mode.call(self, args, kwargs)
        if _has_torch_tensor((args, kwargs)):
            return eager(self.forward, *args, **kwargs)
        return self.forward(*args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if not layer_equivalence._active:
            return object.__getattribute__(self, name)
        state = object.__getattribute__(self, "__dict__")
        if name in state:
            found = state[name]
            layer_equivalence.note_read(self, name, found)
            return found
        if name == "__dict__":
            layer_equivalence.note_all_read(self)
            return state
        try:
            return object.__getattribute__(self, name)  # methods, properties and constants of the class
        except AttributeError:
            layer_equivalence.note_read(self, name, layer_equivalence.ABSENT)
            raise

    if not TYPE_CHECKING:  # which knows what attributes there are

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):  # a property that has raised AttributeError itself
                return object.__getattribute__(self, name)
            own = [n for n in (*object.__getattribute__(self, "__dict__"), *dir(type(self))) if n[0] != "_"]
            raise UnknownName(
                f"{type(self).__name__} has no attribute {name!r}",
                where=outside_place(),
                help=nearest(name, own) or elsewhere.known(name),
            )

    def __setattr__(self, name: str, value: Any) -> None:
        mode = active_mode.get()
        if mode is not None and vars(self).get(name, _NOTHING) is not value:
            mode.allow_change(self, name)
        refuse_torch(name, value)
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        mode = active_mode.get()
        if mode is not None:
            mode.allow_change(self, name)
        object.__delattr__(self, name)

    # The tree.

    def children(self) -> Iterator[Module]:
        """Yield the modules directly below, containers looked through."""
        return (child for _, child in self.named_children())

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) directly below, containers looked through."""
        return ((name, item) for name, item in _members(self) if isinstance(item, Module))

    def modules(self) -> Iterator[Module]:
        """Yield this module and all below, each once."""
        return (module for _, module in self.named_modules())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield (path, module) for this module and all below, each once, under its first path."""
        return _each_once(self, prefix, lambda item: isinstance(item, Module))

    def parameters(self) -> Iterator[Parameter]:
        """Yield each stored parameter once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield (path, parameter), each parameter once, under its first path, which is its checkpoint name."""
        return _each_once(self, prefix, lambda item: isinstance(item, Parameter))

    def named_derived(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (path, tensor) of each derived tensor once."""
        return _each_once(self, "", lambda item: isinstance(item, Tensor) and item.is_derived)

    def aliases(self) -> dict[str, str]:
        """Return the further paths of tied parameters, each with the path under which the parameter is stored."""
        first: dict[int, str] = {}
        found: dict[str, str] = {}
        for path, item in _walk(self, ""):
            if isinstance(item, Parameter) and first.setdefault(id(item), path) != path:
                found[path] = first[id(item)]
        return found

    def apply(self: Self, function: Callable[[Module], Any]) -> Self:
        """Call `function` on every module below and then on this one; return this one."""
        for module in reversed(list(self.modules())):
            function(module)
        return self

    # Values.

    def state_dict(self) -> dict[str, torch.Tensor | Parameter]:
        """Return each stored parameter's value by name; a parameter without a value stands for itself."""
        return {name: p if p.data is None else p.data for name, p in self.named_parameters()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        """Bind values by name, aliases of tied parameters included; all or nothing.

        Returns the names that are missing and those that are unexpected. Raises LoadError that lists everything that does not
        fit: with `strict` missing and unexpected names, and always wrong shapes and dtypes. Nothing is bound then.
        """
        own = dict(self.named_parameters())
        aliases = self.aliases()
        values: dict[str, torch.Tensor] = {}
        unexpected, wrong = [], []
        for name, given in state.items():
            target = aliases.get(name, name)
            if target not in own:
                unexpected.append(name)
                continue
            data = given.data if isinstance(given, Parameter) else given
            data = data.torch() if isinstance(data, Tensor) else data
            if data is None:
                continue
            tensor = data if isinstance(data, torch.Tensor) else torch.as_tensor(data)
            mismatch = own[target].mismatch(tensor)
            if mismatch:
                wrong.append(f"{name}: {mismatch}")
            elif target in values and not torch.equal(values[target], tensor):
                wrong.append(f"{name}: the parameter is tied to {target!r}, whose value differs")
            values.setdefault(target, tensor)
        missing = [name for name in own if name not in values]
        problems = list(wrong)
        if strict:
            problems += [f"missing: {name}" for name in missing]
            for name in unexpected:
                near = nearest(name, own)
                problems.append(f"unexpected: {name}" + (f" ({near})" if near else ""))
        if problems:
            raise LoadError(f"the state does not fit {type(self).__name__}", details=problems)
        for name, tensor in values.items():
            own[name].data = tensor
        return missing, unexpected

    def to(self: Self, dtype: str | None = None) -> Self:
        """Change the dtype of every float parameter, bound values included; return this module.

        Derived tensors follow, since their types are inferred anew whenever they are used.
        """
        if dtype is not None:
            name = dtype_name(dtype)
            for parameter in self.parameters():
                if parameter.dtype.startswith(("float", "bfloat")):
                    parameter.to(name)
            for module in self.modules():
                if isinstance(vars(module).get("dtype"), str):
                    object.__setattr__(module, "dtype", name)
        return self

    # Export.

    @_of_a_model
    def export(self, spec: Mapping[str, Any] | ModuleSpec, *, share_layers: bool = True) -> IRModule:
        """Trace the methods named in `spec` and return them as verified IR. Neither the module nor the spec changes.

        `share_layers=False` traces every layer of a list in place, also where several are alike.
        Raises SpecError, TraceError, InferError, DimError with the module path, the method and the source line.
        """
        if isinstance(spec, Mapping) and "forward" in spec and type(self).forward is Module.forward:
            raise self._lacks_forward()
        specs = ModuleSpec.from_raw(spec, self)
        members = _walk(self, "")
        containers = _containers(item for _, item in members if isinstance(item, Module))
        before = [(each, tuple(_parts(each))) for each in containers]
        module = trace(self._tree(members, containers if share_layers else ()), specs)
        if any(len(each) != len(parts) or not all(map(is_, _parts(each), parts)) for each, parts in before):
            refuse_additions(members, _walk(self, ""), module)
        verify(module)
        return module

    def _tree(self, members: Iterable[tuple[str, Any]], sharing: Iterable[Items]) -> Tree:
        parameters: dict[str, Parameter] = {}
        aliases: dict[str, str] = {}
        names: dict[int, str] = {}
        effects: dict[str, Effect] = {}
        for path, item in members:
            first = names.setdefault(id(item), path)
            if isinstance(item, Parameter):
                other = parameters.get(aliases.get(path, path), item)
                if other is not item:
                    raise TraceError(
                        f"two parameters have the checkpoint name {path!r}",
                        details=[f"{other!r} and {item!r}"],
                        help="the name of an attribute, or the key of a dict, with a dot in it reads like a path: rename it",
                    )
                if first == path:
                    parameters[path] = item
                else:
                    aliases[path] = first
            elif isinstance(item, Effect) and first == path:
                effects[path] = item
        return Tree(parameters, aliases, names, effects, _shareable(sharing))

    # Text.

    def extra_repr(self) -> str:
        """Return what the text form shows of this module itself: plain attributes and parameters."""
        shown = []
        for name, item in vars(self).items():
            if isinstance(item, (bool, int, float, str)) and not name.startswith("_"):
                shown.append(f"{name}={item!r}")
            elif isinstance(item, Tensor):
                shown.append(
                    f"{name}: {item.dtype}[{', '.join(map(str, item.shape))}]{' derived' if item.is_derived else ''}"
                )
        return ", ".join(shown)

    def __repr__(self) -> str:
        inner = [f"({name}): {child!r}".replace("\n", "\n  ") for name, child in self.named_children()]
        head = f"{type(self).__name__}({self.extra_repr()}"
        return head + "".join(f"\n  {line}" for line in inner) + ("\n)" if inner else ")")


def _members(module: Module) -> list[tuple[str, Any]]:
    """Return (name, item) for the parameters, tensors and modules that a module holds, containers looked through."""
    found: list[tuple[str, Any]] = []
    for name, item in vars(module).items():
        if type(item) not in _PLAIN and isinstance(item, (Module, Tensor, Effect, list, tuple, dict)):
            _look_through(module.member_name(name) if isinstance(module, Container) else name, item, found)
    return found


def _look_through(name: str, item: Any, found: list[tuple[str, Any]]) -> None:
    if isinstance(item, (Module, Tensor, Effect)):
        found.append((name, item))
    elif isinstance(item, (list, tuple)):
        for i, part in enumerate(item):
            _look_through(f"{name}.{i}" if name else str(i), part, found)
    elif isinstance(item, dict):
        for key, part in item.items():
            _look_through(f"{name}.{key}" if name else str(key), part, found)
    else:
        refuse_torch(name, item)


def _each_once(module: Module, prefix: str, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield (path, item) for what is wanted of a tree, under its first path."""
    seen: set[int] = set()
    for path, item in _walk(module, prefix):
        if is_wanted(item) and id(item) not in seen:
            seen.add(id(item))
            yield path, item


def _walk(module: Module, prefix: str) -> list[tuple[str, Any]]:
    """Return (path, item) for a module, then what it holds and all below, under every path; a cycle is not followed."""
    found: list[tuple[str, Any]] = []
    above: set[int] = set()

    def visit(module: Module, path: str) -> None:
        found.append((path, module))
        if id(module) in above:
            return
        above.add(id(module))
        for name, item in _members(module):
            below = f"{path}.{name}" if path else name
            if isinstance(item, Module):
                visit(item, below)
            else:
                found.append((below, item))
        above.discard(id(module))

    visit(module, prefix)
    return found


def _containers(modules: Iterable[Module]) -> list[Items]:
    """Return the lists, tuples and dicts that modules hold, those in others as well."""
    found = [x for module in modules for x in vars(module).values() if isinstance(x, (list, tuple, dict))]
    for each in found:
        found += [part for part in _parts(each) if isinstance(part, (list, tuple, dict))]
    return found


def _parts(container: Items) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _shareable(containers: Iterable[Items]) -> frozenset[int]:
    """Return the ids of the modules that stand in a list with others of their class."""
    found: set[int] = set()
    for container in containers:
        if len(container) > 1:
            parts = [p for p in _parts(container) if isinstance(p, Module)]
            count = Counter(map(type, parts))
            found.update(id(p) for p in parts if count[type(p)] > 1)
    return frozenset(found)


def _has_torch_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_torch_tensor, value))
    return isinstance(value, dict) and any(map(_has_torch_tensor, value.values()))


class Container(Module):
    """A module that only holds others: the names of what it holds are indexes or keys, without its own attribute's."""

    def member_name(self, name: str) -> str:
        """Return the name under which the items of attribute `name` go, empty for the contents."""
        return "" if name == "data" else name
