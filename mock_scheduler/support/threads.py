"""Torch's own threads, where this project computes blocks on threads of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_inner_threads() -> Iterator[None]:
    """Let torch compute each operation on one thread, since blocks are computed on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
