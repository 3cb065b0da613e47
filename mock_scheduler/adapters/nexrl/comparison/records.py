"""Compares the trajectories of two dumps, and a remote run's datums with the trajectories they were made of.

Contract: records are paired by the sample they are of, else by ``(group_id, run_id)``, never by their place in a file;
all of them are compared, and a record of one side alone is missing on the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mock_scheduler.adapters.nexrl.comparison.pairing import Item, missing
from mock_scheduler.adapters.nexrl.comparison.tables import as_one_kind, as_tensor
from mock_scheduler.adapters.nexrl.comparison.values import Difference, Tolerance, compare_numbers, compare_tensors
from mock_scheduler.adapters.nexrl.files import Content, as_number

Record = dict[str, Any]

#: By token; those in the second line are no part of every system's files.
_LISTS = ("tokens", "loss_mask")
_OPTIONAL = ("logprobs", "advantages")


def compare_trajectories(first: Content, second: Content, tolerance: Tolerance) -> tuple[list[Item], list[str]]:
    """Tokens, masks and rewards of all trajectories, and log-probabilities and advantages where both sides keep them;
    and notes on the values left out."""
    ones, others = _flat_records(first.get("trajectories")), _flat_records(second.get("trajectories"))
    items: list[Item] = []
    own, own_items = _by_id(ones, others, "first")
    theirs, their_items = _by_id(others, ones, "second")
    items += own_items + their_items
    kept = [name for name in _OPTIONAL if _any_has(ones, name) and _any_has(others, name)]
    notes = [
        f"{name}: not kept by the {'second' if _any_has(ones, name) else 'first'} dump"
        for name in _OPTIONAL
        if _any_has(ones, name) != _any_has(others, name)
    ]
    for label in [*own, *(label for label in theirs if label not in own)]:
        if label not in own or label not in theirs:
            items.append(missing(label, "trajectory", in_first=label not in own, detail="no such trajectory"))
            continue
        one, other = own[label], theirs[label]
        items += [_compare_lists(label, name, one.get(name), other.get(name), tolerance) for name in (*_LISTS, *kept)]
        items.append(_compare_values(label, "reward", one.get("reward"), other.get("reward"), tolerance))
    return items, notes


def compare_datums(datums: Content, trajectories: Content | None, tolerance: Tolerance) -> tuple[list[Item], list[str]]:
    """Compares the datums sent with the trajectories of the self-hosted run; and notes that describe them."""
    sent = _flat_records(datums.get("datums"))
    notes = [f"datums: {len(sent)}"]
    if sent:
        inputs = sent[0].get("loss_fn_inputs")
        named = sorted(inputs) if isinstance(inputs, dict) else []
        notes.append(f"keys of the first: {', '.join(sorted(sent[0]))}")
        notes.append(f"keys of its loss_fn_inputs: {', '.join(named) or 'none'}")
        notes.append(f"input tokens: {sum(len(_input_tokens(datum)) for datum in sent)}")
    if trajectories is None:
        return [], notes
    expected = [_as_datum(record) for record in _flat_records(trajectories.get("trajectories"))]
    ones, own_items = _by_id(expected, sent, "first")
    others, their_items = _by_id(sent, expected, "second")
    items = own_items + their_items
    for label in [*ones, *(label for label in others if label not in ones)]:
        if label not in ones or label not in others:
            items.append(missing(label, "datum", in_first=label not in ones, detail="no such trajectory"))
            continue
        items += _compare_datum(label, ones[label], others[label], tolerance)
    return items, notes


def _compare_datum(label: str, one: Record, other: Record, tolerance: Tolerance) -> list[Item]:
    items = [_compare_lists(label, "input_tokens", one["input_tokens"], _input_tokens(other), tolerance)]
    sent = other.get("loss_fn_inputs")
    inputs = {name: _input_values(value) for name, value in sent.items()} if isinstance(sent, dict) else {}
    for name, values in one["loss_fn_inputs"].items():
        if values is not None and name in inputs:
            items.append(_compare_lists(label, name, values, inputs[name], tolerance))
    return items


def _as_datum(record: Record) -> Record:
    """A datum of a trajectory, as far as the trajectory's file says."""

    def moved(name: str) -> object:
        values = as_tensor(record.get(name))
        return None if values is None else values.reshape(-1)[1:]

    tokens = as_tensor(record.get("tokens", []))
    named: Record = {name: record[name] for name in ("sample_id", "group_id", "run_id") if name in record}
    return {
        **named,
        "input_tokens": [] if tokens is None else tokens[:-1],
        "loss_fn_inputs": {
            "target_tokens": moved("tokens"),
            "mask": moved("loss_mask"),
            "logprobs": moved("logprobs"),
            "advantages": moved("advantages"),
        },
    }


