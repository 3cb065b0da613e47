"""Agreement across ranks: every rank learns who differs, at a cost that does not grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.agreement import Traffic, all_reduce, measure_simulated, planted, simulate
from mock_scheduler.determinism.agreement import TorchRankGroup, check_agreement
from mock_scheduler.determinism.agreement_rounds import MAX_KEY_ROUNDS, Op
from tests.programs import run_ranks

DIFFERENCE = (
    "the 2 ranks of this run differ:\n"
    "  - NCCL_ALGO: rank 0 'Ring'; rank 1 'Träe'\n"
    "  - NCCL_PROTO: rank 0 absent; rank 1 'LL'\n"
    "Start all ranks through launch/train.sh or launch/multi_node.sh with one configuration."
)
RING, TREE = {"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}


def lines_of(*values: Mapping[str, str]) -> list[str]:
    return simulate(values)[0]


def test_two_processes_agree_or_both_name_the_difference(tmp_path: Path) -> None:
    done = run_ranks(2, "tests.determinism.agreement_worker", (str(tmp_path),), told_to=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / f"rank{global_rank}").read_text(encoding="utf-8") for global_rank in range(2)] == [
        DIFFERENCE
    ] * 2


def test_one_process_agrees_with_itself() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = TorchRankGroup(torch.device("cpu"))
        check_agreement({"NCCL_ALGO": "Ring"}, group)
        assert group.gather(b"x\x00") == [b"x\x00"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("odd_ranks", "line"),
    [
        ([3], "rank 3 'Tree'; 7 other ranks (first rank 0) 'Ring'"),
        ([0], "rank 0 'Tree'; ranks 1-7 'Ring'"),
        ([3, 5], "ranks 3,5 'Tree'; 6 other ranks (first rank 0) 'Ring'"),
        ([4, 5, 6, 7], "ranks 0-3 'Ring'; ranks 4-7 'Tree'"),
        ([1, 2, 6], "3 ranks (first rank 1, last rank 6) 'Tree'; 5 other ranks (first rank 0) 'Ring'"),
    ],
)
def test_ranks_are_named_exactly_where_first_last_and_number_tell_them(odd_ranks: list[int], line: str) -> None:
    assert lines_of(*(TREE if global_rank in odd_ranks else RING for global_rank in range(8))) == [f"NCCL_ALGO: {line}"]


def test_all_keys_that_differ_are_listed_and_no_others() -> None:
    common = {"same": "1", "also": "2"}
    assert lines_of({**common, "a": "x", "b": "y"}, {**common, "a": "z", "c": "y"}, {**common, "a": "x"}) == [
        "a: rank 1 'z'; ranks 0,2 'x'",
        "b: rank 0 'y'; ranks 1-2 absent",
        "c: rank 1 'y'; ranks 0,2 absent",
    ]


def test_more_than_four_values_of_a_key_are_counted() -> None:
    assert lines_of(*({"key": str(min(global_rank, 6))} for global_rank in range(12))) == [
        "key: rank 0 '0'; rank 1 '1'; rank 2 '2'; rank 3 '3'; and 8 ranks with other values (first rank 4)"
    ]


def test_ranks_with_keys_beyond_those_heard_are_counted() -> None:
    lines = lines_of(*({f"key{global_rank:02}": "1"} for global_rank in range(MAX_KEY_ROUNDS + 3)))
    assert lines[0] == "key00: rank 0 '1'; ranks 1-10 absent"
    assert lines[-2:] == [
        "key07: rank 7 '1'; 10 other ranks (first rank 0) absent",
        "and 3 ranks have keys that are not listed here",
    ]


def test_a_word_absent_is_not_an_absent_key() -> None:
    assert lines_of({"key": "absent"}, {}) == ["key: rank 0 'absent'; rank 1 absent"]


def test_a_long_value_is_cut_and_still_told_apart() -> None:
    (line,) = lines_of({"key": "é" * 1000 + "a"}, {"key": "é" * 1000 + "b"})
    shown = "'" + "é" * 239 + "… (1003 characters)"
    assert line == f"key: rank 0 {shown}; rank 1 {shown}"


def test_no_values_at_all_agree() -> None:
    assert lines_of({}, {}, {}) == []


def expected_keys(values: Sequence[Mapping[str, str]]) -> list[str]:
    keys = sorted(set().union(*values))
    return [key for key in keys if len({own.get(key) for own in values}) > 1]


@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["", "x", "absent", "\x00", "é"])),
        min_size=1,
        max_size=9,
    )
)
def test_exactly_the_keys_that_differ_are_named(values: list[dict[str, str]]) -> None:
    """``simulate`` also fails where ranks ask for different reductions, which in a real run is a hang."""
    if len(values) <= MAX_KEY_ROUNDS:
        assert [line.split(":")[0] for line in lines_of(*values)] == expected_keys(values)


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), min_size=2, max_size=2), min_size=1, max_size=19))
def test_the_simulated_all_reduce_gives_every_rank_the_same_minimum(rows: list[list[int]]) -> None:
    words = np.array(rows, dtype=np.int64)
    reduced = all_reduce(words, Op.MIN, Traffic.of(len(rows)))
    assert (reduced == words.min(axis=0)).all()
    small = words >> 8
    assert (all_reduce(small, Op.SUM, Traffic.of(len(rows))) == small.sum(axis=0)).all()


def test_one_of_4096_ranks_is_named() -> None:
    values = {**RING, "NCCL_PROTO": "Simple"}
    by_rank, global_rank = planted(values, 4096)
    assert global_rank == 2777
    assert lines_of(*by_rank) == ["NCCL_ALGO: rank 2777 'Tree'; 4095 other ranks (first rank 0) 'Ring'"]


def test_what_a_rank_sends_does_not_grow_with_the_number_of_ranks() -> None:
    """It gathered every rank's values where they differed: 22 MB received per rank of 4096.

    A message more per doubling is what any all-reduce has; the number of reductions and the bytes of a message stay.
    """
    values = {f"setting{number}": "value" for number in range(6)} | RING
    costs = [measure_simulated(values, world_size) for world_size in (8, 64, 4096)]
    for case, num_reductions in ((0, 1), (1, 16)):
        measured = [cost[case] for cost in costs]
        assert [cost.is_agreeing for cost in measured] == [case == 0] * 3
        assert [cost.num_reductions for cost in measured] == [num_reductions] * 3
        steps = [3, 6, 12]
        assert [cost.messages for cost in measured] == [num_reductions * step for step in steps]
        assert len({cost.sent_bytes / step for cost, step in zip(measured, steps, strict=True)}) == 1
    assert [cost[0].sent_bytes for cost in costs] == [64 * step for step in (3, 6, 12)]
