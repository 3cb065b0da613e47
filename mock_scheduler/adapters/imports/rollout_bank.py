"""megatron/rl's durable bank of rollouts, version 2: a JSON index beside raw arrays.

Contract: only the generation that ``MANIFEST.json`` names is read, and every record's checksum (blake2b) must hold; a
record that was cut by a kill is the last of its segment, and is left out with a warning in ``lacks``. A segment
``gen-{iteration}`` is a step. Each turn of a rollout is a row, since a turn holds the whole conversation before it.
Log-probabilities were rounded to float16 when they were written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions
from mock_scheduler.adapters.megatron_rl.turns import read_reward, read_termination, read_turn
from mock_scheduler.adapters.rows import ForeignRow, build_batch
from mock_scheduler.errors import BatchError, ForeignFileError, MockSchedulerError, RecordingError
from mock_scheduler.scheduler import DEFAULT_SCHEDULER_ID
from mock_scheduler.support.foreign_files import load_json, open_foreign, read_lines

_VERSION = 2
_SIDECARS = (("tok", "tokens.bin", "<i4"), ("lp", "logprobs.bin", "<f2"), ("mask", "masks.bin", "u1"))
_MAX_RECORD_BYTES = 256 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Turns:
    """The arrays of one record by rollout and turn."""

    tokens: list[list[np.ndarray[Any, Any]]]
    logprobs: list[list[np.ndarray[Any, Any]]] | None
    masks: list[list[np.ndarray[Any, Any]]] | None


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads a segment after another; raises as the other readers."""
    manifest = _load_manifest(source)
    generation = source / "generations" / manifest["active_generation"]
    for segment in sorted(manifest["segments"]):
        rows, is_cut = [], False
        group = 0
        for record, turns in _read_segment(generation / segment, source):
            if record is None:
                is_cut = True
                continue
            rows += _read_group(record, turns, group, f"{segment}, {record['uid']}")
            group += 1
        if not rows:
            continue
        batch = build_batch(
            rows,
            sampling=options.sampling,
            scheduler_id=DEFAULT_SCHEDULER_ID,
            meta={},
            identity_fields=("uid", "problem_id", "batch_id", "index_in_batch"),
        )
        lacks = [*options.assumed, "policy_versions", "bits of rollout_logprobs (float16)"]
        lacks += ["the last group, which a kill has cut"] if is_cut else []
        yield ForeignStep(step=int(segment.removeprefix("gen-")), batch=batch, lacks=tuple(lacks)).noted()


def _load_manifest(source: Path) -> Mapping[str, Any]:
    path = source / "MANIFEST.json"
    if not path.is_file():
        raise RecordingError(f"{source} has no MANIFEST.json: give the folder of --rl-rollout-bank-dir")
    try:
        manifest = load_json(path, inside=source)
    except ValueError as error:
        raise ForeignFileError(f"{path} {error}") from error
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != _VERSION:
        raise ForeignFileError(f"{path} is of format {version!r}; expected {_VERSION}")
    active, segments = manifest.get("active_generation"), manifest.get("segments")
    # A name of a folder beside it, and no path out of it.
    if not isinstance(active, str) or not re.fullmatch(r"generation-\w+", active):
        raise ForeignFileError(f"{path}: active_generation is {active!r}; expected generation-…")
    if not isinstance(segments, list) or not all(isinstance(s, str) and re.fullmatch(r"gen-\d+", s) for s in segments):
        raise ForeignFileError(f"{path}: segments are {str(segments)[:80]}; expected names such as gen-000012")
    return dict(manifest)


