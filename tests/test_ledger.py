import json
import threading
from pathlib import Path

import pytest

from mock_scheduler.errors import SchedulerError
from mock_scheduler.ledger import Ledger


def test_a_mock_run_shows_what_was_not_built_and_what_was_answered() -> None:
    ledger = Ledger()
    ledger.count("answered", "get_batch", 3)
    ledger.count("suppressed", "suspend")
    ledger.count("suppressed", "resume", 2)
    assert ledger.render() == (
        "Ledger\n"
        "  engines built: 0\n"
        "  environments built: 0\n"
        "  schedulers built: 0\n"
        "  calls to the real scheduler: none\n"
        "  calls answered from the recording: get_batch 3\n"
        "  calls suppressed: resume 2, suspend 1\n"
        "  recording: none"
    )


def test_what_is_built_is_counted_where_it_is_built() -> None:
    ledger = Ledger()
    ledger.count("built", "environment", 8)
    ledger.count("built", "environment")
    assert ledger.as_dict()["built"] == {"engine": 0, "environment": 9, "scheduler": 0}
    assert "  environments built: 9\n" in ledger.render()


def test_saved_ledger_holds_all_counts(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.count("called", "get_batch")
    ledger.save(tmp_path / "ledger.json")
    assert json.loads((tmp_path / "ledger.json").read_text()) == {
        "built": {"engine": 0, "environment": 0, "scheduler": 0},
        "called": {"get_batch": 1},
        "answered": {},
        "suppressed": {},
        "recording": {},
    }


def test_what_was_done_with_the_recording_is_shown() -> None:
    ledger = Ledger()
    ledger.count("recording", "recorded_steps", 2)
    ledger.count("recording", "recorded_bytes", 4096)
    assert ledger.render().splitlines()[-1] == "  recording: recorded_bytes 4096, recorded_steps 2"


def test_no_count_is_lost_between_threads() -> None:
    ledger = Ledger()

    def count() -> None:
        for _ in range(2000):
            ledger.count("recording", "recorded_steps")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.as_dict()["recording"] == {"recorded_steps": 8000}


def test_a_copy_of_the_counts_does_not_change_them() -> None:
    ledger = Ledger()
    ledger.as_dict()["built"]["engine"] = 5
    assert ledger.as_dict()["built"]["engine"] == 0


def test_unknown_categories_and_negative_counts_are_refused() -> None:
    with pytest.raises(SchedulerError) as caught:
        Ledger().count("ignored", "get_batch")
    assert (
        str(caught.value) == "ledger: unknown category 'ignored'; known: built, called, answered, suppressed, recording"
    )
    with pytest.raises(SchedulerError, match="built engine cannot be counted -1 times"):
        Ledger().count("built", "engine", -1)
