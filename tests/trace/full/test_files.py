"""Trace files: what is refused when written, equal bytes, and every damage to a header is found and named."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open

from mock_scheduler.config.instruments import TRACE_KINDS
from mock_scheduler.errors import TraceError
from mock_scheduler.support.digests import seal
from mock_scheduler.trace.entries import DimName, LedgerCall, StepFooter, Unobserved
from mock_scheduler.trace.full.files import METADATA_KEY, remove_steps_from
from mock_scheduler.trace.full.reader import open_trace
from mock_scheduler.trace.shards import Block, ShardSpec, Split, whole
from mock_scheduler.trace.sketch.files import SketchSink
from tests.trace.builders import (
    FC1,
    NORM,
    ROWS,
    entry,
    flip_last_byte,
    gated_spec,
    key,
    place,
    refused,
    refused_merge,
    reseal,
    rewrite_metadata,
    save,
    save_one,
    token_piece,
)

STORED = f"000000/gradient/{NORM}"


def test_the_header_is_as_the_format_says(tmp_path: Path) -> None:
    """Digests worked out with ``hashlib`` and ``zlib`` from ``float32[4]`` and the bytes of four ones."""
    ledgers = {
        "collective": [
            LedgerCall(operation="all_reduce", group=(0, 1), dtype="float32", num_elements=8),
            LedgerCall(operation="all_gather", group=(0,), dtype="int64", num_elements=1),
            LedgerCall(operation="all_reduce", group=(0, 1), dtype="float32", num_elements=8),
        ]
    }
    unobserved = (Unobserved(kind="activation", name="x", reason="fused"),)
    footer = StepFooter(
        rows=ROWS, update_rows=((0, 2), (1,)), kinds=("gradient",), unobserved=unobserved, ledgers=ledgers
    )
    path = save(tmp_path, 0, 1, [entry(whole(NORM, (4,)), torch.ones(4))], footer=footer)
    with safe_open(path, framework="pt") as handle:
        content = json.loads(handle.metadata()[METADATA_KEY])
    digest = content.pop("digest")
    assert digest == seal(content)["digest"]
    assert content == {
        "format_version": 3,
        "step": 0,
        "global_rank": 0,
        "world_size": 1,
        "coordinates": {"tp": 0, "pp": 0, "dp": 0},
        "part": 0,
        "tensors": {
            STORED: {
                "update": 0,
                "kind": "gradient",
                "name": NORM,
                "dtype": "float32",
                "global_shape": [4],
                "local_shape": [4],
                "splits": [],
                "flat_range": None,
                "dims": [],
                "is_masked": False,
                "sha256": "fe4cf96adc76b317f32e1835076a935095d4d31ba0f91b41d492ba2f10a77741",
                "crc32": 1342203786,
            }
        },
        "blocks": [],
        "ending": {
            "num_parts": 1,
            "earlier_parts": [],
            "footer": {
                "rows": {"identities": ["train/0/a", "train/0/b", "train/1/c"], "lengths": [3, 2, 4]},
                "update_rows": [[0, 2], [1]],
                "ranks": [],
                "kinds": ["gradient"],
                "patterns": [],
                "exclude": [],
                "unobserved": [["activation", "x", "fused"]],
                "ledgers": {
                    "collective": {
                        "calls": [["all_reduce", [0, 1], "float32", 8], ["all_gather", [0], "int64", 1]],
                        "order": [0, 1, 0],
                    }
                },
            },
        },
    }
    with open_trace(tmp_path) as reader:
        read = reader.footer(0)
    assert (read.rows, read.update_rows, read.unobserved) == (ROWS, ((0, 2), (1,)), unobserved)
    assert read.ledgers == {"collective": tuple(ledgers["collective"])}


def test_a_damaged_byte_is_found_and_named(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    flip_last_byte(path)
    assert refused_merge(tmp_path, key(NORM)) == (
        f"{path}: {STORED} does not match its digest (CRC-32); the file was changed or damaged after it was written"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace('"tp":0', '"tp":1'), "does not match its digest"),
        (lambda text: text.replace('"format_version":3', '"format_version":4'), "does not match its digest"),
        (lambda text: text.replace('"digest"', '"digets"'), "does not match its digest"),
        (lambda text: text.replace('"tp":0', '"tp":NaN'), "does not match its digest"),
        (lambda text: text[1:], "is not JSON: Extra data: line 1 column 9 (char 8)"),
        (lambda _: "[]", "is of type list, expected an object"),
        (lambda _: "null", "is of type NoneType, expected an object"),
    ],
    ids=["value", "version", "no-digest", "nan", "no-json", "list", "null"],
)
def test_changed_metadata_is_found_before_anything_in_it_is_read(
    tmp_path: Path, change: Callable[[str], str], problem: str
) -> None:
    """Metadata that was no JSON, or no object, was a JSONDecodeError or AttributeError, which ended a whole align."""
    path = save_one(tmp_path)
    rewrite_metadata(path, change)
    assert refused(tmp_path) == (
        f"{path}: the metadata {problem}; the file was changed or damaged after it was written"
    )


def test_a_trace_of_another_format_version_says_so(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    reseal(path, lambda content: content.update(format_version=4))
    assert refused(tmp_path) == (
        f"{path}: format version 4, expected 3; another release wrote it: run it again with this one"
    )


def test_a_trace_with_the_file_names_of_older_versions_says_so(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    old = path.rename(path.with_name("rank_00000.safetensors"))
    assert refused(tmp_path) == (
        f"{old}: format version 2 or less, expected 3; another release wrote it: run it again with this one"
    )


def test_a_trace_of_both_levels_says_so(tmp_path: Path) -> None:
    """A run that was resumed with another level was said to have ended before any rank wrote the step."""
    save_one(tmp_path)
    SketchSink(tmp_path, step=1, place=place(0), world_size=1).close(StepFooter())
    assert refused(tmp_path) == (
        f"{tmp_path / 'step_000001'}: sketches, where other steps have whole tensors, as of a run that was resumed "
        "with another trace.level; move the step folders of one level to another folder"
    )


def test_a_last_part_that_is_not_the_last_is_found(tmp_path: Path) -> None:
    """A forged header, whose parts could not be joined: an AssertionError."""
    path = save_one(tmp_path)
    reseal(path, lambda content: content["ending"].update(num_parts=2, earlier_parts=[""]))
    assert refused(tmp_path).endswith(": rank_00000.part_000.safetensors says that it is the last of 2 parts")


def test_missing_metadata_keys_are_listed(tmp_path: Path) -> None:
    """A missing key was a KeyError, which ended a whole align."""
    path = save_one(tmp_path)
    reseal(path, lambda content: [content.pop(name) for name in ("step", "world_size")])
    assert refused(tmp_path) == f"{path}: the metadata is not that of a trace: step is missing; world_size is missing"


def _either(names: Sequence[str]) -> str:
    """The names as a message lists them."""
    *most, last = map(repr, names)
    return f"{', '.join(most)} or {last}"


def _record(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["tensors"][STORED].update(changes)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content.update(step="0"), "step is '0': expected a whole number"),
        (lambda content: content.update(world_size=True), "world_size is True: expected a whole number"),
        (lambda content: content.update(coordinates=[0]), "coordinates is [0]: expected an object"),
        (lambda content: content["tensors"][STORED].pop("sha256"), f"tensors.{STORED}.sha256 is missing"),
        (lambda content: content["ending"].pop("footer"), "footer is None: expected an object"),
        (lambda content: content["ending"].update(num_parts=3), "0 digests of 3 parts"),
        (
            lambda content: content.update(world_size=10**15),
            "world_size is 1000000000000000: expected at most 1048576",
        ),
        (lambda content: content.update(world_size=0), "world_size is 0: expected at least 1"),
        (
            lambda content: content["ending"]["footer"].update(rows={"identities": ["a"], "lengths": [10**15]}),
            "rows of 1000000000000000 tokens; expected at most 137438953472, none negative",
        ),
        (
            lambda content: content["ending"]["footer"].update(update_rows=[[0]]),
            "an update has a row beyond the 0 of the batch",
        ),
        (_record(kind="grad"), f"tensors.{STORED}.kind is 'grad': expected {_either(TRACE_KINDS)}"),
        (_record(dims=["tokens"]), f"tensors.{STORED}.dims[0] is 'tokens': expected {_either(get_args(DimName))}"),
        (_record(dims=["row", "column"]), f"{NORM}: 2 names of 1 dimensions"),
        (
            _record(dtype="quint8"),
            f"{NORM} is of dtype 'quint8', which torch {torch.__version__} does not have, or no file may hold",
        ),
        (_record(splits=[[0, 0]]), f"{NORM}: splits ((0, 0),) name places beyond the 0 of blocks"),
        (_record(global_shape=[-1]), f"tensors.{STORED}.global_shape[0] is -1: expected at least 0"),
        (_record(global_shape=[5]), f"{NORM}: dimension 0 is not split, but has 4 of 5 indices"),
        (_record(flat_range=[0]), f"tensors.{STORED}.flat_range[1] is missing"),
        (_record(flat_range=[0, 5]), f"{NORM}: flat range [0, 5] of 4 elements"),
        (
            _record(global_shape=[1 << 39], local_shape=[1 << 39]),
            f"{NORM}: shape [549755813888] has more than 1099511627776 bytes",
        ),
    ],
)
def test_metadata_of_another_form_is_a_trace_error(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    path = save_one(tmp_path)
    reseal(path, change)
    assert refused(tmp_path) == f"{path}: the metadata is not that of a trace: {problem}"


def test_blocks_of_another_form_are_a_trace_error(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1, [entry(gated_spec(0), torch.ones(4, 3))])
    reseal(path, lambda content: content.update(blocks=[[[0, 1]]]))
    assert refused(tmp_path) == f"{path}: the metadata is not that of a trace: blocks[0][0][2] is missing"


def test_stored_tensors_that_the_metadata_does_not_list_are_found(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    reseal(path, lambda content: content["tensors"].clear())
    assert refused(tmp_path) == (
        f"{path}: the stored tensors are not those that the metadata lists; "
        "the file was changed or damaged after it was written"
    )


def test_every_single_changed_byte_is_a_trace_error(tmp_path: Path) -> None:
    """One changed byte in the metadata was a JSONDecodeError, which ended a whole align."""
    path = save_one(tmp_path)
    content = path.read_bytes()
    unnoticed = []
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1
        path.write_bytes(changed)
        try:
            with open_trace(tmp_path) as reader:
                reader.merge(key(NORM))
            unnoticed.append(position)
        except TraceError:
            pass
    assert unnoticed == []


def test_a_file_cut_short_is_an_error(tmp_path: Path) -> None:
    path = save_one(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    assert refused(tmp_path).startswith(f"{path}: not a readable safetensors file: ")


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    path = save(tmp_path, 0, 1, [])
    with pytest.raises(TraceError) as caught:
        save(tmp_path, 0, 1, [])
    assert str(caught.value) == (
        f"{path} exists: this step is traced already; choose another output_dir or trace_dir, or remove the trace"
    )


def _split(*blocks: tuple[int, int, int], local: int = 4, size: int = 8, dim: int = 0) -> ShardSpec:
    places = tuple(Block(local_start=mine, global_start=theirs, length=length) for mine, theirs, length in blocks)
    return ShardSpec(name=NORM, global_shape=(size,), local_shape=(local,), splits=(Split(dim=dim, blocks=places),))


_CONTRADICTS = f"step 0, global rank 0: gradient of {NORM}: the shard spec contradicts itself: {NORM}"


@pytest.mark.parametrize(
    ("spec", "tensor", "message"),
    [
        (
            whole(NORM, (4,)),
            torch.ones(5),
            f"step 0, global rank 0: gradient of {NORM} has shape [5], its shard spec says [4]",
        ),
        (
            gated_spec(0, flat_range=(0, 5)),
            torch.ones(4),
            f"step 0, global rank 0: gradient of {FC1} has shape [4], its shard spec says [4, 3] or [5]",
        ),
        (
            _split((0, 6, 4)),
            torch.ones(4),
            f"{_CONTRADICTS}: dimension 0: blocks [(6, 10)] of the whole tensor overlap or leave its 8 indices",
        ),
        (
            _split((0, 0, 2), (2, 1, 2)),
            torch.ones(4),
            f"{_CONTRADICTS}: dimension 0: blocks [(0, 2), (1, 3)] of the whole tensor overlap or leave its 8 indices",
        ),
        (
            _split((0, 0, 3), (2, 4, 2)),
            torch.ones(4),
            f"{_CONTRADICTS}: dimension 0: blocks [(0, 3), (2, 4)] of the local tensor overlap or leave its 4 indices",
        ),
        (_split((0, 0, 4), dim=1), torch.ones(4), f"{_CONTRADICTS}: splits of dimensions [1] of 1"),
        (
            whole(NORM, (1,)),
            torch.ones(1, dtype=torch.complex128),
            f"step 0, global rank 0: gradient of {NORM} is torch.complex128 [1] on cpu, which safetensors cannot hold",
        ),
        (
            whole("a#1", (1,)),
            torch.ones(1),
            "step 0, global rank 0: gradient of a#1: a traced name has no '#', which numbers the pieces of a tensor",
        ),
    ],
)
def test_an_entry_that_is_not_its_spec_is_refused_and_nothing_is_written(
    tmp_path: Path, spec: ShardSpec, tensor: torch.Tensor, message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        save(tmp_path, 0, 1, [entry(spec, tensor)])
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_given_twice_is_refused(tmp_path: Path) -> None:
    twice = [entry(whole(NORM, (1,)), torch.ones(1))] * 2
    with pytest.raises(TraceError, match=f"step 0, global rank 0: 000000/gradient/{NORM} is given twice"):
        save(tmp_path, 0, 1, twice)


def test_the_same_places_of_a_token_tensor_given_twice_are_refused(tmp_path: Path) -> None:
    twice = [token_piece(torch.ones(9), [0, 1])] * 2
    with pytest.raises(TraceError, match="step 0, global rank 0: 000000/output/new_logprobs is given twice"):
        save(tmp_path, 0, 1, twice)


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    entries = [entry(whole(NORM, (2,)), torch.ones(2)), entry(gated_spec(1), torch.ones(4, 3))]
    first = save(tmp_path / "a", 0, 1, entries)
    second = save(tmp_path / "b", 0, 1, entries[::-1])
    assert first.read_bytes() == second.read_bytes()


def test_a_resumed_run_removes_the_steps_that_it_computes_anew(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, 0, 1, [], step=step)
    (tmp_path / "step_notes").mkdir()
    remove_steps_from(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000", "step_notes"]


def test_a_step_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a PermissionError, with half of the step left where it is read."""
    save_one(tmp_path)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("mock_scheduler.trace.full.files.shutil.rmtree", refuse)
    with pytest.raises(TraceError) as caught:
        remove_steps_from(tmp_path, 0)
    assert str(caught.value) == (
        f"{tmp_path / 'step_000000'}: a step that is computed anew cannot be removed: [Errno 13] Permission denied"
    )
    assert refused(tmp_path) == f"{tmp_path}: no trace here; run with trace.level=full"
