"""Loads functions of C files, which ``setup.py`` builds beside them where there is a compiler.

Contract: the C files need no headers of Python, and each caller has the same in another way where nothing was built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch

#: As the C files number the dtypes that they read.
DTYPE_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}


def load_function(
    beside: str, name: str, argument_types: Sequence[type], result_type: type | None = None
) -> Callable[..., Any] | None:
    """Returns a function of ``native.c``, a call of which gives the interpreter free; ``None`` where it was not built.

    ``beside``: a file in the folder of the C file. ``name``: ends with a number that rises with each change of the
    arguments, so that a library that was built before is not called with others.
    """
    path = Path(beside).with_name(f"native{EXTENSION_SUFFIXES[0]}")
    if not path.is_file():
        return None
    function = getattr(ctypes.CDLL(str(path)), name, None)
    if function is None:
        return None
    function.argtypes, function.restype = list(argument_types), result_type
    return function  # type: ignore[no-any-return]
