"""Relax's replay bundles of format 2, which hold the values of the loss, as a trace.

A bundle is a folder with ``manifest.json``, ``index.json``, ``expected.json``, ``payloads/*.pt`` and ``COMPLETE``; of
several producing ranks each has its own, ``rank-N``, in a folder with a ``COMPLETE`` of all. One of a rollout holds
log-probabilities and advantages, one of an optimizer step what its loss was made of. No token is in them, so no rollout
can be made of them. Contract: every checksum must hold. A rollout is a step, its optimizer steps are updates; rows are
the samples as each rank has them, so that runs of one layout are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.steps import find_files
from mock_scheduler.adapters.imports.traces import RankTensors, Traces, name_apart, name_tensor, write_ranks
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import ForeignFileError
from mock_scheduler.support.foreign_files import load_json, read_bytes
from mock_scheduler.support.pickles.torch_files import MAX_TORCH_BYTES, read_torch_bytes
from mock_scheduler.support.text import is_real
from mock_scheduler.trace.entries import VIRTUAL_TOKENS, RowTable, TraceEntry, virtual_start
from mock_scheduler.trace.shards import Block, ShardSpec, Split, whole

_PATTERN, _EXAMPLE = r"(?:.*/)?manifest\.json", "replay-3-0/manifest.json"
_MAJOR = "2"
_DOCUMENTS = ("manifest.json", "index.json", "expected.json")
#: Kind and name of each payload, in the order of computation: of a rollout, and of an optimizer step.
_OF_ROLLOUT: Mapping[str, tuple[TraceKind, str]] = {
    "old_log_probs": ("score", "old_logprobs"),
    "ref_log_probs": ("score", "ref_logprobs"),
    "kl": ("score", "kl"),
    "advantages": ("advantage", "advantages"),
}
_OF_STEP: Mapping[str, tuple[TraceKind, str]] = {
    "old_log_probs": ("loss", "old_logprobs"),
    "advantages": ("loss", "advantages"),
    "log_probs": ("output", "logprobs"),
    "entropy": ("output", "entropy"),
}
_REPORTED = 100  # behind all payloads


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    identity: str
    total: int
    length: int
    mask: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bundle:
    """One checked bundle of one rank; ``update``: None: it is of the rollout."""

    path: Path
    step: int
    update: int | None
    rank: int
    ranks: tuple[int, ...]
    world_size: int
    samples: tuple[_Sample, ...]
    payloads: Mapping[str, torch.Tensor]
    reported: Mapping[str, float]


def write_bundles(source: Path, folder: Path) -> Traces:
    """Writes a trace of all bundles of a folder; gives its steps.

    Raises:
        RecordingError: there is none.
        ForeignFileError: one is not complete, was changed, or contradicts itself.
    """
    found: dict[tuple[int, int], list[_Bundle]] = {}
    for file in find_files(source, _PATTERN, _EXAMPLE):
        bundle = _load_bundle(file.path.parent, source if source.is_dir() else file.path.parent)
        found.setdefault((bundle.step, bundle.rank), []).append(bundle)
    for (step, rank), bundles in found.items():
        lacking = sorted(set(bundles[0].ranks) - {own for number, own in found if number == step})
        if lacking:
            raise ForeignFileError(
                f"{bundles[0].path}: rollout {step} has rank {rank}, and no bundle of rank {lacking}"
            )
    return {"": write_ranks((_join(bundles) for _, bundles in sorted(found.items())), folder)}


def _join(bundles: Sequence[_Bundle]) -> RankTensors:
    """Gives a rank's tensors of a rollout, of all of its bundles."""
    samples = [sample for bundle in bundles for sample in bundle.samples]
    numbers = {sample.identity: number for number, sample in enumerate(samples)}
    if len(numbers) < len(samples):
        named = " and ".join(str(bundle.path) for bundle in bundles)
        raise ForeignFileError(f"{named} are of one step: give the bundles of one run")
    updates = sorted({bundle.update for bundle in bundles if bundle.update is not None})
    rows = {
        update: tuple(
            numbers[sample.identity] for bundle in bundles if bundle.update == update for sample in bundle.samples
        )
        for update in updates
    }
    first = bundles[0]
    return RankTensors(
        step=first.step,
        rank=first.rank,
        world_size=first.world_size,
        entries=(entry for bundle in bundles for entry in _entries_of(bundle)),
        ranks=first.ranks,
        rows=RowTable.by_content([sample.identity for sample in samples], [sample.total for sample in samples]),
        update_rows=tuple(rows.get(update, ()) for update in range(updates[-1] + 1)) if updates else (),
    )


def _entries_of(bundle: _Bundle) -> Iterator[TraceEntry]:
    known = _OF_ROLLOUT if bundle.update is None else _OF_STEP
    update = bundle.update or 0
    mask = torch.tensor([flag for sample in bundle.samples for flag in sample.mask], dtype=torch.int32)
    suffix = "" if bundle.update is None else f".update{update}"
    # A row may be cut otherwise in the loss than in the rollout.
    yield _place(bundle, "input", f"loss_mask{suffix}", mask, update=0, place=0)
    for number, (name, tensor) in enumerate(sorted(bundle.payloads.items(), key=lambda item: _rank_of(item[0], known))):
        kind, called = known.get(name, ("loss", name_tensor(name)))
        if tensor.dim() != 1 or len(tensor) != len(mask):
            raise ForeignFileError(
                f"{bundle.path}: payload {name} is {list(tensor.shape)}, and the samples have {len(mask)} response "
                "tokens together; bundles of context parallelism are not read"
            )
        yield _place(bundle, kind, called, tensor, update=update, place=number)
    for number, (name, value) in enumerate(bundle.reported.items()):
        called = name_apart(name, "rank", bundle.rank, bundle.world_size) if bundle.world_size > 1 else name
        tensor = torch.tensor([value], dtype=torch.float64)
        yield TraceEntry(update=update, kind="loss", spec=whole(called, (1,)), tensor=tensor, place=_REPORTED + number)


