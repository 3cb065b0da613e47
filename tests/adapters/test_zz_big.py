import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mock_scheduler.batch import RolloutBatch, SampleIdentity
from tests.adapters.padded_cases import REQUEST, Case, assert_same, cases, codec


def copy_of(native: dict[str, object]) -> dict[str, object]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in native.items()}


def rows_of(native: dict[str, object], rows: list[int]) -> dict[str, object]:
    chosen: dict[str, object] = {}
    for name, value in native.items():
        if name == "meta_info":
            chosen[name] = value
        else:
            chosen[name] = [value[row] for row in rows] if isinstance(value, list) else value[rows]
    return chosen


@settings(max_examples=4000, deadline=None)
@given(cases)
def test_any_padded_batch_comes_back_to_the_bit(case: Case) -> None:
    before = copy_of(case.native)
    batch = codec(case.layout).encode(case.native, REQUEST)
    assert_same(codec(case.layout).decode(batch), before)
    assert_same(case.native, before)


@settings(max_examples=600, deadline=None)
@given(cases, st.integers(0, 3), st.integers(1, 4))
def test_part_of_the_rows_comes_back_to_the_bit(case: Case, start: int, stop: int) -> None:
    rows = list(range(min(start, case.num_rows), min(stop, case.num_rows)))
    batch = codec(case.layout).encode(case.native, REQUEST)
    if rows:
        assert_same(codec(case.layout).decode(batch.select(rows)), rows_of(case.native, rows))
        parts = [batch.select([row]) for row in range(len(batch))]
        assert_same(codec(case.layout).decode(RolloutBatch.concat(parts[::-1])), case.native)


@settings(max_examples=600, deadline=None)
@given(cases, st.randoms(use_true_random=False))
def test_rows_in_any_order_come_back_in_that_order(case: Case, shuffler: random.Random) -> None:
    numbers = list(range(case.num_rows))
    shuffler.shuffle(numbers)

    def identify(native: object, row: int) -> SampleIdentity:
        return SampleIdentity(scheduler_id="x", group_id=numbers[row], episode_id=0, env_id=0, turn=0)

    batch = codec(case.layout, group_ids=identify).encode(case.native, REQUEST)
    assert [identity.group_id for identity in batch.identities] == sorted(numbers)
    assert_same(codec(case.layout).decode(batch), case.native)


@settings(max_examples=600, deadline=None)
@given(cases)
def test_a_row_is_written_alike_whatever_batch_it_is_in(case: Case) -> None:
    whole = codec(case.layout).encode(case.native, REQUEST)
    for row in range(case.num_rows):
        alone = codec(case.layout).encode(rows_of(case.native, [row]), REQUEST)
        for name, column in whole.extras.items():
            if not name.startswith("identity/"):
                assert column.select([row]).digest() == alone.extras[name].digest(), name
        assert alone.meta == {**whole.meta, "padded": alone.meta["padded"]}
        assert alone.meta["padded"] == whole.meta["padded"]
