"""A rollout batch as the content of a debug dump's trajectory file, and such a file's trajectories one by one.

Contract: the layout is NexRL's: ``{step, num_trajectories, trajectories: [{tokens, loss_mask, reward, is_val,
extra_fields}]}``. What NexRL leaves out is in ``extra_fields`` too, so a file of ours gives the same batch back to
the bit; one of NexRL's own lacks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mock_scheduler.adapters.nexrl.files import Content, as_number
from mock_scheduler.batch import RolloutBatch, SampleIdentity, Termination, Trajectory
from mock_scheduler.batch.columns import Ragged, RowValue
from mock_scheduler.batch.trajectory import sampling_as_json
from mock_scheduler.errors import BatchError
from mock_scheduler.support.text import bullet_list

Record = dict[str, Any]

_NEEDED = ("tokens", "loss_mask", "reward", "is_val")
_NO_VALUES: Mapping[str, torch.Tensor] = {}


def group_id_of(identity: SampleIdentity) -> str:
    """NexRL's name of a row's group: ``default/3/12``, of scheduler, group and episode."""
    return "/".join(map(str, identity.group_key))


def trajectory_content(
    batch: RolloutBatch,
    *,
    step: int,
    is_val: bool = False,
    token_values: Mapping[str, torch.Tensor] = _NO_VALUES,
) -> Content:
    """The file of a step's batch: of ``trajectory``, or of ``prepared_trajectories`` with its advantages.

    token_values: floating ``[R]`` by name, one per response token of the batch in its order, as ``advantages``. In the
    file they and ``logprobs`` have one entry per token, 0 where ``loss_mask`` is 0.
    """
    group_ids = list(dict.fromkeys(group_id_of(identity) for identity in batch.identities))
    task_ids = {group_id: number for number, group_id in enumerate(group_ids)}
    offsets = batch.response_offsets.tolist()
    trajectories = []
    for index, row in enumerate(batch.rows()):
        own = slice(offsets[index], offsets[index + 1])
        values = {name: spread(row.response_mask, of_all[own]) for name, of_all in token_values.items()}
        record = _record(row, reward=float(batch.rewards[index]), is_val=is_val)
        record["extra_fields"] |= {"task_id": task_ids[group_id_of(row.identity)], **values}
        record["extra_fields"]["temperature"] = batch.sampling.temperature
        trajectories.append(record)
    return {
        "step": step,
        "num_trajectories": len(trajectories),
        "trajectories": trajectories,
        "sampling": dict(sampling_as_json(batch.sampling)),
        "group_size": batch.group_size,
        "meta": dict(batch.meta),
    }


def spread(mask: torch.Tensor, values: torch.Tensor) -> list[float]:
    """One entry per token, ``values`` where the mask is True and 0 elsewhere."""
    spread_out = values.new_zeros(len(mask), dtype=torch.float64)
    spread_out[mask] = values.detach().cpu().double()
    listed: list[float] = spread_out.tolist()
    return listed


def _record(row: Trajectory, *, reward: float, is_val: bool) -> Record:
    identity = row.identity
    return {
        "tokens": row.tokens.tolist(),
        "loss_mask": row.response_mask.int().tolist(),
        "reward": reward,
        "is_val": is_val,
        "extra_fields": {
            "group_id": group_id_of(identity),
            "uid": group_id_of(identity),
            "run_id": identity.env_id,
            "score": reward,
            "sample_id": str(identity),
            "identity": [identity.scheduler_id, *identity.numbers],
            "logprobs": spread(row.response_mask, row.rollout_logprobs),
            "turn_rewards": row.turn_rewards.tolist(),
            "policy_versions": row.policy_versions.tolist(),
            "termination": Termination(row.termination).name.lower(),
            "prompt_length": row.prompt_length,
            "tag": row.tag,
            "extras": {name: _extra_as_plain(value) for name, value in row.extras.items()},
        },
    }


def _extra_as_plain(value: RowValue) -> dict[str, object]:
    if isinstance(value, Ragged):
        return {"ragged": value.values}
    return {"dense": value} if isinstance(value, torch.Tensor) else {"json": value}


def extra_from_plain(value: object) -> RowValue:
    """A row's extra out of a file; raises ``BatchError`` for anything else."""
    if isinstance(value, dict) and len(value) == 1:
        ((kind, item),) = value.items()
        if kind == "json":
            return item  # type: ignore[no-any-return]  # checked where the batch is made
        if kind in ("ragged", "dense") and isinstance(item, torch.Tensor):
            return Ragged(item) if kind == "ragged" else item
    raise BatchError(f"is {str(value)[:60]!r}; expected one of dense, ragged and json, with its value")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DumpedTrajectory:
    """One trajectory of a file. tokens: int32 ``[T]``; mask: bool ``[T]``; extra: all of its ``extra_fields``.

    ``number``: its place in the file, from 0. ``identity``: of a row this project wrote, else None.
    """

    number: int
    tokens: torch.Tensor
    mask: torch.Tensor
    reward: float
    is_val: bool
    group_id: str
    run_id: int
    identity: SampleIdentity | None
    extra: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Its ids, for messages."""
        return f"({self.group_id}, {self.run_id})"


def read_trajectories(content: Content, where: str) -> list[DumpedTrajectory]:
    """The trajectories of a file; raises ``BatchError`` listing every missing or unusable field."""
    listed = content.get("trajectories")
    if not isinstance(listed, list):
        raise BatchError(
            f"{where} has no list of trajectories (keys: {', '.join(map(str, content)) or 'none'}): give a file of a "
            "debug dump's folder trajectory/"
        )
    said = as_number(content.get("num_trajectories"))
    if said is not None and said != len(listed):
        raise BatchError(f"{where} says that it holds {said:g} trajectories, and holds {len(listed)}: it is not whole")
    problems: list[str] = []
    parsed = [_parse(number, record, problems) for number, record in enumerate(listed)]
    if problems:
        raise BatchError(f"{where} holds trajectories that cannot be used:{bullet_list(problems)}")
    return [trajectory for trajectory in parsed if trajectory is not None]


def _parse(number: int, record: object, problems: list[str]) -> DumpedTrajectory | None:
    """One trajectory, or None where something is wrong with it and told in ``problems``."""
    if not isinstance(record, dict):
        problems.append(f"trajectory {number}: is of type {type(record).__name__}; expected a dict")
        return None
    extra = record.get("extra_fields") or {}
    if not isinstance(extra, dict):
        problems.append(f"trajectory {number}: extra_fields is of type {type(extra).__name__}; expected a dict")
        return None
    # NexRL nests them; flat ones are read as well.
    fields = {**{name: value for name, value in record.items() if name not in _NEEDED}, **extra}
    missing = [name for name in _NEEDED if name not in record]
    missing += [f"extra_fields.{name}" for name in ("group_id", "run_id") if fields.get(name) is None]
    if missing:
        problems.append(f"trajectory {number}: has no {', '.join(missing)}")
        return None
    try:
        return DumpedTrajectory(
            number=number,
            tokens=_integers(record["tokens"], "tokens").to(torch.int32),
            mask=_mask(record["loss_mask"]),
            reward=_number(record["reward"], "reward"),
            is_val=bool(_number(record["is_val"], "is_val")),
            group_id=str(_scalar(fields["group_id"])),
            run_id=_whole(fields["run_id"], "run_id"),
            identity=_identity(fields.get("identity")),
            extra=fields,
        )
    except BatchError as error:
        problems.append(f"trajectory {number}: {error}")
        return None


def _scalar(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _number(value: object, name: str) -> float:
    number = as_number(value)
    if number is None:
        raise BatchError(f"{name} is {str(value)[:60]!r}; expected a number")
    return number


def _whole(value: object, name: str) -> int:
    text = str(_scalar(value))
    if not text.isascii() or not text.isdigit():
        raise BatchError(f"{name} is {text[:60]!r}; expected a whole number of at least 0")
    return int(text)


def _integers(value: object, name: str) -> torch.Tensor:
    """int64 ``[T]`` of a list or tensor of whole numbers that int32 holds."""
    values = value.tolist() if isinstance(value, torch.Tensor) else value
    is_whole = isinstance(values, list) and all(type(item) is int and 0 <= item < 2**31 for item in values)
    if not is_whole:
        raise BatchError(f"{name} is no list of whole numbers of 0 to 2**31 - 1")
    return torch.tensor(values, dtype=torch.int64)


def _mask(value: object) -> torch.Tensor:
    values = value.tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(values, list) or not all(item in (0, 1) for item in values):
        raise BatchError("loss_mask is no list of 0 and 1")
    return torch.tensor([bool(item) for item in values], dtype=torch.bool)


def _identity(value: object) -> SampleIdentity | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or len(value) != 5:
        raise BatchError(f"identity is {str(value)[:60]!r}; expected scheduler_id, group_id, episode_id, env_id, turn")
    scheduler_id, group_id, episode_id, env_id, turn = value
    return SampleIdentity(scheduler_id=scheduler_id, group_id=group_id, episode_id=episode_id, env_id=env_id, turn=turn)


def float_list(value: object, name: str) -> torch.Tensor:
    """float64 1-D of a list or tensor of numbers; raises ``BatchError`` for anything else."""
    items = value.reshape(-1).tolist() if isinstance(value, torch.Tensor) else value
    numbers = [as_number(item) for item in items] if isinstance(items, list) else [None]
    if any(number is None for number in numbers):
        raise BatchError(f"{name} is no list of numbers")
    return torch.tensor(numbers, dtype=torch.float64)
