"""The collectives of a step that goes on are on the disk, and say afterwards where its ranks parted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mock_scheduler.comparison.pairing.ledgers import find_broken_group
from mock_scheduler.trace.begun_calls import BegunCalls, BegunStep, load_begun_step
from mock_scheduler.trace.entries import LedgerCall
from mock_scheduler.verdict.wording.findings import describe_ledger

PAIR, ALL = (0, 1), (0, 1, 2)


def call(operation: str = "all_reduce", group: tuple[int, ...] = PAIR, num_elements: int = 8) -> LedgerCall:
    return LedgerCall(operation=operation, group=group, dtype="float32", num_elements=num_elements)


def write(folder: Path, rank: int, *calls: LedgerCall, step: int = 3) -> BegunCalls:
    begun = BegunCalls(folder, global_rank=rank, step=step)
    for item in calls:
        begun.add(item)
    return begun


def test_a_step_that_ended_leaves_nothing(tmp_path: Path) -> None:
    both = [write(tmp_path, rank, call()) for rank in (0, 1)]
    assert load_begun_step(tmp_path) == BegunStep(step=3, calls={0: (call(),), 1: (call(),)})
    for begun in both:
        begun.remove()
    assert list(tmp_path.iterdir()) == []
    assert load_begun_step(tmp_path) is None


def test_a_killed_rank_leaves_every_call_that_it_had_begun(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom tests.trace.test_begun_calls import call, write\n"
        "write(Path(sys.argv[1]), 0, call(), call('broadcast'))\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL
    assert load_begun_step(tmp_path) == BegunStep(step=3, calls={0: (call(), call("broadcast"))})


def test_the_next_step_begins_the_file_anew_and_the_first_one_that_did_not_end_is_read(tmp_path: Path) -> None:
    write(tmp_path, 0, call(), step=3).close()
    write(tmp_path, 0, call("broadcast"), step=4).close()
    write(tmp_path, 1, call("gather"), step=5).close()
    assert load_begun_step(tmp_path) == BegunStep(step=4, calls={0: (call("broadcast"),)})


@pytest.mark.parametrize(
    "content", [b"", b"three\n", b"3\n[1, 2]\n", b'3\n["all_reduce", [0], "float32", "many"]\n', b"3\n\xff\xfe\n"]
)
def test_a_file_that_is_none_of_these_is_not_read(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, 0, call()).close()
    (tmp_path / "collectives" / "1.jsonl").write_bytes(content)
    assert load_begun_step(tmp_path) is None


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, 0, call(), call()).close()
    path = tmp_path / "collectives" / "0.jsonl"
    os.truncate(path, path.stat().st_size - 4)
    assert load_begun_step(tmp_path) == BegunStep(step=3, calls={0: (call(),)})


def found_in(**calls: list[LedgerCall]) -> str:
    begun = BegunStep(step=3, calls={int(name[1:]): tuple(own) for name, own in calls.items()})
    found = find_broken_group(begun)
    return "" if found is None else describe_ledger(found)


def test_equal_calls_and_both_ends_of_a_message_are_no_difference() -> None:
    ends = [call("send", (0, 1))], [call("recv", (0, 1))]
    assert found_in(r0=[call(), *ends[0], call()], r1=[call(), *ends[1], call()]) == ""


def test_the_first_call_that_two_ranks_did_not_make_alike_is_named() -> None:
    left_out = found_in(r0=[call(num_elements=1), call("reduce_scatter"), call()], r1=[call(num_elements=1), call()])
    assert left_out == (
        "step 3: group [0, 1], collective 1 is reduce_scatter of 8 float32 over ranks 0, 1 in global rank 0, and "
        "all_reduce of 8 float32 over ranks 0, 1 in global rank 1"
    )
    other_size = found_in(r0=[call()], r1=[call(num_elements=9)])
    assert "all_reduce of 8 float32 over ranks 0, 1 in global rank 0, and all_reduce of 9 float32" in other_size


def test_a_call_that_only_one_rank_has_begun_is_named_where_no_two_differ() -> None:
    """A rank that another one ended was behind; that it had not begun a call says less than that it made another."""
    behind = [call(group=ALL), call()]
    assert found_in(r0=[*behind, call("broadcast")], r1=behind, r2=[call(group=ALL)]) == (
        "step 3: group [0, 1], collective 1 is broadcast of 8 float32 over ranks 0, 1 in global rank 0, and absent (1 "
        "in all) in global rank 1"
    )
    apart = found_in(r0=[call(group=ALL), call("broadcast")], r1=[call(group=ALL)], r2=[call("gather", ALL)])
    assert apart.startswith("step 3: group [0, 1, 2], collective 0 is all_reduce")
