"""Traces with forged headers, tensors and bytes: each command on one ends with a verdict or an error."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.support.tensor_bytes import compute_tensor_digest
from mock_scheduler.trace.full.files import METADATA_KEY
from mock_scheduler.trace.full.pieces import compute_tensor_crc32
from tests.content_traces import ContentRank, ContentStep, content_step, save_content_trace
from tests.fuzz.corpus import copy_tree, make_sketches, make_trace, read_safetensors, write_safetensors
from tests.fuzz.mutations import fuzz, mutate_bytes, mutate_json, run_command, sealed_text

SKETCH_KEY = "mock_scheduler.sketch"
_BIG = (2**20, 2**26, 2**28, 2**31, 2**33, 2**36, 2**37, 2**39)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    make_trace(folder / "two")
    make_trace(folder / "one", num_ranks=1)
    make_trace(folder / "other", scale=1.0000001)
    make_trace(folder / "other_one", scale=1.0000001, num_ranks=1)
    make_sketches(folder / "sketch")
    make_sketches(folder / "other_sketch", scale=1.0000001)
    step = content_step({"seven": [7, 8, 9, 10], "eight": [8, 8], "nine": [9, 1, 2, 3, 4]})
    for level, name in (("full", "content"), ("sketch", "content_sketch")):
        save_content_trace(folder / name, step, _two_ranks(step), level=level)
        other = step.changed("nine", 3, 2, by=1e-7)
        save_content_trace(folder / f"other_{name}", other, level=level)
    return folder


def _two_ranks(step: ContentStep) -> list[ContentRank]:
    """One row on both ranks, the others on one of them."""
    pieces = {name: (name, range(len(ids))) for name, ids in step.tokens.items()}
    return [
        ContentRank(coordinates={"tp": tp}, micro_batches=[[pieces[name]] for name in names])
        for tp, names in enumerate((("seven", "nine"), ("nine", "eight")))
    ]


def forge_rows(document: dict[str, Any], rng: random.Random) -> str:
    """Forges the table of rows by content."""
    rows = document.get("ending", document)["footer"]["rows"]
    field = rng.choice(sorted(rows))
    other = rng.choice([0, -1, 1, 2**22, 2**62, 2**64, 10**30, True, None, "nine", 1.0])
    way = rng.randrange(4)
    if way == 0:
        rows[field][rng.randrange(len(rows[field]))] = other
    elif way == 1:
        del rows[field]
    elif way == 2:
        rows[field] = rows[field] * rng.choice([0, 2, 10**5])
    else:
        for name in rows:
            rows[name] = rows[name] * rng.choice([2, 2**18])
    return f"forged {field} of rows, way {way}, {other}"


def forge(document: dict[str, Any], rng: random.Random) -> str:
    """Forges what a reader takes sizes from."""
    name = rng.choice(list(document["tensors"]))
    record, big, action = document["tensors"][name], rng.choice(_BIG), rng.randrange(12)
    ending = document.get("ending")
    if action == 0:
        document["blocks"].append([])
        record["global_shape"] = [big, *record["global_shape"][1:]]
        record["local_shape"] = [0, *record["local_shape"][1:]]
        record["splits"] = [[0, len(document["blocks"]) - 1]]
    elif action == 1:
        record["global_shape"] = [big, *record["global_shape"][1:]]
    elif action == 2:
        num = rng.choice([2000, 8000])
        document["blocks"].append([[i, 2 * i, 1] for i in range(num)])
        place = len(document["blocks"]) - 1
        record.update(global_shape=[2 * num] * 2, local_shape=[num] * 2, splits=[[0, place], [1, place]], dims=[])
        record["flat_range"] = rng.choice([None, [0, 0], [0, 4]])
    elif action == 3:
        document["blocks"] = [[[0, 0, 0]] * rng.choice([10, 1000])] * max(1, len(document["blocks"]))
    elif action == 4 and ending:
        ending["footer"]["rows"]["lengths"] = [big] * 3
        if "token" in record["dims"]:
            record["global_shape"] = [3 * big, *record["global_shape"][1:]]
    elif action == 5 and ending:
        size = rng.choice([0, 1, 10**6])
        ending["footer"]["rows"] = {"identities": ["x"] * 10_000, "lengths": [size] * 10_000}
    elif action == 6 and ending and ending["footer"]["ledgers"]:
        ledger = ending["footer"]["ledgers"]["collective"]
        ledger["order"] = [0] * rng.choice([0, 10**5])
        ledger["calls"] = ledger["calls"] * rng.choice([1, 1000])
        ledger["calls"][0][3] = rng.choice([0, 2**62, 10**30])
    elif action == 7:
        document["world_size"] = rng.choice([1, 3, 2**19, 2**20, 2**21])
    elif action == 8:
        record["flat_range"] = rng.choice([[0, 0], [0, 1], [1, 1], [2, 4], [0, 2**40]])
    elif action == 9:
        record["dims"] = rng.choice([["token"], ["token", "channel"], ["channel", "token"], [], ["expert"]])
    elif action == 10:
        record["dtype"] = rng.choice(["float64", "int8", "bool", "complex64", "float8_e4m3fn", "uint64", "quint8"])
    else:
        record["name"] = rng.choice(["decoder.layers.\N{SUPERSCRIPT TWO}.x", "layers." + "9" * 900, "", "x" * 2000])
    return f"forged {name}, way {action}"


def replace_tensor(document: dict[str, Any], tensors: dict[str, torch.Tensor], rng: random.Random) -> str:
    """Puts in a tensor of other values, dtype or shape, with digests that fit."""
    name = rng.choice(list(tensors))
    old = tensors[name]
    other_values = (
        old * float("nan"),
        old * float("inf"),
        old * 1e38,
        old.double() * 1e308,
        -old,
        old[:0],
        old.reshape(-1),
    )
    other_dtypes = (torch.float64, torch.complex64, torch.bool, torch.int8, torch.float8_e5m2)
    new = rng.choice([*other_values, *map(old.to, other_dtypes)]).contiguous()
    tensors[name] = new
    record = document["tensors"][name]
    record["sha256"], record["crc32"] = compute_tensor_digest(new), compute_tensor_crc32(new)
    record["dtype"] = str(new.dtype).removeprefix("torch.")
    if rng.random() < 0.5:
        record["local_shape"] = list(new.shape)
    return f"put {new.dtype} {list(new.shape)} at {name}"


def mutate_file(path: Path, key: str, rng: random.Random) -> str:
    action = rng.randrange(8)
    if action == 0:
        path.write_bytes(mutate_bytes(path.read_bytes(), rng))
        return "bytes"
    if action == 1:
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        head = json.loads(data[8 : 8 + size])
        said = str(mutate_json(head, rng))
        text = json.dumps(head).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
        return f"safetensors {said}"
    document, tensors = read_safetensors(path, key)
    if action in (2, 3) and "content" in path.parts[-3]:
        said = forge_rows(document, rng)
    elif key == METADATA_KEY and action in (2, 3, 4):
        said = forge(document, rng)
    elif key == METADATA_KEY and action == 5:
        said = replace_tensor(document, tensors, rng)
    else:
        said = str(mutate_json(document, rng))
    write_safetensors(path, key, sealed_text(document), tensors)
    return said


def attack(sources: Path, work: Path, kind: str, rng: random.Random) -> list[str]:
    """Mutates one or all files of a trace, and runs the commands that read it; gives what went wrong."""
    trace = copy_tree(sources / kind, work / kind)
    key = SKETCH_KEY if "sketch" in kind else METADATA_KEY
    path = rng.choice(sorted(trace.rglob("*.safetensors")))
    said = mutate_file(path, key, rng)
    other = {"two": "other", "one": "other_one"}.get(kind, f"other_{kind}")
    reports = ("--json", work / "report.json", "--html", work / "report.html")
    commands = [("compare", sources / other, trace, *reports), ("replicas", trace, *reports[:2])]
    commands.append(("compare", trace, sources / other, *reports))
    if "sketch" not in kind:
        commands.append(("replicas", trace, "--verify"))
    return [f"{said}: {problem}" for command in commands if (problem := run_command(*command))]


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["two", "one", "sketch", "content", "content_sketch"])
def test_a_mutated_trace_ends_with_a_verdict_or_an_error(sources: Path, tmp_path: Path, kind: str) -> None:
    @fuzz(300)
    def check(rng: random.Random) -> None:
        assert attack(sources, tmp_path, kind, rng) == []

    check()


@pytest.mark.parametrize("kind", ["two", "one", "sketch", "content", "content_sketch"])
def test_a_few_mutated_traces(sources: Path, tmp_path: Path, kind: str) -> None:
    """The first ones of the sweep, in the gate."""
    for seed in range(4):
        assert attack(sources, tmp_path, kind, random.Random(seed)) == []
