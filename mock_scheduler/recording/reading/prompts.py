"""Compares the prompts of a batch, live or recorded, with a pipeline's request: one rule for both.

Contract: a request names its prompts once per trajectory (as many as its ``batch_size``; the prompt of a trajectory is
that of its first row) or, with any other number, once per group, each of whose trajectories then has the one prompt.
Their order does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.batch.trajectory import RowKey, TrajectoryKey
from mock_scheduler.scheduler import RolloutRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptDifference:
    """``absent``: digests asked for and lacking in the batch; ``not_asked``: the other way round; with their counts;
    ``unit``: one prompt is asked for and counted for each of these."""

    num_asked: int
    absent: Counter[str]
    not_asked: Counter[str]
    unit: str

    @property
    def example(self) -> str:
        """One digest that is on one side only."""
        return next(iter(self.absent or self.not_asked))


def prompts_of(batch: RolloutBatch) -> dict[TrajectoryKey, str]:
    """Trajectory -> digest of its prompt, taken from its first row."""
    keys = [(identity.scheduler_id, *identity.numbers) for identity in batch.identities]
    return first_prompts(zip(keys, batch.prompt_digests, strict=True))


def first_prompts(rows: Iterable[tuple[RowKey, str]]) -> dict[TrajectoryKey, str]:
    """Trajectory -> digest of the prompt of its first row, in identity order; ``rows``: in any order."""
    first: dict[TrajectoryKey, str] = {}
    for key, digest in sorted(rows):
        first.setdefault(key[:4], digest)
    return first


def compare_prompts(
    prompts: Mapping[TrajectoryKey, str], request: RolloutRequest, *, is_part: bool = False
) -> PromptDifference | None:
    """Compares the prompts present with those asked for; None where nothing differs, or none was asked for.

    ``is_part``: the trajectories are one process's part of the batch, so prompts may be absent.
    """
    asked = request.prompt_digests
    if asked is None:
        return None
    if len(asked) == request.batch_size:
        unit, found = "trajectory", Counter(prompts.values())
    else:
        unit, found = "group", Counter(digest for _, digest in {(key[:3], value) for key, value in prompts.items()})
    absent, not_asked = Counter(asked) - found, found - Counter(asked)
    if is_part:
        absent.clear()
    if not absent and not not_asked:
        return None
    return PromptDifference(num_asked=len(asked), absent=absent, not_asked=not_asked, unit=unit)