def _read_segment(folder: Path, source: Path) -> Iterator[tuple[Mapping[str, Any] | None, _Turns]]:
    ledger = folder / "ledger.log"
    lines = [line for line in read_lines(ledger, max_bytes=_MAX_RECORD_BYTES, inside=source) if line.strip()]
    for number, line in enumerate(lines):
        is_last = number + 1 == len(lines)
        where = f"{ledger}, line {number + 1}"
        try:
            record = json.loads(line)
            _check_record(record, where)
            slices = {name: _read_slice(folder / file, record.get(name), source) for name, file, _ in _SIDECARS}
            _check_sum(record, slices, where)
        except MockSchedulerError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if is_last:
                yield None, _Turns(tokens=[], logprobs=None, masks=None)
                return
            raise ForeignFileError(f"{where} cannot be read: {error}") from error
        yield record, _take_apart(record, slices, where)


def _check_record(record: Mapping[str, Any], where: str) -> None:
    if record["format_version"] != _VERSION:
        raise ForeignFileError(f"{where} is of format {record['format_version']!r}; expected {_VERSION}")
    if record["kind"] != "token":
        raise BatchError(f"{where} has rollouts as text ({record['kind']}), without tokens; they cannot be replayed")


def _read_slice(path: Path, place: Mapping[str, Any] | None, source: Path) -> bytes:
    if not place or not place["bytes"]:
        return b""
    start, count = place["offset"], place["bytes"]
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise ValueError(f"{path.name} at {start!r}, {count!r} bytes")
    with open_foreign(path, inside=source) as stream:
        size = stream.seek(0, 2)
        if start + count > size:
            raise ValueError(f"{path.name} has {size} bytes; expected {start + count}")
        stream.seek(start)
        return stream.read(count)


def _check_sum(record: Mapping[str, Any], slices: Mapping[str, bytes], where: str) -> None:
    stated = {name: value for name, value in record.items() if name != "checksum"}
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(stated, sort_keys=True, separators=(",", ":")).encode())
    for name, _, _ in _SIDECARS:
        digest.update(slices[name])
    if digest.hexdigest() != record.get("checksum"):
        raise ValueError(f"{where}: its checksum does not hold")


def _take_apart(record: Mapping[str, Any], slices: Mapping[str, bytes], where: str) -> _Turns:
    parts: dict[str, Any] = {}
    for name, _, dtype in _SIDECARS:
        if name not in record:
            parts[name] = None
            continue
        flat, lengths = np.frombuffer(slices[name], dtype=dtype), record[name]["lengths"]
        if sum(map(sum, lengths)) != len(flat):
            raise ForeignFileError(f"{where}: {name} has {len(flat)} values, and its lengths say {lengths}")
        ends = iter(np.cumsum([length for turns in lengths for length in turns], dtype=np.int64).tolist())
        parts[name] = [[flat[(end := next(ends)) - length : end] for length in turns] for turns in lengths]
    return _Turns(tokens=parts["tok"], logprobs=parts["lp"], masks=parts["mask"])


def _read_group(record: Mapping[str, Any], turns: _Turns, group: int, where: str) -> list[ForeignRow]:
    about, rows = record["group"], []
    members: Sequence[Mapping[str, Any]] = about["rollouts"]
    if len(members) != len(turns.tokens) or turns.masks is None or turns.logprobs is None:
        raise BatchError(f"{where} has no generation_mask or log-probabilities for each of its rollouts")
    for member, fields in enumerate(members):
        num_turns = len(turns.tokens[member])
        for number in range(num_turns):
            try:
                turn = read_turn(*(part[member][number] for part in (turns.tokens, turns.masks, turns.logprobs)))
            except BatchError as error:
                raise BatchError(f"{where}, rollout {member}, turn {number}: {error}") from error
            rows.append(
                ForeignRow(
                    tokens=turn.tokens,
                    response_mask=turn.mask,
                    rollout_logprobs=turn.logprobs,
                    group=group,
                    member=member,
                    turn=number,
                    reward=read_reward(fields.get("reward"), number, num_turns),
                    termination=read_termination(fields.get("rollout_status")),
                    prompt_length=turn.prompt_length,
                    tag=str(fields.get("env_id", "")),
                    native={
                        **fields,
                        "uid": record["uid"],
                        "batch_id": about.get("batch_id"),
                        "index_in_batch": about.get("index_in_batch"),
                    },
                )
            )
    return rows
