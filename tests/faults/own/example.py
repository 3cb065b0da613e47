"""The modules of ``docs/examples/own_megatron``, as injectors reach into them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import replaced

FOLDER = Path(__file__).parents[3] / "docs" / "examples" / "own_megatron"


def find_module(name: str) -> Any:
    """Imports ``train`` or ``model``, each once, from their own folder."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def in_example(module: str, name: str, wrap: Callable[[Fired, Any], Any]) -> Injector:
    """The injector that replaces a function of the example; ``wrap`` gets the counter and the function."""

    @contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        with replaced(find_module(module), name, lambda original: wrap(fired, original)):
            yield

    return inject
