"""Makes a rollout batch of megatron/rl's rollouts, and rollouts of it again, bit for bit.

Megatron-LM passes groups of rollouts, and beside them, since August 2026, a ledger of what the engine says of each
request. A group is a ``RolloutGroup``, or in earlier releases a list. Contract: ``decode(encode(native))`` has the same
classes with every field, with their types and every bit; each turn is a row, and a rollout without turns has one, with
a placeholder. Fields that a class allows beyond its own are kept like the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from mock_scheduler.adapters.megatron_rl.turns import read_reward, read_termination, read_turn, read_versions
from mock_scheduler.adapters.rows import FROM_CORE, ForeignRow, build_batch, read_about, unpack_rows
from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.errors import BatchError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID, RolloutRequest
from mock_scheduler.support.text import bullet_list

META_KEY = "megatron_rl"
_VERSION = 1
_PATH, _GROUP, _LEDGER, _KIND, _NAMES = ":path", ":group", ":ledger", ":kind", ":names"
_BY_TURN = ("trajectory", "generation_mask", "logprobs")
#: Fields that say which row it is, and not what is in it; ids of requests are drawn anew in every run.
_IDENTITY_FIELDS = frozenset({_PATH, _GROUP, _LEDGER, "problem_id", "completion_ids"})

#: An object of Megatron-LM, whose attributes are read by name: it is not imported here.
Foreign: TypeAlias = Any


class GroupedRolloutsCodec:
    """Serves as ``BatchCodec`` of what ``get_environment_rollouts`` returns.

    Args:
        sampling: how the tokens were sampled; rollouts do not say.
        find_class: gives a class of Megatron-LM by its name; None: there is none.
    """

    def __init__(
        self,
        *,
        sampling: SamplingParams,
        find_class: Callable[[str], Foreign],
        scheduler_id: str = DEFAULT_SCHEDULER_ID,
    ) -> None:
        self._sampling, self._find_class, self._scheduler_id = sampling, find_class, scheduler_id

    def encode(self, native: Foreign, request: RolloutRequest) -> RolloutBatch:
        """Gives the batch; the rollouts stay as they were.

        Raises:
            BatchError: a rollout contradicts itself or has a value that cannot be kept; lists the first of each kind.
        """
        has_ledger = isinstance(native, tuple)
        groups, ledger = native if has_ledger else (native, {})
        rows, problems = list[ForeignRow](), list[str]()
        for number, group in enumerate(groups):
            members = _members(group)
            if not members:
                problems.append(f"group {number} has no rollout")
            for member, rollout in enumerate(members):
                try:
                    found = list(self._read(rollout, (number, member), ledger, request.policy_version))
                except (BatchError, TypeError, ValueError, OverflowError) as error:
                    problems.append(f"group {number}, rollout {member}: {error}")
                    continue
                about = {_GROUP: self._about_group(group)} if member == 0 else {}
                found[0] = dataclasses.replace(found[0], native={**found[0].native, **about})
                rows += found
        if problems or not rows:
            raise BatchError(f"rollouts cannot be recorded:{bullet_list(problems or ['there is none'])}")
        if has_ledger:
            records = [[name, self._known(record), _dataclass_fields(record)] for name, record in ledger.items()]
            rows[0] = dataclasses.replace(rows[0], native={**rows[0].native, _LEDGER: records})
        return build_batch(
            rows,
            sampling=self._sampling,
            scheduler_id=self._scheduler_id,
            meta={META_KEY: {"version": _VERSION, "has_ledger": has_ledger}},
            identity_fields=_IDENTITY_FIELDS,
        )

    def decode(self, batch: RolloutBatch) -> Foreign:
        """Gives what ``get_environment_rollouts`` returned; of a part of a batch, without what is not in it.

        Raises:
            BatchError: the batch was not made by this class, or a class is not there.
        """
        about = read_about(batch, META_KEY, _VERSION, "rollouts of megatron/rl")
        turns: dict[tuple[int, int], list[dict[str, Any]]] = {}
        ledger: dict[str, Foreign] = {}
        for place, own in unpack_rows(batch):
            number, member, _ = own.pop(_PATH)
            _restore(own, batch, place)
            for name, kind, fields in own.pop(_LEDGER, []):
                ledger[name] = self._class(kind)(**fields)
            turns.setdefault((number, member), []).append(own)
        members: dict[int, list[Foreign]] = {}
        heads: dict[int, list[Any]] = {}
        for (number, _), own_turns in turns.items():
            head = own_turns[0].pop(_GROUP, None)
            if head is not None:
                heads[number] = head
            members.setdefault(number, []).append(self._build_rollout(own_turns))
        groups = [self._build_group(heads.get(number), rollouts) for number, rollouts in members.items()]
        return (groups, ledger) if about["has_ledger"] else groups

    def _read(
        self, rollout: Foreign, place: tuple[int, int], ledger: Mapping[str, Foreign], version: int
    ) -> Iterator[ForeignRow]:
        fields, set_fields = _model_fields(rollout)
        turns = fields["trajectory"]
        if type(turns) is not list:
            raise BatchError(f"trajectory is a {type(turns).__name__}; expected a list of turns")
        parts = {name: _split(fields.get(name), len(turns)) for name in _BY_TURN}
        rest = {name: value for name, value in fields.items() if parts.get(name) is None}
        rest[_KIND] = self._known(rollout)
        # All names in their order, which columns do not keep, and those that were set.
        rest[_NAMES] = [list(fields), None if set_fields == fields.keys() else sorted(set_fields)]
        for number in range(max(len(turns), 1)):
            stated = {name: None if values is None or not turns else values[number] for name, values in parts.items()}
            turn = read_turn(*(stated[name] for name in _BY_TURN))
            own = {
                f":{name}": FROM_CORE if turn.is_core[name] else stated[name]
                for name, values in parts.items()
                if values is not None and turns
            }
            yield ForeignRow(
                tokens=turn.tokens,
                response_mask=turn.mask,
                rollout_logprobs=turn.logprobs,
                group=place[0],
                member=place[1],
                turn=number,
                reward=read_reward(fields.get("reward"), number, max(len(turns), 1)),
                versions=read_versions(turn, _epochs(fields, ledger, number), version),
                termination=read_termination(fields.get("rollout_status") if turns else "placeholder"),
                prompt_length=turn.prompt_length,
                tag=str(fields.get("env_id") or ""),
                native={**(rest if number == 0 else {}), **own, _PATH: [*place, number]},
            )

    def _about_group(self, group: Foreign) -> list[Any]:
        """Gives kind and fields of a group, but its rollouts; of a list, its kind alone."""
        if isinstance(group, list):
            return ["list", {}, []]
        fields, set_fields = _model_fields(group)
        rest = {name: value for name, value in fields.items() if name != "rollouts"}
        return [self._known(group), rest, sorted(set_fields)]

    def _build_rollout(self, turns: Sequence[dict[str, Any]]) -> Foreign:
        fields = dict(turns[0])
        if _KIND not in fields:
            raise BatchError("a part of a batch has a rollout without its first turn: choose whole trajectories")
        kind, (order, names) = fields.pop(_KIND), fields.pop(_NAMES)
        for name in _BY_TURN:
            key = f":{name}"
            if key in turns[0]:
                fields[name] = [turn[key] for turn in turns]
                del fields[key]
        return self._construct(kind, {name: fields[name] for name in order}, names)

    def _build_group(self, head: list[Any] | None, rollouts: list[Foreign]) -> Foreign:
        kind, fields, names = head or ["list", {}, []]
        return rollouts if kind == "list" else self._construct(kind, {**fields, "rollouts": rollouts}, names)

    def _construct(self, kind: str, fields: Mapping[str, Any], names: Sequence[str] | None) -> Foreign:
        # Without validation, which would make an int of True and a float of an int.
        return self._class(kind).model_construct(_fields_set=set(fields if names is None else names), **fields)

    def _known(self, item: Foreign) -> str:
        """Gives the class's name, by which it is found again."""
        kind = type(item).__name__
        if self._find_class(kind) is not type(item):
            raise BatchError(f"{type(item).__module__}.{kind} is no class of megatron/rl: a replay could not make it")
        return kind

    def _class(self, kind: str) -> Foreign:
        found = self._find_class(kind)
        if found is None:
            raise BatchError(f"this release of Megatron-LM has no {kind}, which the recording has: use that of then")
        return found


