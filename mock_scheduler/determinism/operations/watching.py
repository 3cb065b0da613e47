"""The base of modes that watch torch's operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class WatchingMode(TorchDispatchMode):
    """A mode for subclasses, which sees each operation once, by plain tensors, and runs it in ``watch``."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled code run as it does without the mode, unseen; torch would run it uncompiled otherwise."""
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
