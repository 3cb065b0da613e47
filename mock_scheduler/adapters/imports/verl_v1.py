"""The batches that verl's V1 trainer skips with: rows of a TransferQueue, jagged, with their keys and tags.

Contract: ``torch.save({"tensordict", "tags", "keys", "global_steps"})`` as ``{step}/{inner}/tq_batch.pt``; the parts of
a step are joined in order. A key is ``{uid}_{session}_{index}``: equal uids are a group, a session is a trajectory, and
its index numbers its rows. Every field of a row is kept beside the core fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.imports.tensordicts import TENSORDICT_NAMES, read_tensordict
from mock_scheduler.adapters.rows import ForeignRow, build_batch, experts_are_usable
from mock_scheduler.batch import Termination
from mock_scheduler.errors import BatchError, ForeignFileError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.pickled_values import Jagged
from mock_scheduler.support.torch_files import read_torch_file

_PATTERN = r"(?:[^/]*/)*(\d+)/(\d+)/tq_batch\.pt"
_EXAMPLE = "GBS8_N4_in512_out512/1/0/tq_batch.pt"
_PARTS = {"tensordict", "tags", "keys", "global_steps"}
_IDENTITY = frozenset({"key", "uid"})


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, in their order; raises as the other readers."""
    inside = source if source.is_dir() else None
    for step_name, files in groupby(find_files(source, _PATTERN, _EXAMPLE), key=lambda file: file.parts[0]):
        records = [record for file in files for record in _load(file.path, inside)]
        yield _build_step(records, int(step_name), options, f"{source}, step {step_name}")


def _load(path: Path, inside: Path | None) -> list[dict[str, Any]]:
    content = read_torch_file(path, inside=inside, kept=TENSORDICT_NAMES, what="a batch of verl")
    if not isinstance(content, dict) or not content.keys() >= _PARTS:
        raise ForeignFileError(f"{path} has no {', '.join(sorted(_PARTS))} in it")
    fields = read_tensordict(content["tensordict"], str(path))
    keys, tags = content["keys"], content["tags"]
    if not isinstance(keys, list) or not isinstance(tags, list) or len(tags) != len(keys):
        raise BatchError(f"{path} has other numbers of keys and tags")
    counts = {name: len(values.rows) if isinstance(values, Jagged) else len(values) for name, values in fields.items()}
    wrong = [f"{name} ({count})" for name, count in counts.items() if count != len(keys)]
    if wrong:
        raise BatchError(f"{path} has {len(keys)} keys, and other numbers of rows in {', '.join(wrong)}")
    columns = {name: _as_rows(values) for name, values in fields.items()}
    return [
        {**{name: values[row] for name, values in columns.items()}, "key": str(keys[row]), "tag": tags[row] or {}}
        for row in range(len(keys))
    ]


def _as_rows(values: object) -> Sequence[object]:
    if isinstance(values, Jagged):
        return values.rows
    return values.unbind() if isinstance(values, torch.Tensor) else values  # type: ignore[return-value]


def _build_step(records: Sequence[Mapping[str, Any]], step: int, options: ImportOptions, where: str) -> ForeignStep:
    records = [record for record in records if not record["tag"].get("is_padding")]
    if not records:
        raise BatchError(f"{where} holds no row")
    versions = [_version_of(record) for record in records]
    stated = [version for version in versions if version is not None]
    groups: dict[str, int] = {}
    rows = []
    for number, record in enumerate(records):
        uid, session, index = _split_key(record["key"])
        try:
            group = groups.setdefault(uid, len(groups))
            rows.append(_read_row(record, group=group, member=session, turn=index, version=versions[number] or 0))
        except (BatchError, KeyError, ValueError, TypeError) as error:
            raise BatchError(f"{where}, row {number} ({record['key']}): {error}") from error
    batch = build_batch(
        rows, sampling=options.sampling, scheduler_id=DEFAULT_SCHEDULER_ID, meta={}, identity_fields=_IDENTITY
    )
    lacks = [*options.assumed, "terminations"]
    lacks += ["policy_versions"] if len(stated) < len(records) else []
    lacks += [
        role
        for role, name in (("rollout_logprobs", "rollout_log_probs"), ("rewards", "rm_scores"))
        if name not in records[0]
    ]
    return ForeignStep(step=step, batch=batch, policy_version=max(stated, default=0), lacks=tuple(lacks)).noted()


def _version_of(record: Mapping[str, Any]) -> int | None:
    """The oldest policy that sampled a row: a tag of the asynchronous trainers."""
    version = record["tag"].get("min_global_steps", record["tag"].get("global_steps"))
    return version if type(version) is int and version >= 0 else None


def _split_key(key: str) -> tuple[str, int, int]:
    uid, _, rest = key.rpartition("_")
    uid, _, session = uid.rpartition("_")
    if not uid or not session.isdecimal() or not rest.isdecimal():
        raise BatchError(f"key {key!r} is none of uid, session and index, joined by '_'")
    return uid, int(session), int(rest)


def _read_row(record: Mapping[str, Any], *, group: int, member: int, turn: int, version: int) -> ForeignRow:
    tokens = record["input_ids"].reshape(-1).numpy()
    response = record["responses"].reshape(-1)
    prompt_length = len(tokens) - len(response)
    flags = (record["response_mask"].reshape(-1) != 0).numpy()
    if len(flags) == len(tokens):
        flags = flags[prompt_length:]
    if prompt_length < 0 or len(flags) != len(response):
        raise BatchError(f"has {len(tokens)} tokens, {len(response)} of the response, and a mask of {len(flags)}")
    logprobs, scores = record.get("rollout_log_probs"), record.get("rm_scores")
    stated = np.zeros(len(flags), dtype=np.float32) if logprobs is None else logprobs.reshape(-1).float().numpy()
    experts = record.get("routed_experts")
    own = experts.numpy() if isinstance(experts, torch.Tensor) else None
    return ForeignRow(
        tokens=tokens if len(tokens) else np.zeros(1, dtype=np.int32),
        response_mask=np.concatenate([np.zeros(prompt_length if len(tokens) else 1, dtype=np.bool_), flags]),
        rollout_logprobs=stated[-len(flags) :][flags] if len(flags) else stated[:0],
        group=group,
        member=member,
        turn=turn,
        reward=0.0 if scores is None else float(scores.double().sum()),
        versions=version,
        termination=Termination.TERMINATED,
        prompt_length=prompt_length if len(tokens) else 1,
        tag=str(record.get("data_source", "")),
        native=record,
        routed_experts=own if experts_are_usable(own, len(tokens)) else None,
    )
