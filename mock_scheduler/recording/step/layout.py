"""Lays a batch out as tensors, and makes a batch, or some rows of one, of tensors.

Contract: a column is *dense* (entry i is row i's) or *ragged* (row i's entries lie between the offsets i and i + 1 of
an offsets tensor ``[B + 1]``). So rows ``start`` to ``stop`` are one range of every tensor. Strings are indices into
tables of the content; JSON columns are canonical JSON text, ragged; extras are ``extras/{name}``, their offsets
``extras/{name}#offsets``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from mock_scheduler.batch import TENSOR_FIELDS, RolloutBatch, SampleIdentity, SamplingParams, sampling_as_json
from mock_scheduler.batch.columns import Column, JsonColumn, TensorColumn
from mock_scheduler.batch.offsets import compute_response_offsets
from mock_scheduler.batch.trajectory import RowKey, build_identities
from mock_scheduler.support.digests import JSON, canonical_json
from mock_scheduler.support.raw_tensors import RawTensor

_DENSE: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "rewards": ("float32", ()),
    "terminations": ("uint8", ()),
    "prompt_lengths": ("int32", ()),
    "prompt_digests": ("uint8", (32,)),
    "identities": ("int64", (4,)),
    "scheduler_index": ("int32", ()),
    "tag_index": ("int32", ()),
}
_RAGGED: Mapping[str, tuple[str, str]] = {
    "tokens": ("int32", "row_offsets"),
    "response_mask": ("bool", "row_offsets"),
    "rollout_logprobs": ("float32", "response_offsets"),
    "turn_rewards": ("float32", "turn_offsets"),
    "policy_versions": ("int32", "turn_offsets"),
}
#: The tensors that say which row is which: enough to order rows and to tell trajectories and groups.
IDENTITY_TENSORS = ("identities", "scheduler_index")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLayout:
    """``columns``: tensor -> its offsets tensor, or None where it is dense. ``offsets``: the names of these;
    ``extra_values``: the tensors of extras' values, of any dtype, as no others are."""

    num_rows: int
    num_trajectories: int
    columns: Mapping[str, str | None]
    offsets: tuple[str, ...]
    extra_values: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowKeys:
    """Holds the rows of one file, in its order, each with the digest of its prompt."""

    keys: tuple[RowKey, ...]
    prompt_digests: tuple[str, ...]


def pack_batch(batch: RolloutBatch) -> tuple[dict[str, RawTensor], dict[str, JSON]]:
    """The batch as tensors that share its memory, and as JSON for the rest; ``unpack_batch`` is the inverse."""
    # Texts are stored once, in sorted order, which does not depend on the rows' arrival.
    scheduler_ids = sorted({identity.scheduler_id for identity in batch.identities})
    tag_names = sorted(set(batch.tags))
    scheduler_index = {name: index for index, name in enumerate(scheduler_ids)}
    tag_index = {name: index for index, name in enumerate(tag_names)}
    digests = np.frombuffer(bytearray.fromhex("".join(batch.prompt_digests)), dtype=np.uint8)
    core = batch.core_arrays()
    arrays = {
        **core,
        "response_offsets": compute_response_offsets(core["row_offsets"], core["response_mask"]),
        "identities": np.array([i.numbers for i in batch.identities], dtype=np.int64).reshape(len(batch), 4),
        "scheduler_index": np.array([scheduler_index[i.scheduler_id] for i in batch.identities], dtype=np.int32),
        "tag_index": np.array([tag_index[tag] for tag in batch.tags], dtype=np.int32),
        "prompt_digests": digests.reshape(len(batch), 32),
    }
    tensors = {name: RawTensor.of_array(array) for name, array in arrays.items()}
    extras: dict[str, JSON] = {}
    for name, column in batch.extras.items():
        extras[name] = _pack_extra(name, column, tensors)
    content: dict[str, JSON] = {
        "num_rows": len(batch),
        "num_trajectories": batch.num_trajectories,
        "scheduler_ids": scheduler_ids,
        "tags": tag_names,
        "sampling": sampling_as_json(batch.sampling),
        "group_size": batch.group_size,
        "extras": extras,
        "meta": batch.meta,
    }
    return tensors, content


