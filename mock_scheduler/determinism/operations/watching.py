"""Watches torch's operations: a mode that is shown each of them, and the place in the program where it began.

Contract: global forward hooks only keep a stack of names; no hook is on a tensor or in the autograd graph. In backward,
the module is the one whose forward made the node: autograd numbers nodes as forward makes them (torch 2.13,
``Node::sequence_nr``), and numbers that appear while a module runs are its own.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mock_scheduler.determinism.operations.log import Phase


class WatchingMode(TorchDispatchMode):
    """A mode that sees each operation once, by plain tensors, and runs it; subclasses override ``watch``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run unseen, as without the mode; torch would run it uncompiled otherwise."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - OpOverload or HigherOrderOperator
        types: tuple[type[torch.Tensor], ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            # A tensor subclass (DTensor, Float8Tensor) takes itself apart first; its parts come back here.
            return NotImplemented
        return self.watch(func, args, kwargs or {})

    def watch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Runs the operation and returns its result."""
        return func(*args, **kwargs)


_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<frozen")
_ACCUMULATION = "AccumulateGrad"


class ProgramPlace:
    """While entered, knows the running module; ``modules``: the roots by their names in the log."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._names = {
            id(module): ".".join(filter(None, (root, name)))
            for root, tree in modules.items()
            for name, module in tree.named_modules()
        }
        self._parameters = {
            id(parameter): (f"{root}.{name.rpartition('.')[0]}", name.rpartition(".")[2])
            for root, tree in modules.items()
            for name, parameter in tree.named_parameters()
        }
        self._running: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self._next_node: dict[int, int] = {}
        self._files: dict[CodeType, str] = {}

    def __enter__(self) -> ProgramPlace:
        self._name_new_nodes()
        self._handles = (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def now(self) -> tuple[Phase, str, str, str]:
        """Returns phase, module, autograd node and ``file.py:line`` of the operation that begins; empty: unknown."""
        is_backward = torch._C._current_graph_task_id() != -1
        if self._running:
            self._name_new_nodes()
            phase = Phase.RECOMPUTATION if is_backward else Phase.FORWARD
            return phase, self._running[-1], "", self._line()
        if not is_backward:
            self._name_new_nodes()
            return Phase.OUTSIDE, "", "", self._line()
        node = torch._C._current_autograd_node()
        if node is None:
            return Phase.BACKWARD, "", "", self._line()
        name = node.name()
        if _ACCUMULATION in name:
            variable = node.variable  # type: ignore[attr-defined]
            module, parameter = self._parameters.get(id(variable), ("", ""))
            return Phase.BACKWARD, module, f"{_ACCUMULATION} of {parameter}" if parameter else _ACCUMULATION, ""
        return Phase.BACKWARD, self._module_of_node.get(node._sequence_nr(), ""), name, self._line()

    def _enter_module(self, module: torch.nn.Module, inputs: object) -> None:
        self._name_new_nodes()
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        self._name_new_nodes()
        # A module that ran when the block began was never entered; those inside it were, and have left.
        if self._running:
            self._running.pop()

    def _name_new_nodes(self) -> None:
        """Assigns the autograd nodes made since the last call to the running module."""
        # Each thread counts for itself: where one recomputes on a GPU, an equal number of another gets its name.
        next_node, thread = torch._C._autograd._get_sequence_nr(), threading.get_ident()
        module = self._running[-1] if self._running else ""
        for number in range(self._next_node.get(thread, next_node), next_node):
            self._module_of_node[number] = module
        self._next_node[thread] = next_node

    def _line(self) -> str:
        """Finds the innermost line of Python outside torch and this package; empty within autograd's engine."""
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code not in self._files:
                # A __torch_function__ only stands between the program and torch.
                is_library = code.co_name == "__torch_function__" or code.co_filename.startswith(_LIBRARY_FOLDERS)
                self._files[code] = "" if is_library else _short(code.co_filename)
            if name := self._files[code]:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def _short(filename: str) -> str:
    """Shortens a path to its part below ``site-packages`` or the working folder, as ``megatron/core/utils.py``."""
    parts = Path(filename).parts
    if "site-packages" in parts:
        return "/".join(parts[len(parts) - parts[::-1].index("site-packages") :])
    working = Path.cwd()
    return str(Path(filename).relative_to(working)) if Path(filename).is_relative_to(working) else filename
