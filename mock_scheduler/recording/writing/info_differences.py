"""What differs between two records of how one step was played."""

from __future__ import annotations

from mock_scheduler.recording.step.step_info import StepInfo
from mock_scheduler.support.digests import JSON, canonical_json


def info_differences(recorded: StepInfo, played: StepInfo) -> list[str]:
    """A line for each value that says from where the step was played and differs; metrics may hold times."""
    values: tuple[tuple[str, JSON, JSON], ...] = (
        ("policy_version", recorded.policy_version, played.policy_version),
        ("data_cursor", recorded.data_cursor, played.data_cursor),
        ("scheduler_state", dict(recorded.scheduler_state), dict(played.scheduler_state)),
        ("group_size", recorded.group_size, played.group_size),
    )
    texts = [(name, canonical_json(a), canonical_json(b)) for name, a, b in values]
    return [f"{name}: recorded {a}, played {b}" for name, a, b in texts if a != b]
