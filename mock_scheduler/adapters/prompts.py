"""The prompts that a trainer drew for a rollout, told apart by their digests: those of a replay must be the recorded.

Contract: a prompt that is no plain data, as one with images, has no digest and is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.adapters.plain_values import to_json
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import shown
from mock_scheduler.support.digests import JSON, compute_json_digest

_NUM_SHOWN = 3


def digest_prompts(prompts: object, num_rows: int | None = None) -> list[str | None]:
    """Give the digest of each prompt; None for each of ``num_rows`` where there are not as many prompts."""
    if not isinstance(prompts, Sequence) or num_rows not in (None, len(prompts)):
        return [None] * (num_rows or 0)
    digests: list[str | None] = []
    for prompt in prompts:
        try:
            digests.append(compute_json_digest(to_json(prompt, "prompt")))
        except BatchError:  # images and the like, which are no plain data
            digests.append(None)
    return digests


def list_prompt_problems(recorded: Sequence[JSON], prompts: Sequence[object], what: str = "row") -> list[str]:
    """List the prompts that are not the recorded ones, in one line; ``recorded``: digests, in the trainer's order."""
    if len(prompts) != len(recorded):
        return [f"the batch has {len(recorded)} {what}s; the trainer drew {len(prompts)} prompts"]
    others = [
        number
        for number, (old, new) in enumerate(zip(recorded, digest_prompts(prompts), strict=True))
        if None not in (old, new) and old != new
    ]
    if not others:
        return []
    named = "; ".join(f"{what} {number} is now {shown(prompts[number])}" for number in others[:_NUM_SHOWN])
    more = f" (and {len(others) - _NUM_SHOWN} more)" if len(others) > _NUM_SHOWN else ""
    return [
        f"{len(others)} of {len(prompts)} prompts are not the recorded ones: {named}{more}. Use the data set, "
        "seed and order of the recording, or record again"
    ]
