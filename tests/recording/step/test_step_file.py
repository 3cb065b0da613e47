"""Loading some rows of a step file: the same rows, from no more bytes than they need."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import CorruptRecordingError
from mock_scheduler.recording.step.step_file import StepFile, encode_step
from tests.recording.builders import SAMPLING, make_batch, make_identity, make_info, make_row
from tests.recording.step_bytes import (
    CountingSource,
    make_large_batch,
    make_rich_batch,
    open_bytes,
    rewrite,
    split_header,
    with_extras,
)

BLOCK = 65536


def encode(batch: RolloutBatch) -> bytes:
    return encode_step(batch, make_info()).to_bytes()


def turns_batch() -> RolloutBatch:
    """Trajectories of one, two and three turns, each turn a row, in groups of two."""
    rows = []
    for env_id, num_turns in enumerate((1, 3, 2, 2)):
        for turn in range(num_turns):
            row = make_row(
                tokens=range(4 + turn), response=[False] * 2 + [True] * (2 + turn), rollout_logprobs=[0.5] * (2 + turn)
            )
            fields = {name: getattr(row, name) for name in row.__dataclass_fields__}
            rows.append(type(row)(**fields | {"identity": make_identity(env_id // 2, env_id % 2, turn=turn)}))
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2)


def test_opening_reads_the_header_only() -> None:
    batch = make_large_batch(8)
    data = encode(batch)
    source = CountingSource(data)
    step = StepFile.open(source, name="f")
    assert (step.num_rows, step.num_trajectories, step.info, step.group_size) == (8, 8, make_info(), 4)
    assert source.ranges == [(0, 16384)]


def test_a_header_that_is_longer_than_the_first_read_is_read_in_two() -> None:
    info = make_info(scheduler_state={"cache": "x" * 20_000})
    source = CountingSource(encode_step(make_batch(), info).to_bytes())
    step = StepFile.open(source, name="f")
    assert step.info == info
    assert next(stop - start for start, stop in source.ranges) == 16384
    assert source.ranges[1][0] == 16384
    assert step.load().is_identical(make_batch())


@pytest.mark.parametrize("position", range(8, 2000, 37))
def test_a_header_that_changed_since_it_was_read_is_not_taken_for_the_old_one(position: int) -> None:
    """Headers that were found sound are kept; what they are found again by is every byte of them."""
    data = bytearray(encode(make_rich_batch()))
    open_bytes(bytes(data), name="f")
    data[position] ^= 1
    with pytest.raises(CorruptRecordingError, match=r"^f: "):
        open_bytes(bytes(data), name="f")


def test_a_file_that_was_cut_since_its_header_was_read_is_refused() -> None:
    data = encode(make_rich_batch())
    open_bytes(data, name="f")
    with pytest.raises(CorruptRecordingError, match=r"^f: file has .* bytes; its header describes .*: truncated"):
        open_bytes(data[:-1], name="f")


@pytest.mark.parametrize("size", [1, 100_000])  # a header that is kept, and one that is too large for it
def test_what_is_changed_in_one_opened_step_is_not_seen_by_the_next(size: int) -> None:
    info = make_info(scheduler_state={"seen": [["x"] * size]})
    batch = replace(make_rich_batch(), meta={"names": ["a"]})
    data = encode_step(batch, info).to_bytes()
    first = open_bytes(data)
    first.info.scheduler_state["seen"].append("more")
    first.load().meta["names"].append("b")
    again = open_bytes(data)
    assert (again.info, again.load().meta) == (make_info(scheduler_state={"seen": [["x"] * size]}), {"names": ["a"]})


def test_a_json_column_that_is_no_text_is_refused() -> None:
    def change(document: dict[str, Any]) -> None:
        document["content"]["extras"]["seen"] = "json"

    with pytest.raises(CorruptRecordingError, match=r"tensor 'extras/seen' is bool \[.*\], which does not fit"):
        open_bytes(rewrite(encode(make_rich_batch()), change))


def test_every_range_of_rows_is_the_one_that_was_written() -> None:
    """Bool columns are bits: most of these ranges begin inside a byte."""
    batch = make_rich_batch(4, 2)
    step = open_bytes(encode(batch))
    for start, stop in itertools.combinations(range(len(batch) + 1), 2):
        part = step.load(range(start, stop))
        expected = batch.select(list(range(start, stop)))
        is_whole = start % 2 == 0 and stop % 2 == 0
        assert part.group_size == (2 if is_whole else None)
        rows = RolloutBatch.from_trajectories(part.rows(), sampling=SAMPLING, group_size=None, meta=batch.meta)
        assert rows.digest() == expected.digest()


@given(st.lists(st.integers(0, 8), max_size=4))
def test_any_split_joins_to_the_whole_batch(cuts: list[int]) -> None:
    batch = make_rich_batch(4, 2)
    step = open_bytes(encode(batch))
    bounds = [0, *sorted(cuts), len(batch)]
    parts = [step.load(range(a, b)) for a, b in itertools.pairwise(bounds)]
    rows = [row for part in parts for row in part.rows()]
    whole = RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=2, meta=batch.meta)
    assert whole.digest() == batch.digest()


def test_no_rows_are_an_empty_batch_with_the_same_extras() -> None:
    batch = make_rich_batch()
    part = open_bytes(encode(batch)).load(range(3, 3))
    assert (len(part), list(part.extras), part.meta) == (0, list(batch.extras), batch.meta)


def test_some_rows_read_their_own_blocks_and_no_others() -> None:
    batch = make_large_batch(64)  # tokens and logprobs take 8 blocks each
    data = encode(batch)
    header, tensors = split_header(data)
    data_start = len(data) - len(tensors)
    source = CountingSource(data)
    step = StepFile.open(source, name="f")
    del source.ranges[:]
    part = step.load(range(32, 40))
    assert part.tokens.tolist() == batch.tokens[32 * 2048 : 40 * 2048].tolist()
    big = {name: header[name]["data_offsets"] for name in ("tokens", "rollout_logprobs")}
    allowed = []
    for (start, stop), first, last in zip(
        big.values(), (32 * 2048 * 4, 32 * 2040 * 4), (40 * 2048 * 4, 40 * 2040 * 4), strict=True
    ):
        allowed.append((start + first // BLOCK * BLOCK, min(stop, start + -(-last // BLOCK) * BLOCK)))
    read = [(start - data_start, stop - data_start) for start, stop in source.ranges]
    for start, stop in big.values():
        for first, last in read:
            inside = (max(first, start), min(last, stop))
            assert inside[0] >= inside[1] or any(a <= inside[0] and inside[1] <= b for a, b in allowed)
    assert sum(stop - start for start, stop in read) < len(data) / 3
    assert step.num_bytes_read == data_start + sum(stop - start for start, stop in read)


def test_a_whole_load_is_one_read_after_the_header() -> None:
    """Each read of a remote file is a round trip."""
    source = CountingSource(encode(make_large_batch(8)))
    step = StepFile.open(source, name="f")
    step.load()
    assert len(source.ranges) == 2
    assert step.num_bytes_read == step.size_bytes


def test_reads_without_verification_are_exact() -> None:
    batch = make_large_batch(64)
    source = CountingSource(encode(batch))
    step = StepFile.open(source, name="f")
    del source.ranges[:]
    step.load(range(10, 11), verify=False)
    assert max(stop - start for start, stop in source.ranges) < 3 * 2048 * 4


def test_damage_outside_the_blocks_of_the_rows_does_not_hinder_them() -> None:
    batch = make_large_batch(64)
    data = bytearray(encode(batch))
    data[bytes(data).index(batch.tokens.numpy().tobytes()) + 60 * 2048 * 4] ^= 1
    step = open_bytes(bytes(data), name="f")
    assert len(step.load(range(8))) == 8
    for rows in (range(60, 61), range(56, 64), None):
        with pytest.raises(CorruptRecordingError, match=r"^f: tensor 'tokens' does not match its digest"):
            step.load(rows)
    with pytest.raises(CorruptRecordingError, match=r"^f: tensor 'tokens' does not match its digest"):
        step.verify()


def test_a_damaged_neighbour_that_decides_on_whole_groups_is_found() -> None:
    batch = make_rich_batch()
    data = bytearray(encode(batch))
    header, tensors = split_header(bytes(data))
    data[len(data) - len(tensors) + header["identities"]["data_offsets"][0]] ^= 1
    with pytest.raises(CorruptRecordingError, match="'identities' does not match"):
        open_bytes(bytes(data)).load(range(2, 4))


def test_trajectories_start_at_their_first_turns() -> None:
    step = open_bytes(encode(turns_batch()))
    assert (step.num_rows, step.num_trajectories) == (8, 4)
    assert step.trajectory_starts() == [0, 1, 4, 6]
    assert open_bytes(encode(make_batch())).trajectory_starts() == [0, 1, 2, 3]


def test_a_part_that_cuts_a_trajectory_has_no_group_size() -> None:
    step = open_bytes(encode(turns_batch()))
    assert step.load(range(4)).group_size == 2
    assert step.load(range(3)).group_size is None
    assert step.load(range(4, 8)).num_trajectories == 2


@pytest.mark.parametrize("rows", [range(0, 4, 2), range(-1, 2), range(2, 5), range(3, 2)])
def test_rows_that_are_no_contiguous_part_are_refused(rows: range) -> None:
    with pytest.raises(ValueError, match=r"here: range\(.*\) is no contiguous part of 4 rows"):
        open_bytes(encode(make_batch())).load(rows)


def test_equal_files_have_equal_digests_and_others_not() -> None:
    digests = [open_bytes(encode(make_batch(seed=seed))).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    assert encode_step(make_batch(), make_info()).digest == digests[0]


def test_the_kinds_of_extras_are_known_from_the_header() -> None:
    step = open_bytes(encode(make_rich_batch()))
    assert step.extra_kinds == {
        "experts": ["ragged", "int16", [3]],
        "flags": ["dense", "bool", [3]],
        "messages": ["json", "uint8", []],
        "score": ["dense", "float64", []],
        "seen": ["ragged", "bool", []],
    }
    assert (step.meta, step.sampling["temperature"]) == ({"global_step": 3, "names": ["a", None]}, 1.0)


def test_what_is_written_into_one_load_is_not_seen_by_the_file() -> None:
    """In memory two loads share the buffer; a file is mapped privately by each."""
    row = with_extras(make_row(), 0)
    batch = RolloutBatch.from_trajectories([row], sampling=SAMPLING, group_size=1)
    data = encode(batch)
    open_bytes(data).load().tokens.zero_()
    assert open_bytes(data).load().is_identical(batch)