def _rank_of(name: str, known: Mapping[str, object]) -> tuple[int, str]:
    return (list(known).index(name) if name in known else len(known)), name


def _place(bundle: _Bundle, kind: TraceKind, name: str, tensor: torch.Tensor, *, update: int, place: int) -> TraceEntry:
    """Gives a value of each response token, at the token before it, which predicts it."""
    blocks, start = [], 0
    for sample in bundle.samples:
        first = max(0, sample.total - sample.length - 1)
        begin = virtual_start(sample.identity) + first
        blocks.append(Block(local_start=start, global_start=begin, length=sample.length))
        start += sample.length
    spec = ShardSpec(
        name=name,
        global_shape=(VIRTUAL_TOKENS,),
        local_shape=(start,),
        splits=(Split(dim=0, blocks=tuple(block for block in blocks if block.length)),),
    )
    return TraceEntry(update=update, kind=kind, spec=spec, tensor=tensor, dims=("token",), is_masked=True, place=place)


# --- One bundle ------------------------------------------------------------------------------------------------------


def _load_bundle(path: Path, source: Path) -> _Bundle:
    complete = _load(path / "COMPLETE", source)
    for name in _DOCUMENTS:
        _check_digest(read_bytes(path / name, inside=source), complete["metadata"][name], path / name)
    manifest, index, expected = (_load(path / name, source) for name in _DOCUMENTS)
    version = str(manifest["format_version"])
    if version.partition(".")[0] != _MAJOR:
        raise ForeignFileError(f"{path} is of format {version}; expected {_MAJOR}")
    (rank,), ranks = complete["ranks"], tuple(complete.get("expected_ranks") or complete["ranks"])
    if len(ranks) > 1 and list(_load(path.parent / "COMPLETE", source)["ranks"]) != list(ranks):
        raise ForeignFileError(f"{path.parent} is not complete: COMPLETE does not name ranks {list(ranks)}")
    identity = index["identity"]
    anchor = identity.get("actor_step_id")
    step, update = (identity["rollout_id"], None) if anchor is None else (anchor["rollout_id"], anchor["step_id"])
    numbers = (rank, step, update or 0, *ranks, *identity.get("rank", {}).values())
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ForeignFileError(f"{path}: rank, rollout and step are {numbers}; expected numbers")
    return _Bundle(
        path=path,
        step=step,
        update=update,
        rank=rank,
        ranks=ranks,
        world_size=max(prod(identity.get("rank", {}).values()), *ranks, rank + 1) if ranks else rank + 1,
        samples=tuple(_read_sample(item, rank, update, path) for item in index["samples"]),
        payloads={name: _load_payload(path, name, spec, source) for name, spec in manifest["payloads"].items()},
        reported={
            name_tensor(f"{stage}.{name}"): float(value)
            for stage, values in expected.items()
            if isinstance(values, dict)
            for name, value in sorted(values.items())
            if is_real(value)
        },
    )


def _load(path: Path, source: Path) -> Any:  # noqa: ANN401 - JSON
    if not path.is_file():
        raise ForeignFileError(f"{path} is not there: the bundle was not written to its end, or a file is lost")
    try:
        document = load_json(path, inside=source)
    except ValueError as error:
        raise ForeignFileError(f"{path} {error}") from error
    if not isinstance(document, dict):
        raise ForeignFileError(f"{path} holds a {type(document).__name__}; expected names and values")
    return document


def _check_digest(content: bytes, stated: object, path: Path) -> None:
    if hashlib.sha256(content).hexdigest() != stated:
        raise ForeignFileError(f"{path} has changed since it was written: it does not fit its checksum")


def _read_sample(item: Mapping[str, Any], rank: int, update: int | None, path: Path) -> _Sample:
    total, length, mask = item["total_length"], item["response_length"], item["loss_mask"]
    is_sound = type(total) is int and type(length) is int and 0 <= length <= total and len(mask) == length
    if not is_sound or not all(type(flag) is int for flag in mask):
        raise ForeignFileError(f"{path}: sample {item['sample_id']} has {length} of {total} tokens, {len(mask)} masks")
    part = "rollout" if update is None else f"update {update}"
    return _Sample(identity=f"{part}, rank {rank}, {item['sample_id']}", total=total, length=length, mask=tuple(mask))


def _load_payload(path: Path, name: str, spec: Mapping[str, Any], source: Path) -> torch.Tensor:
    if name != name_tensor(name) or "/" in name:
        raise ForeignFileError(f"{path}: a payload is called {name!r}; expected a name")
    file = path / "payloads" / f"{name}.pt"
    if not file.is_file():
        raise ForeignFileError(f"{file} is not there: the bundle was not written to its end, or a file is lost")
    content = read_bytes(file, inside=source, max_bytes=MAX_TORCH_BYTES, what="a payload")
    _check_digest(content, spec["sha256"], file)
    tensor = read_torch_bytes(content, str(file))
    if not isinstance(tensor, torch.Tensor) or [str(tensor.dtype), list(tensor.shape)] != [
        spec["dtype"],
        spec["shape"],
    ]:
        raise ForeignFileError(f"{file} is another tensor than {spec['dtype']} {spec['shape']}, as the manifest says")
    return tensor
