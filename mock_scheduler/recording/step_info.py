"""What a step file says about itself, apart from its rows.

Contract: plain JSON, bit for bit the same after a write and a read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mock_scheduler.digests import JSON, canonical_json
from mock_scheduler.errors import RecordingError
from mock_scheduler.scheduler import Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """Which step this is and how it was played.

    ``metrics``: what the real scheduler measured for this batch, for example seconds and tokens.
    ``scheduler_state``: its ``state_dict`` after the batch, so that a replay can make a truthful checkpoint.
    ``data_cursor``: where the pipeline's data stood; None where it did not say. ``shard``: (index, count) where several
    writers each hold some rows of the step; None for a single file. ``group_size``: trajectories of every group of the
    whole step, for a shard that may cut groups; None where it is not known, or is that of the rows.
    """

    step: int
    mode: Mode
    scheduler_id: str
    run_id: str
    policy_version: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    scheduler_state: Mapping[str, JSON] = field(default_factory=dict)
    data_cursor: JSON = None
    shard: tuple[int, int] | None = None
    group_size: int | None = None

    def as_json(self) -> dict[str, JSON]:
        """The fields as JSON; ``from_json`` is the inverse.

        Raises ``RecordingError`` naming the part that is no JSON (NaN, an infinity, an object).
        """
        values: dict[str, Mapping[str, JSON]] = {"metrics": self.metrics, "scheduler_state": self.scheduler_state}
        # Each value is tried alone, so that the error names it.
        parts = [(f"{group} {name!r}", value) for group, items in values.items() for name, value in items.items()]
        for label, value in [*parts, ("data_cursor", self.data_cursor)]:
            try:
                canonical_json(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise RecordingError(
                    f"step {self.step}: {label} is {value!r}, which cannot be recorded: {error}"
                ) from error
        return {
            "step": self.step,
            "mode": self.mode,
            "scheduler_id": self.scheduler_id,
            "run_id": self.run_id,
            "policy_version": self.policy_version,
            "metrics": dict(self.metrics),
            "scheduler_state": dict(self.scheduler_state),
            "data_cursor": self.data_cursor,
            "shard": self.shard,
            "group_size": self.group_size,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepInfo:
        """The info from ``as_json``; raises ``TypeError`` or ``ValueError`` where it is none."""
        info = cls(**{**value, "shard": value["shard"] and tuple(value["shard"])})
        kinds = {
            "step": (int,),
            "mode": (str,),
            "scheduler_id": (str,),
            "run_id": (str,),
            "policy_version": (int,),
            "metrics": (dict,),
            "scheduler_state": (dict,),
            "group_size": (int, type(None)),
        }
        wrong = [f"{name} {value[name]!r}" for name, kind in kinds.items() if type(value[name]) not in kind]
        if info.shard is not None and [type(number) for number in info.shard] != [int, int]:
            wrong.append(f"shard {value['shard']!r}")
        if wrong:
            raise ValueError(f"info has {', '.join(wrong)}")
        return info
