"""Waits for what other processes do, by a clock and a pause that a caller can choose.

Contract: what is waited for is looked at before the first pause and once more when the time is over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("mock_scheduler.rollout_mock")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_SAID_AFTER_S, _SAID_EVERY_S = 5.0, 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long to wait for the other processes of a run, by which clock (seconds, monotonic), and how to pause."""

    timeout_s: float = 600.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def wait_until(self, condition: Callable[[], bool], *, describe: Callable[[], str]) -> bool:
        """Look at ``condition`` until it holds, with pauses that grow to a second; whether it did in time.

        ``describe``: what is waited for, such as ``shard 3 of 4 of train step 0``; a wait that takes long says so, in a
        warning after 5 s and then every 30 s.
        """
        started_s, pause_s = self.clock(), _FIRST_PAUSE_S
        deadline_s, said_next_s = started_s + self.timeout_s, started_s + _SAID_AFTER_S
        while not condition():
            now_s = self.clock()
            if now_s >= deadline_s:
                return False
            if now_s >= said_next_s:
                said_next_s = now_s + _SAID_EVERY_S
                logger.warning(
                    "[Rollout Mock] Waiting for %s, for at most %g s (%.0f s so far)",
                    *(describe(), self.timeout_s, now_s - started_s),
                )
            self.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True
