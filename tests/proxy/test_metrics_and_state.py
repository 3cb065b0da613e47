"""What a real scheduler tells of itself is read alike in every mode; nonsense is named with class, method and step."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mock_scheduler.errors import SchedulerError
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.reading.reader import RecordingReader
from tests.proxy.players import AsyncPlayer, Player, config, request
from tests.recording.builders import make_contract


def teller(*, metrics: object = None, state: object = None) -> type:
    class Teller(Player):
        def collect_metrics(self) -> object:  # type: ignore[override]
            return metrics

        def state_dict(self) -> object:  # type: ignore[override]
            return state

    return Teller


def build(tmp_path: Path, mode: str, make_real: type) -> ProxyScheduler:
    settings: object = {"enable": False} if mode == "real" else config(tmp_path, mode)
    return build_scheduler(settings, make_real, make_contract())


def ask_all(scheduler: ProxyScheduler) -> None:
    with scheduler:
        scheduler.get_batch(request(0))
        scheduler.collect_metrics()
        scheduler.state_dict()


@pytest.mark.parametrize("mode", ["real", "dump"])
def test_a_scheduler_that_returns_nothing_has_nothing_to_tell(tmp_path: Path, mode: str) -> None:
    with build(tmp_path, mode, teller()) as scheduler:
        scheduler.get_batch(request(0))
        assert scheduler.collect_metrics() == {}
        assert scheduler.state_dict()["scheduler"] == {}
    if mode == "dump":
        info = RecordingReader(str(tmp_path / "x")).load_step(request(0)).info
        assert (info.metrics, info.scheduler_state) == ({}, {})


@pytest.mark.parametrize("mode", ["real", "dump"])
def test_scalars_of_every_kind_are_numbers(tmp_path: Path, mode: str) -> None:
    values = {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": np.array([3])[0]}
    with build(tmp_path, mode, teller(metrics=values)) as scheduler:
        scheduler.get_batch(request(0))
        assert scheduler.collect_metrics() == {"a": 1.0, "b": 0.5, "c": 2.0, "d": 3.0}


@pytest.mark.parametrize("mode", ["real", "dump"])
@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"metrics": [1]}, "Teller.collect_metrics returned [1]; expected a dict of names and numbers, or None"),
        (
            {"metrics": {"a": "1.5", 3: 1.0, "b": torch.zeros(2), "c": 1.0}},
            "Teller.collect_metrics gave what is no number: 'a' is '1.5'; key 3 is no text; 'b' is tensor([0., 0.]); "
            "expected a dict of names and numbers",
        ),
        (
            {"state": [1]},
            "Teller.state_dict returned [1]; expected a dict of what a checkpoint must keep, as JSON, or None",
        ),
        ({"state": {1: 2}}, "Teller.state_dict: key 1 is no text"),
    ],
)
def test_what_is_no_metric_and_no_state_is_named(
    tmp_path: Path, mode: str, told: dict[str, object], problem: str
) -> None:
    with pytest.raises(SchedulerError) as caught:
        ask_all(build(tmp_path, mode, teller(**told)))
    assert str(caught.value) == f"train step 0: {problem}"


def test_an_asynchronous_scheduler_is_read_alike(tmp_path: Path) -> None:
    class Teller(AsyncPlayer):
        async def state_dict(self) -> object:
            return [1]

    with pytest.raises(SchedulerError) as caught:
        ask_all(build(tmp_path, "dump", Teller))
    assert str(caught.value) == (
        "train step 0: Teller.state_dict returned [1]; expected a dict of what a checkpoint must keep, as JSON, or None"
    )


def test_a_batch_is_not_lost_to_a_scheduler_that_tells_nonsense_once(tmp_path: Path) -> None:
    answers: list[Callable[[], object]] = [lambda: [1], lambda: {"a": 2}]

    class Once(Player):
        def collect_metrics(self) -> object:  # type: ignore[override]
            return answers.pop(0)()

    with build(tmp_path, "dump", Once) as scheduler:
        with pytest.raises(SchedulerError, match=r"Once\.collect_metrics returned"):
            scheduler.get_batch(request(0))
        scheduler.get_batch(request(0))
        assert scheduler.collect_metrics() == {"a": 2.0}
        assert scheduler.ledger.as_dict()["called"]["get_batch"] == 1
