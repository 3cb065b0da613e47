"""Rollout files of slime, miles and vime: read for a recording, and written for ``--load-debug-rollout-data``.

Contract: a file is ``torch.save({"rollout_id", "samples": [fields][, "metadata"]})``. A file that was imported is
exported with the same fields, bit for bit. Rows that were recorded elsewhere become samples of their core fields alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.plain_values import pack, unpack
from mock_scheduler.adapters.slime.codec import META_KEY, SlimeCodec
from mock_scheduler.adapters.slime.sample_fields import TERMINATIONS
from mock_scheduler.batch import RolloutBatch, Trajectory
from mock_scheduler.errors import BatchError, ForeignFileError
from mock_scheduler.scheduler import Mode
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import written_aside
from mock_scheduler.support.pickles.torch_files import read_torch_file

_PATTERN = r"(?:[^/]*/)*(?:[^/]*?(eval_)|[^/]*_)?(\d+)\.pt"
_EXAMPLE = "12.pt or eval_12.pt"
_FILE_KEY = "slime.file"
_SAMPLES = {"tokens", "response_length"}


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, in their order.

    Raises:
        RecordingError: there is none.
        ForeignFileError: one cannot be read, or would run code.
        BatchError: its samples contradict themselves.
    """
    for file in find_files(source, _PATTERN, _EXAMPLE):
        inside = source if source.is_dir() else None
        content = _load(file.path, inside)
        mode: Mode = "val" if file.parts[0] else "train"
        yield _read_step(content, file.path, int(file.parts[1]), mode, options)


def _load(path: Path, inside: Path | None) -> Mapping[str, Any]:
    try:
        content: Any = read_torch_file(path, inside=inside, what="a rollout file of slime")
    except ForeignFileError as error:
        if "PIL." in str(error):
            raise ForeignFileError(
                f"{error}. Samples with images are not read: set multimodal_inputs of each to None before it is saved; "
                "training uses multimodal_train_inputs"
            ) from error
        raise
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(item, dict) and item.keys() >= _SAMPLES for item in samples):
        found = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise ForeignFileError(f"{path} holds no list of samples with tokens and response_length (found: {found})")
    return dict(content)


def _read_step(content: Mapping[str, Any], path: Path, named: int, mode: Mode, options: ImportOptions) -> ForeignStep:
    stated = content.get("rollout_id")
    step = stated if type(stated) is int and stated >= 0 else named
    samples: list[Mapping[str, Any]] = content["samples"]
    version = _newest_version(samples)
    codec = SlimeCodec(sampling=options.sampling, reward_key=options.reward_key)
    rest = {name: value for name, value in content.items() if name != "samples"}
    packed, data = pack(rest, f"{path}")
    meta: dict[str, JSON] = {_FILE_KEY: {"fields": packed, "bytes": data.hex(), "order": list(content)}}
    try:
        batch = codec.build(samples, version=version or 0, reads_versions=True, meta=meta)
    except BatchError as error:
        raise BatchError(f"{path}: {error}") from error
    lacks = [*options.assumed]
    if all(sample.get("rollout_log_probs") is None for sample in samples):
        lacks.append("rollout_logprobs")
    if version is None:
        lacks.append("policy_versions")
    if not all(codec.has_reward(sample) for sample in samples):
        lacks.append("rewards")
    if not all(str(sample.get("status")) in TERMINATIONS for sample in samples):
        lacks.append("terminations")
    return ForeignStep(step=step, mode=mode, batch=batch, policy_version=version or 0, lacks=tuple(lacks)).noted()


def _newest_version(samples: Iterable[Mapping[str, Any]]) -> int | None:
    stated = [str(item) for sample in samples for item in sample.get("weight_versions") or ()]
    numbers = [int(item) for item in stated if item.isascii() and item.isdecimal()]
    return max(numbers) if numbers else None


def write_rollouts(steps: Iterable[tuple[Mode, int, RolloutBatch]], folder: Path) -> list[Path]:
    """Writes ``{step}.pt``, of validation ``eval_{step}.pt``, to a new folder for each step; gives their paths."""
    folder.mkdir(parents=True)
    written = []
    for mode, step, batch in steps:
        path = folder / f"{'eval_' if mode == 'val' else ''}{step}.pt"
        with written_aside(path) as aside:
            torch.save(build_content(step, batch), aside)
        written.append(path)
    return written


def build_content(step: int, batch: RolloutBatch) -> dict[str, Any]:
    """Gives the content of a step's file."""
    about = batch.meta.get(_FILE_KEY)
    samples = list(_samples_of(batch))
    if not isinstance(about, Mapping):
        return {"rollout_id": step, "samples": samples}
    rest = unpack(about["fields"], bytes.fromhex(str(about["bytes"])))
    order: Any = about["order"]
    return {name: samples if name == "samples" else rest[name] for name in order}


def _samples_of(batch: RolloutBatch) -> Iterator[dict[str, Any]]:
    if META_KEY in batch.meta:
        yield from _flatten(SlimeCodec(sampling=batch.sampling).decode(batch))
        return
    members = {key: number for number, key in enumerate(dict.fromkeys(row.identity.group_key for row in batch.rows()))}
    for number, row in enumerate(batch.rows()):
        yield _sample_of(row, float(batch.rewards[number]), members[row.identity.group_key], number)


def _flatten(nested: list[Any]) -> Iterator[dict[str, Any]]:
    for item in nested:
        if isinstance(item, list):
            yield from _flatten(item)
        else:
            yield item


def _sample_of(row: Trajectory, reward: float, group: int, number: int) -> dict[str, Any]:
    """A sample of a row that was recorded elsewhere; log-probabilities of tokens that nobody sampled are 0."""
    mask = row.response_mask[row.prompt_length :]
    logprobs = torch.zeros(len(mask), dtype=torch.float64)
    logprobs[mask] = row.rollout_logprobs.double()
    name = next(name for name, ending in TERMINATIONS.items() if ending == row.termination)
    return {
        "group_index": group,
        "index": number,
        "prompt": "",
        "tokens": row.tokens.tolist(),
        "response": "",
        "response_length": len(mask),
        "reward": reward,
        "loss_mask": mask.int().tolist(),
        "weight_versions": [str(version) for version in row.policy_versions.tolist()],
        "rollout_log_probs": logprobs.tolist(),
        "status": name,
        "metadata": {"recorded_as": str(row.identity)},
    }