def _members(group: Foreign) -> list[Foreign]:
    return group if isinstance(group, list) else cast("list[Foreign]", group.rollouts)


def _model_fields(model: Foreign) -> tuple[dict[str, Any], set[str]]:
    """Gives the fields of a pydantic model as they are, and those that were set; a group iterates over its rollouts."""
    return {**vars(model), **(model.__pydantic_extra__ or {})}, set(model.model_fields_set)


def _dataclass_fields(record: Foreign) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def _split(values: object, num_turns: int) -> list[Any] | None:
    """Gives the parts of a field that has one for each turn; None where it has not, and is kept whole."""
    return values if type(values) is list and len(values) == num_turns and num_turns else None


def _epochs(fields: Mapping[str, Any], ledger: Mapping[str, Foreign], turn: int) -> object:
    """Finds the bounds of policy versions: of the rollout's own field, or of its request's record."""
    own = fields.get("policy_epoch")
    if own:
        return own[turn] if turn < len(own) else None
    ids = fields.get("completion_ids") or []
    record = ledger.get(ids[turn]) if turn < len(ids) else None
    return None if record is None else record.policy_epoch


def _restore(own: dict[str, Any], batch: RolloutBatch, place: int) -> None:
    """Puts parts in their places that the core fields say exactly."""
    row = slice(*batch.row_offsets[place : place + 2].tolist())
    sampled = slice(*batch.response_offsets[place : place + 2].tolist())
    core = {
        "trajectory": (batch.tokens, row),
        "generation_mask": (batch.response_mask, row),
        "logprobs": (batch.rollout_logprobs, sampled),
    }
    for name, (tensor, part) in core.items():
        if own.get(f":{name}") is FROM_CORE:
            own[f":{name}"] = tensor[part].tolist()