def _input_tokens(datum: Record) -> list[int]:
    """The tokens the model reads: a list, ``tokens`` of a dict, or those of its chunks one after another."""
    given = datum.get("model_input", datum.get("input_tokens"))
    if isinstance(given, dict):
        chunks = given.get("chunks")
        parts = [chunk.get("tokens") for chunk in chunks] if isinstance(chunks, list) else [given.get("tokens")]
        given = [token for part in parts if isinstance(part, list) for token in part] or parts[0]
    tensor = as_tensor(given)
    return [] if tensor is None else [int(token) for token in tensor.reshape(-1).tolist()]


def _input_values(value: object) -> object:
    """The numbers of a loss input: a list, a tensor, or ``data`` of a dict."""
    return value["data"] if isinstance(value, dict) and "data" in value else value


def _flat_records(listed: object) -> list[Record]:
    """The records with their ``extra_fields`` beside the rest."""
    records = listed if isinstance(listed, list) else []
    return [
        {**_extra_fields(record), **{name: value for name, value in record.items() if name != "extra_fields"}}
        for record in records
        if isinstance(record, dict)
    ]


def _extra_fields(record: Record) -> Record:
    extra = record.get("extra_fields")
    return extra if isinstance(extra, dict) else {}


def _any_has(records: Sequence[Record], name: str) -> bool:
    return any(record.get(name) is not None for record in records)


def _by_id(records: Sequence[Record], others: Sequence[Record], side: str) -> tuple[dict[str, Record], list[Item]]:
    """Records by the ids both sides have: of the sample, else of group and run, else the place in the file."""
    everyone = [*records, *others]
    if all("sample_id" in record for record in everyone):
        labels = [str(record["sample_id"]) for record in records]
    elif all(record.get("group_id") is not None and record.get("run_id") is not None for record in everyone):
        labels = [f"({record['group_id']}, {record['run_id']})" for record in records]
    else:
        labels = [f"record {number}" for number in range(len(records))]
    items = [
        Item(
            place=label,
            name="id",
            difference=Difference(status="unusable", detail=f"{count} records of the {side} dump have it"),
        )
        for label, count in Counter(labels).items()
        if count > 1
    ]
    return dict(zip(labels, records, strict=True)), items


def _compare_lists(label: str, name: str, one: object, other: object, tolerance: Tolerance) -> Item:
    first, second = as_tensor(one), as_tensor(other)
    if first is None or second is None:
        return missing(label, name, in_first=first is None, detail="no list of numbers")
    first, second = as_one_kind(first, second)
    difference = compare_tensors(first.reshape(-1), second.reshape(-1), tolerance)
    at = difference.worst if difference.max_abs else None
    return Item(place=label, name=name, difference=difference, where="" if at is None else f"entry {at}")


def _compare_values(label: str, name: str, one: object, other: object, tolerance: Tolerance) -> Item:
    first, second = as_number(one), as_number(other)
    if first is None or second is None:
        return missing(label, name, in_first=first is None, detail="no number")
    return Item(place=label, name=name, difference=compare_numbers(first, second, tolerance))
