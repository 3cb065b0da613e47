"""Waits for what other processes do, by a clock and a pause that a caller can choose.

Contract: what is waited for is looked at before the first pause and once more when the time is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait for the other processes of a run, by which clock (seconds, monotonic), and how to pause."""

    timeout_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Look at ``condition`` until it holds, with pauses that grow to a second; whether it did in time."""
        deadline_s, pause_s = self.clock() + self.timeout_s, _FIRST_PAUSE_S
        while not condition():
            if self.clock() >= deadline_s:
                return False
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True
