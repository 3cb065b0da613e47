"""Calls of the pipeline that the real scheduler has not had: held until it is known whether it will answer next.

Contract: pure bookkeeping. A held call is either delivered, in order, before the next live answer, or suppressed by a
replayed one. Of what was suppressed, the latest policy version and whether the pipeline had resumed are kept, so that a
real scheduler that takes over later is where it would have been.
"""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

HeldCall: TypeAlias = tuple[str, tuple[object, ...]]


class HeldCalls:
    """Of ``suspend``, ``resume`` and ``update_weights``."""

    def __init__(self) -> None:
        self._held: deque[HeldCall] = deque()
        self._missed_version: int | None = None
        self._missed_resume = False
        #: Whether the real scheduler is generating, as far as calls that reached it say.
        self.is_running = False

    def __bool__(self) -> bool:
        return bool(self._held) or self._missed_version is not None or self._missed_resume

    def hold(self, name: str, arguments: tuple[object, ...]) -> None:
        """Keep a call until it is known what the next answer is."""
        self._held.append((name, arguments))

    def suppress(self) -> list[str]:
        """The next answer is replayed: what was held has no effect. Returns the names of these calls."""
        names = []
        while self._held:
            name, arguments = self._held.popleft()
            names.append(name)
            if name == "update_weights":
                self._missed_version = int(str(arguments[0]))
            else:
                self._missed_resume = name == "resume"
        return names

    def catch_up(self, coming: str | None) -> HeldCall | None:
        """What the real scheduler must have before ``coming``, one call at a time; None where nothing is left.

        A suppressed weight update or ``resume`` is left out where a later call does the same or undoes it. The call
        stays due until ``delivered`` says that it was made.
        """
        names = {name for name, _ in self._held} | {coming}
        if "update_weights" in names:
            self._missed_version = None
        if names & {"suspend", "resume"} or self.is_running:
            self._missed_resume = False
        if self._missed_version is not None:
            return "update_weights", (self._missed_version,)
        if self._held:
            return self._held[0]
        return ("resume", ()) if self._missed_resume else None

    def delivered(self, call: HeldCall) -> None:
        """``call`` reached the real scheduler."""
        name, _ = call
        if self._held and self._held[0] is call:
            self._held.popleft()
        elif name == "update_weights":
            self._missed_version = None
        else:
            self._missed_resume = False
        if name in ("suspend", "resume"):
            self.is_running = name == "resume"