def _pack_extra(name: str, column: Column, tensors: dict[str, RawTensor]) -> str:
    """Adds the column's tensors and returns its kind: ``dense``, ``ragged`` or ``json``."""
    if isinstance(column, TensorColumn):
        tensors[f"extras/{name}"] = column.raw
        if column.bounds is None:
            return "dense"
        tensors[f"extras/{name}#offsets"] = RawTensor.of_array(column.bounds)
        return "ragged"
    # Canonical, so that equal values are equal bytes, whatever the order of their keys.
    texts = [canonical_json(item).encode("ascii") for item in column.items]
    tensors[f"extras/{name}"] = RawTensor.of_array(np.frombuffer(b"".join(texts), dtype=np.uint8))
    sizes = np.array([0, *(len(text) for text in texts)], dtype=np.int64)
    tensors[f"extras/{name}#offsets"] = RawTensor.of_array(sizes.cumsum())
    return "json"


def read_layout(content: Mapping[str, Any], kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> StepLayout:
    """Check that the tensors (name -> dtype and shape) fit the content's rows.

    Raises ``ValueError`` listing every tensor absent, unknown, or of another dtype or shape, and ``KeyError``
    or ``TypeError`` where the content is none.
    """
    # The content first: the sizes expected of the tensors come from it.
    _check_content(content)
    num_rows, num_trajectories, extras = content["num_rows"], content["num_trajectories"], content["extras"]
    columns: dict[str, str | None] = {**dict.fromkeys(_DENSE), **{name: _RAGGED[name][1] for name in _RAGGED}}
    for name, kind in extras.items():
        if kind not in ("dense", "ragged", "json"):
            raise ValueError(f"extra {name!r} is of kind {kind!r}")
        columns[f"extras/{name}"] = None if kind == "dense" else f"extras/{name}#offsets"
    offsets = tuple(dict.fromkeys(name for name in columns.values() if name is not None))
    layout = StepLayout(
        num_rows=num_rows,
        num_trajectories=num_trajectories,
        columns=columns,
        offsets=offsets,
        extra_values=frozenset(f"extras/{name}" for name, kind in extras.items() if kind != "json"),
    )
    problems = _layout_problems(layout, kinds)
    if problems:
        raise ValueError("; ".join(problems))
    return layout


def _check_content(content: Mapping[str, Any]) -> None:
    num_rows, num_trajectories = content["num_rows"], content["num_trajectories"]
    if type(num_rows) is not int or type(num_trajectories) is not int or not 0 <= num_trajectories <= num_rows:
        raise ValueError(f"{num_rows!r} rows of {num_trajectories!r} trajectories")
    for name in ("scheduler_ids", "tags"):
        texts = content[name]
        if not isinstance(texts, list) or not all(type(text) is str for text in texts):
            raise ValueError(f"{name} is {texts!r}; expected a list of texts")
    if type(content["group_size"]) not in (int, type(None)):
        raise ValueError(f"group_size {content['group_size']!r}")
    for name in ("extras", "meta", "sampling"):
        if not isinstance(content[name], dict):
            raise ValueError(f"{name} is of type {type(content[name]).__name__}")
    # Its own constructor knows what it accepts; the value is not kept.
    SamplingParams(**content["sampling"])


def _layout_problems(layout: StepLayout, kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    expected = {*layout.columns, *layout.offsets}
    problems = [f"tensor {name!r} is missing" for name in sorted(expected - set(kinds))]
    problems += [f"tensor {name!r} is not expected" for name in sorted(set(kinds) - expected)]
    for name, (dtype, shape) in kinds.items():
        if name in layout.offsets:
            is_right = (dtype, shape) == ("int64", (layout.num_rows + 1,))
        elif name in _DENSE:
            is_right = (dtype, shape) == (_DENSE[name][0], (layout.num_rows, *_DENSE[name][1]))
        elif name in _RAGGED:
            is_right = dtype == _RAGGED[name][0] and len(shape) == 1
        else:
            is_right = len(shape) >= 1 and (layout.columns.get(name) is not None or shape[0] == layout.num_rows)
            if is_right and name not in layout.extra_values:  # the text of a JSON column
                is_right = dtype == "uint8" and len(shape) == 1
        if not is_right:
            problems.append(f"tensor {name!r} is {dtype} {list(shape)}, which does not fit {layout.num_rows} rows")
    return problems


def unpack_batch(
    arrays: Mapping[str, npt.NDArray[Any]],
    extra_values: Mapping[str, RawTensor],
    content: Mapping[str, Any],
    *,
    group_size: int | None,
) -> RolloutBatch:
    """The batch of columns and offsets of the same rows, the offsets beginning at 0; it shares memory with them.
    ``extra_values``: the tensors that ``StepLayout.extra_values`` names; ``arrays``: all others.

    Raises ``BatchError``, ``KeyError``, ``IndexError``, ``TypeError``, ``ValueError`` or ``RuntimeError`` where they
    are no batch.
    """
    tags = content["tags"]
    batch = RolloutBatch._restored(
        identities=_unpack_identities(arrays, content["scheduler_ids"]),
        prompt_digests=_unpack_digests(arrays["prompt_digests"]),
        tags=tuple([tags[index] for index in arrays["tag_index"].tolist()]),
        sampling=SamplingParams(**content["sampling"]),
        group_size=group_size,
        extras={name: _unpack_extra(name, kind, arrays, extra_values) for name, kind in content["extras"].items()},
        meta=content["meta"],
        **{name: arrays[name] for name in TENSOR_FIELDS},
    )
    # The batch derives these from the mask, while a load of some rows relies on them.
    if not np.array_equal(
        compute_response_offsets(arrays["row_offsets"], arrays["response_mask"]), arrays["response_offsets"]
    ):
        raise ValueError("response_offsets are not those of response_mask")
    return batch


def unpack_keys(arrays: Mapping[str, npt.NDArray[Any]], scheduler_ids: list[str]) -> RowKeys:
    """Tells the rows; raises as ``unpack_batch``."""
    numbers, indices = arrays["identities"].tolist(), arrays["scheduler_index"].tolist()
    return RowKeys(
        keys=tuple([(scheduler_ids[index], *row) for index, row in zip(indices, numbers, strict=True)]),
        prompt_digests=_unpack_digests(arrays["prompt_digests"]),
    )


def _unpack_digests(digests: npt.NDArray[np.uint8]) -> tuple[str, ...]:
    """Returns the rows of a uint8 ``[B, 32]`` as hex."""
    return tuple(digests.tobytes().hex(" ", 32).split())


def _unpack_extra(
    name: str, kind: str, arrays: Mapping[str, npt.NDArray[Any]], values: Mapping[str, RawTensor]
) -> Column:
    if kind == "dense":
        return TensorColumn.of_given(values[f"extras/{name}"])
    offsets = arrays[f"extras/{name}#offsets"]
    if kind == "ragged":
        return TensorColumn.of_given(values[f"extras/{name}"], offsets)
    text, bounds = arrays[f"extras/{name}"].tobytes(), offsets.tolist()
    # All rows in one go: a call per row would cost more than reading the rest of the step.
    items = json.loads(b"[" + b",".join([text[a:b] for a, b in pairwise(bounds)]) + b"]")
    if len(items) != len(bounds) - 1:
        raise ValueError(f"extra {name!r}: a row is not one JSON value")
    return JsonColumn(items=tuple(items))


def _unpack_identities(arrays: Mapping[str, npt.NDArray[Any]], scheduler_ids: list[str]) -> tuple[SampleIdentity, ...]:
    chosen = [scheduler_ids[index] for index in arrays["scheduler_index"].tolist()]
    return build_identities(chosen, arrays["identities"])
