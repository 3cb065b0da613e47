"""Reads rollouts that megatron/rl logs as JSON: ``rollouts_rank{rank}_iteration{iteration}_{environments}.json``.

The ranks of one tensor-parallel group write the same groups; the lowest rank's file is read. Log-probabilities have all
their bits here, unlike those of the durable bank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.megatron_rl.turns import read_reward, read_termination, read_turn, read_versions
from mock_scheduler.adapters.rows import ForeignRow, build_batch
from mock_scheduler.errors import BatchError, ForeignFileError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.foreign_files import load_json

_PATTERN = r"(?:[^/]*/)*rollouts_rank(\d+)_iteration(\d+)_[^/]*\.json"
_EXAMPLE = "rollouts_rank0_iteration12_math.json"
_MAX_BYTES = 2**30
_BY_TURN = ("trajectory", "generation_mask", "logprobs")


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, in the order of their iterations; raises as the other readers."""
    inside = source if source.is_dir() else None
    chosen: dict[int, tuple[int, Path]] = {}
    for file in find_files(source, _PATTERN, _EXAMPLE):
        rank, iteration = map(int, file.parts)
        if iteration not in chosen or rank < chosen[iteration][0]:
            chosen[iteration] = rank, file.path
    for iteration, (_, path) in sorted(chosen.items()):
        yield _read_step(_load(path, inside), path, iteration, options)


def _load(path: Path, inside: Path | None) -> list[list[Mapping[str, Any]]]:
    try:
        content: Any = load_json(path, max_bytes=_MAX_BYTES, inside=inside)
    except ValueError as error:
        raise ForeignFileError(f"{path} {error}") from error
    if not isinstance(content, list) or not all(
        isinstance(group, list) and all(isinstance(item, dict) and "trajectory" in item for item in group)
        for group in content
    ):
        raise ForeignFileError(f"{path} holds no list of groups of rollouts with a trajectory")
    return content


def _read_step(
    groups: list[list[Mapping[str, Any]]], path: Path, iteration: int, options: ImportOptions
) -> ForeignStep:
    rows = []
    for number, group in enumerate(groups):
        for member, fields in enumerate(group):
            where = f"{path}, group {number}, rollout {member}"
            try:
                rows += list(_read_rollout(fields, number, member, iteration))
            except (BatchError, TypeError, ValueError, IndexError) as error:
                raise BatchError(f"{where}: {error}") from error
    if not rows:
        raise BatchError(f"{path} holds no rollout")
    batch = build_batch(
        rows,
        sampling=options.sampling,
        scheduler_id=DEFAULT_SCHEDULER_ID,
        meta={},
        identity_fields=("problem_id", "completion_ids"),
    )
    states_versions = all(fields.get("policy_epoch") for group in groups for fields in group)
    lacks = (*options.assumed, *(() if states_versions else ("policy_versions",)))
    return ForeignStep(step=iteration, batch=batch, policy_version=iteration, lacks=lacks).noted()


def _read_rollout(fields: Mapping[str, Any], group: int, member: int, iteration: int) -> Iterator[ForeignRow]:
    turns = fields["trajectory"]
    if any(isinstance(turn, str) for turn in turns):
        raise BatchError("it is text, without tokens; it cannot be replayed")
    epochs = fields.get("policy_epoch") or []
    rest = {name: value for name, value in fields.items() if name not in _BY_TURN}
    for number in range(max(len(turns), 1)):
        parts = [(fields.get(name) or [None] * len(turns))[number] if turns else None for name in _BY_TURN]
        turn = read_turn(*parts)
        yield ForeignRow(
            tokens=turn.tokens,
            response_mask=turn.mask,
            rollout_logprobs=turn.logprobs,
            group=group,
            member=member,
            turn=number,
            reward=read_reward(fields.get("reward"), number, max(len(turns), 1)),
            versions=read_versions(turn, epochs[number] if number < len(epochs) else None, iteration),
            termination=read_termination(fields.get("rollout_status") if turns else "placeholder"),
            prompt_length=turn.prompt_length,
            tag=str(fields.get("env_id") or ""),
            native=rest,
        )
