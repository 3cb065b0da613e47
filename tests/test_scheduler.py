from collections.abc import Mapping

import numpy as np
import pytest
import torch

from mock_scheduler.errors import SchedulerError
from mock_scheduler.scheduler import RolloutRequest, RowShard, scheduler_methods

ALL = ("get_batch", "suspend", "resume", "update_weights", "collect_metrics", "state_dict", "load_state_dict", "close")


class Partial:
    def __init__(self) -> None:
        self.closed = 0

    def get_batch(self, request: RolloutRequest) -> str:
        return f"batch {request.global_step}"

    def close(self) -> None:
        self.closed += 1

    def collect_metrics(self) -> Mapping[str, float]:
        return {"m": 1.0}


def test_what_a_scheduler_has_is_called_and_what_it_lacks_is_made_up_for() -> None:
    real = Partial()
    methods = scheduler_methods(real)
    assert sorted(methods.own) == ["close", "collect_metrics", "get_batch"]
    assert sorted([*methods.own, *methods.substitutes]) == sorted(ALL)
    methods["close"]()
    assert real.closed == 1
    assert methods["get_batch"](RolloutRequest(global_step=3, batch_size=1)) == "batch 3"
    assert methods["collect_metrics"]() == {"m": 1.0}
    assert methods["state_dict"]() == {}
    assert [methods["suspend"](), methods["resume"](), methods["update_weights"](1)] == [None, None, None]


def test_a_state_is_not_lost_by_a_scheduler_that_cannot_load_it() -> None:
    load = scheduler_methods(Partial())["load_state_dict"]
    assert load({}) is None
    with pytest.raises(SchedulerError) as caught:
        load({"cursor": 1})
    assert str(caught.value) == (
        "Partial has no load_state_dict, but the checkpoint holds its state ['cursor']: it would be lost"
    )


def test_an_object_without_get_batch_is_no_scheduler() -> None:
    with pytest.raises(SchedulerError) as caught:
        scheduler_methods(3)
    assert str(caught.value) == "int is no rollout scheduler: it has no method get_batch(request)"


WHOLE = "expected a whole number of at least"
DIGESTS = "expected SHA-256 digests as in RolloutBatch.prompt_digests: 64 of 0-9 and a-f each"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"global_step": -1}, f"global_step is -1; {WHOLE} 0"),
        ({"global_step": True}, f"global_step is True; {WHOLE} 0"),
        ({"global_step": "0"}, f"global_step is '0'; {WHOLE} 0"),
        ({"global_step": None}, f"global_step is None; {WHOLE} 0"),
        ({"global_step": torch.tensor(True)}, f"global_step is tensor(True); {WHOLE} 0"),
        ({"batch_size": 0}, f"batch_size is 0; {WHOLE} 1"),
        ({"batch_size": 8.0}, f"batch_size is 8.0; {WHOLE} 1"),
        ({"batch_size": np.float64(8)}, f"batch_size is np.float64(8.0); {WHOLE} 1"),
        ({"group_size": 4.0}, f"group_size is 4.0; {WHOLE} 1"),
        ({"group_size": 0}, f"group_size is 0; {WHOLE} 1"),
        ({"policy_version": 1.5}, f"policy_version is 1.5; {WHOLE} 0"),
        ({"policy_version": True}, f"policy_version is True; {WHOLE} 0"),
        ({"policy_version": "x"}, f"policy_version is 'x'; {WHOLE} 0"),
        ({"policy_version": -1}, f"policy_version is -1; {WHOLE} 0"),
        ({"mode": "test"}, "mode is 'test'; expected 'train' or 'val'"),
        ({"mode": []}, "mode is []; expected 'train' or 'val'"),
        ({"scheduler_id": 3}, "scheduler_id is 3; expected a text such as 'math'"),
        ({"data_cursor": float("nan")}, "data_cursor is nan; JSON has no NaN and no infinity"),
        ({"data_cursor": {"a": (1,)}}, "data_cursor.a is a tuple, which would come back as a list; make it one"),
        ({"prompt_digests": "ab"}, f"prompt_digests is 'ab'; expected a tuple; {DIGESTS}"),
        ({"prompt_digests": ("a" * 64, 3, "x")}, f"prompt_digests[1] is 3 (and 1 more); {DIGESTS}"),
        (
            {"batch_size": 0, "mode": "test"},
            f"batch_size is 0; {WHOLE} 1; mode is 'test'; expected 'train' or 'val'",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(values: dict[str, object], problem: str) -> None:
    with pytest.raises(SchedulerError) as caught:
        RolloutRequest(**{"global_step": 0, "batch_size": 1, **values})
    assert str(caught.value) == f"request: {problem}"


@pytest.mark.parametrize("number", [3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int16)])
def test_whole_numbers_of_every_kind_are_held_as_ints(number: object) -> None:
    asked = RolloutRequest(global_step=number, batch_size=number, policy_version=number, group_size=number)
    values = (asked.global_step, asked.batch_size, asked.policy_version, asked.group_size)
    assert [(type(value), value) for value in values] == [(int, 3)] * 4
    assert asked == RolloutRequest(global_step=3, batch_size=3, policy_version=3, group_size=3)
    assert RowShard(index=number, count=np.int64(4)) == RowShard(index=3, count=4)


def test_a_list_of_digests_is_held_as_a_tuple() -> None:
    asked = RolloutRequest(global_step=0, batch_size=1, prompt_digests=["a" * 64])  # type: ignore[arg-type]
    assert asked.prompt_digests == ("a" * 64,)


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_row_shard_beyond_its_count_is_refused(index: int, count: int) -> None:
    with pytest.raises(SchedulerError) as caught:
        RowShard(index=index, count=count)
    assert str(caught.value) == f"row shard: index {index} must be at least 0 and less than count {count}"
