"""Counts the calls of a user's own functions and classes that stand in the place of a package's.

An entry module changes a kernel or a class before a run, and then calls its program. A change of a class
of which the model has none, or of a name that was imported before, never acts, and a run beside it is equal to the
baseline without proving anything. So every run with code of its own counts how often that code was called.

Contract: a counted function gives what it gave before. Code belongs to the user where its source file lies in no
installed package and in none of the changed packages. Calls of objects that are neither functions nor classes of the
user's are not counted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from mock_scheduler.support.versions import PACKAGE, installed_folders

#: The packages in which a user's code takes the place of another.
_CHANGED_PACKAGES = ("megatron", "torch", "transformer_engine", "apex", PACKAGE)


@dataclass(slots=True)
class OwnCalls:
    """The calls so far, by the dotted name of the place that the user's code stands in."""

    calls: dict[str, int] = field(default_factory=dict)
    _others: tuple[str, ...] = ()
    _seen: set[int] = field(default_factory=set)
    _known: dict[str, bool] = field(default_factory=dict)

    def _look_through(self, name: str, owner: ModuleType | type) -> None:
        """Counts the user's code among the attributes of a module or class, and of classes defined in a module."""
        for attribute, value in list(vars(owner).items()):
            place = f"{name}.{attribute}"
            if isinstance(value, type):
                if self._is_class_of_user(value):
                    self._count_class(place, value)
                elif isinstance(owner, ModuleType) and value.__module__ == owner.__name__:
                    self._look_through(place, value)
            elif self._is_object_of_user(value):
                self._count_class(place, type(value))
            else:
                counted = self._counted(place, value)
                if counted is not value:
                    setattr(owner, attribute, counted)

    def _count_class(self, place: str, own: type) -> None:
        """Counts every method of a class of the user's under one name."""
        if id(own) in self._seen:
            return
        self._seen.add(id(own))
        for attribute, value in list(vars(own).items()):
            counted = self._counted(place, value)
            if counted is not value:
                setattr(own, attribute, counted)

    def _counted(self, place: str, value: Any) -> Any:  # noqa: ANN401 - any attribute
        """Returns what counts the calls of a function of the user's; any other value as it is."""
        if isinstance(value, staticmethod | classmethod):
            inner = self._counted(place, value.__func__)
            return value if inner is value.__func__ else type(value)(inner)
        function = value.func if isinstance(value, functools.partial) else value
        if not isinstance(function, FunctionType) or not self._is_function_of_user(function):
            return value
        calls = self.calls
        calls.setdefault(place, 0)

        def counted(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes everything on
            calls[place] += 1
            return value(*args, **kwargs)

        return functools.update_wrapper(counted, value)

    def _is_function_of_user(self, function: FunctionType) -> bool:
        """Whether its code is the user's, or the code in a package's decorator around it, as ``torch.no_grad``."""
        seen: list[object] = []
        inner: object = function
        while isinstance(inner, FunctionType) and inner not in seen:
            if self._is_file_of_user(inner.__code__.co_filename):
                return True
            seen.append(inner)
            inner = vars(inner).get("__wrapped__")
        return False

    def _is_class_of_user(self, value: type) -> bool:
        module = sys.modules.get(value.__module__)
        origin = getattr(module, "__file__", None)
        return isinstance(origin, str) and self._is_file_of_user(origin)

    def _is_object_of_user(self, value: object) -> bool:
        return not isinstance(value, FunctionType | ModuleType) and self._is_class_of_user(type(value))

    def _is_file_of_user(self, name: str) -> bool:
        if name not in self._known:  # torch alone has a hundred thousand attributes
            self._known[name] = not name.startswith("<") and not os.path.realpath(name).startswith(self._others)
        return self._known[name]


def count_own_calls(packages: Iterable[str] = ()) -> OwnCalls:
    """Begins to count the calls of the user's code that stands in loaded packages; ``packages``: further ones."""
    changed = {*_CHANGED_PACKAGES, *packages}
    folders = [folder for name in changed if name in sys.modules for folder in sys.modules[name].__path__]
    own = OwnCalls(_others=(*installed_folders(), *(os.path.realpath(folder) + os.sep for folder in folders)))
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in changed and isinstance(module, ModuleType):
            own._look_through(name, module)
    return own
