import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.adapters.padded.segments import PATCHED, Rule, SegmentReader, TokenFields, write_segment
from mock_scheduler.errors import BatchError

MASK = np.array([False, False, True, True, False, True, True, True, False, True, True, True])
TOKENS = np.arange(100, 112, dtype=np.uint32)
LOGPROBS = np.where(MASK, np.arange(12) * 7919 % 1000, 0).astype(np.uint32)
IDS = TokenFields(mask=MASK, tokens=TOKENS, rollout_logprobs=None)
NUMBERS = TokenFields(mask=MASK, tokens=None, rollout_logprobs=LOGPROBS)
NOISE = np.array([5, 901, 33, 7, 1234, 2, 77, 4, 99, 13, 8, 60], dtype=np.uint32)
NO_VALUES = np.empty(0, dtype=np.uint8)


def lanes(values: object) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def patched(values: np.ndarray, position: int) -> np.ndarray:
    changed = values.copy()
    changed[position] = 4242
    return changed


@pytest.mark.parametrize(
    ("values", "fields", "program", "kept"),
    [
        ([], None, [], []),
        ([7] * 12, None, [Rule.CONSTANT], [7]),
        ([0] * 9 + [3, 0, 0], None, [Rule.CONSTANT + PATCHED, 1, 9], [0, 3]),
        ([0] * 11 + [3], None, [Rule.CONSTANT + PATCHED, 1, 11], [0, 3]),
        ([3] + [0] * 11, None, [Rule.CONSTANT + PATCHED, 1, 0], [0, 3]),
        (range(5, 17), None, [Rule.COUNTING], [5]),
        ([2**32 - 2, 2**32 - 1, 0, 1], None, [Rule.COUNTING], [2**32 - 2]),
        ([1] * 6 + [0] * 6, None, [Rule.RUNS, 2, 6, 6], [1, 0]),
        (TOKENS, IDS, [Rule.COUNTING], [100]),
        (
            [100, 101, 9],
            TokenFields(mask=MASK[:3], tokens=lanes([100, 101, 9]), rollout_logprobs=None),
            [Rule.TOKENS],
            [],
        ),
        (MASK.astype(int), IDS, [Rule.MASK], [0, 1]),
        (np.where(MASK, 1, 9), NUMBERS, [Rule.MASK], [9, 1]),
        (LOGPROBS, NUMBERS, [Rule.LOGPROBS], [0]),
        (np.where(MASK, LOGPROBS, 8), NUMBERS, [Rule.LOGPROBS], [8]),
        (patched(LOGPROBS, 4), NUMBERS, [Rule.LOGPROBS + PATCHED, 1, 4], [0, 4242]),
        (patched(LOGPROBS, 5), NUMBERS, [Rule.LOGPROBS + PATCHED, 1, 5], [0, 4242]),
        (NOISE, NUMBERS, [Rule.RAW], NOISE),
        (NOISE, None, [Rule.RAW], NOISE),
    ],
)
def test_each_stretch_is_written_by_the_shortest_rule(
    values: object, fields: TokenFields | None, program: list[int], kept: object
) -> None:
    stretch = lanes(values)
    found_program, found = write_segment(stretch, fields)
    assert found_program == program
    assert found.tolist() == lanes(kept).tolist()
    out = np.zeros_like(stretch)
    SegmentReader(found_program, found.view(np.uint8)).read_into(out, fields)
    assert out.tolist() == stretch.tolist()


def test_a_stretch_starts_at_its_own_tokens() -> None:
    tokens = lanes([5, 900, 17, 3, 88])
    fields = TokenFields(mask=np.zeros(5, dtype=bool), tokens=tokens, rollout_logprobs=None)
    program, values = write_segment(lanes([17, 3]), fields, 2)
    assert (program, values.tolist()) == ([Rule.TOKENS], [])
    out = lanes([0, 0])
    SegmentReader([Rule.TOKENS], NO_VALUES).read_into(out, fields, 2)
    assert out.tolist() == [17, 3]


@given(
    st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]),
    st.lists(st.lists(st.integers(0, 3) | st.integers(0, 2**64 - 1), max_size=30), max_size=4),
    st.lists(st.booleans(), min_size=120, max_size=120),
    st.booleans(),
)
def test_any_stretches_come_back_one_after_another(
    dtype: type[np.unsignedinteger], stretches: list[list[int]], mask: list[bool], is_float: bool
) -> None:
    parts = [np.array(stretch, dtype=np.uint64).astype(dtype) for stretch in stretches]
    whole = np.concatenate([np.zeros(120, dtype=dtype), *parts])[-120:]
    fields = TokenFields(
        mask=np.array(mask),
        tokens=None if is_float else whole,
        rollout_logprobs=np.where(np.array(mask), whole, 0).astype(dtype) if is_float else None,
    )
    written = [write_segment(part, fields, index) for index, part in enumerate(parts)]
    program = [integer for integers, _ in written for integer in integers]
    values = np.concatenate([np.empty(0, dtype), *(values for _, values in written)])
    reader = SegmentReader(program, values.view(np.uint8))
    for index, part in enumerate(parts):
        out = np.zeros_like(part)
        reader.read_into(out, fields, index)
        assert out.tolist() == part.tolist()
    assert reader.position == len(program)


def test_a_rule_without_its_field_is_refused() -> None:
    with pytest.raises(BatchError, match="padded batch: rule 3 stands where there is no such field"):
        SegmentReader([Rule.TOKENS], NO_VALUES).read_into(lanes([0, 0]), NUMBERS)
