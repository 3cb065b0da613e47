from collections.abc import Mapping

import pytest

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


@pytest.mark.parametrize("values", [{"global_step": -1}, {"batch_size": 0}, {"mode": "test"}])
def test_a_request_that_makes_no_sense_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(SchedulerError, match="request: "):
        RolloutRequest(**{"global_step": 0, "batch_size": 1, **values})


@pytest.mark.parametrize(("index", "count"), [(-1, 2), (2, 2), (0, 0)])
def test_a_row_shard_beyond_its_count_is_refused(index: int, count: int) -> None:
    with pytest.raises(SchedulerError) as caught:
        RowShard(index=index, count=count)
    assert str(caught.value) == f"row shard: index {index} must be at least 0 and less than count {count}"
