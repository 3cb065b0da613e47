"""``mock-scheduler`` whose runs of a test's entry are forked as the program's own are: ``python -m`` this file.

A run with a module of the user's imports all by itself, since that module may say what is imported. Entries of tests
change or look at what has been imported, so that no rank need import torch and Megatron again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from mock_scheduler.cli import main
from mock_scheduler.launch.warm_start import ForkedProcess, WarmStarts
from pipelines.program import PROGRAM

_start = WarmStarts.start


def _start_tests_too(
    warm: WarmStarts, argv: Sequence[str], *, preload: Sequence[str], **others: Any
) -> ForkedProcess | None:
    is_ours = any(word.startswith(("tests.faults.", "tests.pipelines.workers.")) for word in argv)
    return _start(warm, argv, preload=PROGRAM.preload if is_ours else preload, **others)


if __name__ == "__main__":
    WarmStarts.start = _start_tests_too  # type: ignore[method-assign, assignment]
    sys.exit(main())
