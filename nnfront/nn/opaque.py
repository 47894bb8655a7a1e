# SPDX-License-Identifier: Apache-2.0
"""`Object`: an opaque value that external functions make and use."""

from __future__ import annotations

from typing import Any, TypeVar

from nnfront.ir import ObjectType, Var

Self = TypeVar("Self", bound="Object")


class Object:
    """An opaque value. Derive from it, give it methods that call `op.extern`, and name the class in `spec.Object`.

    A subclass may define `__init__` for its own use: a traced instance is made without it.
    """

    content: Var | Any = None

    @classmethod
    def traced(cls: type[Self], var: Var) -> Self:
        """Return an instance that stands for the variable `var`."""
        made = cls.__new__(cls)
        made.content = var
        return made

    @classmethod
    def object_type(cls) -> ObjectType:
        """Return the IR type of this class of objects."""
        return ObjectType(cls.__qualname__)

    @property
    def type(self) -> ObjectType:
        """The IR type."""
        return type(self).object_type()


def kind_of(value: Any) -> type[Object]:
    """Return the class with which a variable stands for `value` elsewhere: its own, of no matter for what is no object."""
    return type(value) if isinstance(value, Object) else Object
