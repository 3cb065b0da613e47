"""The batches that verl's V1 trainer skips with: rows of a TransferQueue, jagged, with their keys and tags.

Contract: ``torch.save({"tensordict", "tags", "keys", "global_steps"})`` as ``{step}/{inner}/tq_batch.pt``; the parts of
a step are joined in order. A key is ``{uid}_{session}_{index}``: equal uids are a group, a session is a trajectory, and
its index numbers its rows. Rows are kept as ``QueueCodec`` keeps them, without those that only fill a batch up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from mock_scheduler.adapters.imports.steps import ForeignStep, ImportOptions, find_files
from mock_scheduler.adapters.imports.tensordicts import TENSORDICT_NAMES, read_tensordict
from mock_scheduler.adapters.transfer_queue.codec import QueueCodec, QueueRows
from mock_scheduler.adapters.transfer_queue.columns import QueueColumn, select_rows
from mock_scheduler.adapters.transfer_queue.row_fields import FieldNames, read_version
from mock_scheduler.errors import BatchError, ForeignFileError
from mock_scheduler.support.pickles.torch_files import read_torch_file
from mock_scheduler.support.pickles.values import Jagged

_PATTERN = r"(?:[^/]*/)*(\d+)/(\d+)/tq_batch\.pt"
_EXAMPLE = "GBS8_N4_in512_out512/1/0/tq_batch.pt"
_PARTS = {"tensordict", "tags", "keys", "global_steps"}
#: The tag of a row that fills a batch up, and was sampled by nobody.
PADDING_TAG = "is_padding"

#: Where verl's V1 trainer keeps what a rollout says.
VERL_NAMES = FieldNames(
    tokens="input_ids",
    responses="responses",
    prompts="prompts",
    masks=("response_mask", "loss_mask"),
    positions="position_ids",
    logprobs="rollout_log_probs",
    scores="rm_scores",
    experts="routed_experts",
    source="data_source",
    prompt="raw_prompt",
    identities=("uid",),
    version_tag="min_global_steps",
)


def read_rollouts(source: Path, options: ImportOptions) -> Iterator[ForeignStep]:
    """Reads the steps of files, in their order; raises as the other readers."""
    inside = source if source.is_dir() else None
    for step_name, files in groupby(find_files(source, _PATTERN, _EXAMPLE), key=lambda file: file.parts[0]):
        parts = [_load(file.path, inside) for file in files]
        yield _build_step(parts, int(step_name), options, f"{source}, step {step_name}")


def _load(path: Path, inside: Path | None) -> QueueRows:
    content = read_torch_file(path, inside=inside, kept=TENSORDICT_NAMES, what="a batch of verl")
    if not isinstance(content, dict) or not content.keys() >= _PARTS:
        raise ForeignFileError(f"{path} has no {', '.join(sorted(_PARTS))} in it")
    fields = read_tensordict(content["tensordict"], str(path))
    keys, tags = content["keys"], content["tags"]
    if not isinstance(keys, list) or not isinstance(tags, list) or len(tags) != len(keys):
        raise BatchError(f"{path} has other numbers of keys and tags")
    rows = QueueRows(
        partition="train",
        keys=[str(key) for key in keys],
        tags=[dict(tag) if isinstance(tag, Mapping) else {} for tag in tags],
        columns={name: _as_column(values) for name, values in fields.items()},
    )
    try:
        rows.check()
    except BatchError as error:
        raise BatchError(f"{path}: {error}") from error
    return rows


def _as_column(values: Any) -> QueueColumn:  # noqa: ANN401 - of a TensorDict that was read
    if isinstance(values, Jagged):
        return QueueColumn(kind="jagged", rows=values.rows)
    if isinstance(values, torch.Tensor):
        return QueueColumn(kind="dense", rows=values.unbind())
    return QueueColumn(kind="stack", rows=values)


def _join(parts: Sequence[QueueRows], where: str) -> QueueRows:
    """The rows of all parts, without those that fill a batch up."""
    if any(part.columns.keys() != parts[0].columns.keys() for part in parts):
        raise BatchError(f"{where} has other fields in its parts: {[sorted(part.columns) for part in parts]}")
    own = [[place for place, tag in enumerate(part.tags) if not tag.get(PADDING_TAG)] for part in parts]
    cut = [select_rows(part.columns, places) for part, places in zip(parts, own, strict=True)]
    joined = {name: _join_columns([columns[name] for columns in cut]) for name in parts[0].columns}
    return QueueRows(
        partition=parts[0].partition,
        keys=[part.keys[place] for part, places in zip(parts, own, strict=True) for place in places],
        tags=[part.tags[place] for part, places in zip(parts, own, strict=True) for place in places],
        columns=joined,
    )


def _join_columns(columns: Sequence[QueueColumn]) -> QueueColumn:
    kinds = {column.kind for column in columns}
    rows = [row for column in columns for row in column.rows]
    tensors = [row for row in rows if isinstance(row, torch.Tensor)]
    if len(tensors) < len(rows):
        return QueueColumn(kind="stack", rows=rows)
    # The tensors of one part may be of one size by chance.
    is_dense = kinds == {"dense"} and len({row.shape for row in tensors}) == 1
    return QueueColumn(kind="dense" if is_dense else "jagged", rows=rows)


def _build_step(parts: Sequence[QueueRows], step: int, options: ImportOptions, where: str) -> ForeignStep:
    rows = _join(parts, where)
    if not rows.keys:
        raise BatchError(f"{where} holds no row")
    versions = [read_version(VERL_NAMES, tag) for tag in rows.tags]
    stated = [version for version in versions if version is not None]
    try:
        batch = QueueCodec(VERL_NAMES, sampling=options.sampling).build(rows, version=0)
    except BatchError as error:
        raise BatchError(f"{where}: {error}") from error
    lacks = [*options.assumed, "terminations"]
    lacks += ["policy_versions"] if len(stated) < len(rows.keys) else []
    lacks += [
        role
        for role, name in (("rollout_logprobs", VERL_NAMES.logprobs), ("rewards", VERL_NAMES.scores))
        if name not in rows.columns
    ]
    return ForeignStep(step=step, batch=batch, policy_version=max(stated, default=0), lacks=tuple(lacks)).noted()
