"""Runs as jobs of a cluster: whatever becomes of driver and node, a run is made once, and what is lost is named."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from mock_scheduler.alignment.executors.jobs import choose_environment
from mock_scheduler.alignment.executors.protocol import ClusterError, JobState, Submission
from mock_scheduler.config.executor import RayExecutorConfig
from mock_scheduler.launch.job import Job, JobEnd, JobRecord, load_end, load_record, run_job
from mock_scheduler.support.digests import compute_json_digest
from mock_scheduler.support.local_key import mark_own
from tests.alignment.executors.process_cluster import ROOT, ProcessCluster, build_launch, plan_run


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """A job sets what decides bits, and unsets the rest, for its process."""
    with patch.dict(os.environ):
        yield


END = JobEnd(exit_code=0, elapsed_s=7.5, node="n", hardware={"processor": "p"})


@dataclass(kw_only=True)
class Told:
    """A cluster without processes. ends: of each job in turn, an end to write or a state."""

    ends: list[JobEnd | JobState]
    name: str = "told"
    jobs: dict[str, Submission] = field(default_factory=dict)
    states: dict[str, JobState] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    num_silent: int = 0

    def submit(self, job: Submission) -> str:
        job_id = str(len(self.jobs) + 1)
        self.jobs[job_id] = job
        end = self.ends.pop(0)
        if isinstance(end, JobEnd):
            (job.log_dir / f"end-{job.token}.json").write_text(end.model_dump_json())
            end = JobState(phase="lost", detail="COMPLETED")
        self.states[job_id] = end
        return job_id

    def find(self, token: str, log_dir: Path) -> str | None:
        return next((job_id for job_id, job in self.jobs.items() if job.token == token), None)

    def read_state(self, job_id: str) -> JobState:
        if self.num_silent:
            self.num_silent -= 1
            raise ClusterError("no route to host")
        return self.states[job_id]

    def cancel(self, job_id: str) -> None:
        self.cancelled.append(job_id)
        self.states[job_id] = JobState(phase="ended", detail="CANCELLED")

    def find_log(self, job_id: str, log_dir: Path) -> tuple[str, str]:
        return "/logs/of/the/job", "a line\nthe last line"


LOST = JobState(phase="lost", detail="NODE_FAIL")
RUNS = JobState(phase="running", detail="RUNNING")


def test_a_run_takes_the_seconds_of_its_job_and_its_exit_code(tmp_path: Path) -> None:
    run, said = plan_run(tmp_path), []
    launch = build_launch(Told(ends=[END]), said)
    assert launch.take_up(run, "key") == ""
    assert launch(run) == 0
    assert launch.elapsed_s(run) == 7.5
    assert said == []
    # A driver that was killed before it took the end leaves it to the next one; once taken, files decide.
    assert build_launch(Told(ends=[]), said).take_up(run, "key") == "its job 1 of told has ended meanwhile"
    launch.settle(run)
    assert build_launch(Told(ends=[]), said).take_up(run, "key") == ""


def test_a_job_says_what_its_run_is_and_holds_no_variable_that_is_no_setting(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[END])
    launch = build_launch(cluster, [])
    launch.environ = {"OMP_NUM_THREADS": "3", "AWS_SECRET_ACCESS_KEY": "s3cret", "NCCL_UNKNOWN": "s3cret"}
    launch(run)
    (submitted,) = cluster.jobs.values()
    job = Job.model_validate_json(submitted.text)
    assert "s3cret" not in submitted.text
    assert (job.entry, job.overrides, job.output_dir) == ("quick_run", run.overrides, str(tmp_path / "run"))
    assert job.settings["OMP_NUM_THREADS"] == "3"
    assert job.settings["CUBLAS_WORKSPACE_CONFIG"] is None
    assert submitted.num_processes == 1


def test_a_lost_job_is_submitted_again_and_its_run_ends(tmp_path: Path) -> None:
    run, said, cluster = plan_run(tmp_path), [], Told(ends=[LOST, END])
    assert build_launch(cluster, said)(run) == 0
    assert said == ["its job 1 of told was lost (NODE_FAIL); attempt 2"]
    assert len({job.token for job in cluster.jobs.values()}) == 2


def test_a_job_that_is_always_lost_is_named_with_its_log(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[LOST, LOST, LOST])
    assert build_launch(cluster, [], retries=1)(run) == 70
    assert len(cluster.jobs) == 2
    stated = json.loads((run.output_dir / "error.json").read_text())
    assert stated["type"] == "JobLost"
    assert stated["message"] == (
        "its job 2 of told was lost before its run had ended, at the last of 2 attempts (align.executor.retries is 1): "
        "NODE_FAIL; NODE_FAIL\nits log is /logs/of/the/job; the last lines:\na line\nthe last line"
    )


def test_what_another_attempt_would_meet_again_is_not_tried_again(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[JobState(phase="ended", detail="TIMEOUT")])
    assert build_launch(cluster, [])(run) == 70
    assert "was ended before its run had: TIMEOUT" in json.loads((run.output_dir / "error.json").read_text())["message"]


def test_a_job_that_waited_too_long_for_room_counts_as_no_attempt(tmp_path: Path) -> None:
    unplaced = JobState(phase="unplaced", detail="FAILED: Job supervisor actor failed to start within 900 seconds")
    run, cluster = plan_run(tmp_path), Told(ends=[unplaced, unplaced, END])
    assert build_launch(cluster, [], retries=0)(run) == 0
    assert len(cluster.jobs) == 3


def test_a_cluster_that_does_not_answer_for_a_while_loses_no_job(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[LOST, END], num_silent=3)
    assert build_launch(cluster, [])(run) == 0
    assert cluster.num_silent == 0


def test_what_ended_while_no_driver_was_there_is_not_made_again_even_where_it_failed(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[RUNS])
    first = build_launch(cluster, [])
    first.take_up(run, "key")
    first._submit(run, lost=())  # and the driver is gone
    record = load_record(run.output_dir)
    assert record is not None
    failed = END.model_copy(update={"exit_code": 3})
    (run.output_dir / "job" / f"end-{record.token}.json").write_text(failed.model_dump_json())
    second = build_launch(cluster, [])
    assert second.take_up(run, "key") == "its job 1 of told has ended meanwhile"
    assert second(run) == 3
    second.settle(run)
    # The next command repeats a failed run, as it does with one of this machine.
    assert build_launch(cluster, []).take_up(run, "key") == ""
    assert len(cluster.jobs) == 1


def test_the_job_of_another_run_in_the_folder_is_cancelled(tmp_path: Path) -> None:
    run, cluster, said = plan_run(tmp_path), Told(ends=[RUNS]), []
    first = build_launch(cluster, [])
    first.take_up(run, "with another learning rate")
    first._submit(run, lost=())
    assert build_launch(cluster, said).take_up(run, "key") == ""
    assert (cluster.cancelled, said) == (["1"], ["its job 1 of told is cancelled"])


def test_before_a_folder_is_emptied_its_jobs_are_cancelled(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[RUNS])
    first = build_launch(cluster, [])
    first._submit(run, lost=())
    build_launch(cluster, []).end_earlier(tmp_path)
    assert cluster.cancelled == ["1"]


def test_a_driver_that_was_killed_as_it_submitted_left_a_job_that_is_found(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[RUNS])
    first = build_launch(cluster, [])
    first.take_up(run, "key")
    record = first._submit(run, lost=())
    path = run.output_dir / "job" / "job.json"
    path.write_text(record.model_copy(update={"job_id": None}).model_dump_json())
    mark_own(path)
    assert '"job_id":null' in path.read_text()
    assert build_launch(cluster, []).take_up(run, "key") == "its job 1 of told goes on"


def test_a_record_of_somebody_else_leads_to_no_job(tmp_path: Path) -> None:
    run, cluster = plan_run(tmp_path), Told(ends=[RUNS, END])
    first = build_launch(cluster, [])
    first.take_up(run, "key")
    record = first._submit(run, lost=())
    path = run.output_dir / "job" / "job.json"
    path.write_text(record.model_copy(update={"key": "another"}).model_dump_json())
    assert build_launch(cluster, []).take_up(run, "key") == ""
    assert cluster.cancelled == []


def test_threads_are_the_jobs_own_where_nobody_chose(tmp_path: Path) -> None:
    config = RayExecutorConfig(kind="ray", cpus_per_process=4)
    assert choose_environment(config, {"A": "1"}) == {"OMP_NUM_THREADS": "4", "A": "1"}
    assert choose_environment(config, {"OMP_NUM_THREADS": "2"}) == {"OMP_NUM_THREADS": "2"}


def make_job(run_dir: Path, token: str) -> Job:
    return Job(
        token=token,
        config_name="quickstart",
        config_path=str(ROOT / "configs"),
        overrides=("no_such_key=1",),
        entry="quick_run",
        python=sys.executable,
        env={},
        settings={},
        output_dir=str(run_dir),
        clears=(),
        working_dir=str(ROOT),
        sources=(),
        code=compute_json_digest({}),
    )


def write_record(run_dir: Path, token: str) -> None:
    (run_dir / "job").mkdir(parents=True, exist_ok=True)
    record = JobRecord(executor="told", key="key", token=token, job_id="1")
    (run_dir / "job" / "job.json").write_text(record.model_dump_json())


def test_a_job_does_nothing_where_another_attempt_has_taken_its_place(tmp_path: Path) -> None:
    write_record(tmp_path, "22")
    assert run_job(make_job(tmp_path, "11")) == 0
    assert load_end(tmp_path, "11") is None


def test_a_job_that_is_started_again_after_its_end_does_nothing(tmp_path: Path) -> None:
    write_record(tmp_path, "11")
    (tmp_path / "job" / "end-11.json").write_text(END.model_copy(update={"exit_code": 4}).model_dump_json())
    (tmp_path / "metrics.jsonl").write_text("kept")
    assert run_job(make_job(tmp_path, "11")) == 4
    assert (tmp_path / "metrics.jsonl").read_text() == "kept"


def test_a_configuration_that_does_not_load_on_the_node_is_the_runs_error(tmp_path: Path) -> None:
    """And what an earlier start of the job left is gone, but for its log."""
    write_record(tmp_path, "11")
    (tmp_path / "metrics.jsonl").write_text("of the first start")
    (tmp_path / "run.log").write_text("a line\n")
    assert run_job(make_job(tmp_path, "11")) == 5
    end = load_end(tmp_path, "11")
    assert end is not None
    assert end.exit_code == 5
    assert "no_such_key" in json.loads((tmp_path / "error.json").read_text())["message"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error.json", "job", "run.log"]


# With processes: a driver and its jobs.


def start_driver(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.alignment.executors.process_cluster", str(folder), *options],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(folder / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(is_so: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends_s, "it did not come about within a minute"
        time.sleep(0.02)


@pytest.fixture
def going(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a driver whose run goes on; ends all that it started, whatever happens."""

    def start(*options: str) -> subprocess.Popen[str]:
        driver = start_driver(tmp_path, *options)
        wait_for(lambda: (tmp_path / "started").is_file() or driver.poll() is not None)
        return driver

    yield start
    (tmp_path / "go").write_text("0")
    for path in tmp_path.glob("run/job/*.pid"):
        wait_for(lambda path=path: ProcessCluster().read_state(path.read_text()).is_over)


def test_a_killed_driver_leaves_a_job_that_the_next_one_waits_for(
    tmp_path: Path, going: Callable[..., subprocess.Popen[str]]
) -> None:
    driver = going()
    driver.kill()
    driver.communicate()
    second = start_driver(tmp_path)
    time.sleep(0.5)
    (tmp_path / "go").write_text("0")
    output, _ = second.communicate(timeout=60)
    assert "exit code 0" in output
    assert (tmp_path / "started").read_text() == "started\n"
    record = load_record(tmp_path / "run")
    assert record is not None
    assert record.attempt == 1


@pytest.mark.parametrize(("choice", "says"), [("cancel", "is cancelled"), ("leave", "goes on; the same command")])
def test_an_interrupted_driver_cancels_its_job_or_leaves_it(
    tmp_path: Path, going: Callable[..., subprocess.Popen[str]], choice: str, says: str
) -> None:
    driver = going(f"on_interrupt={choice}")
    job_id = next(tmp_path.glob("run/job/*.pid")).read_text()
    driver.send_signal(signal.SIGINT)
    output, _ = driver.communicate(timeout=60)
    assert says in output
    assert ProcessCluster().read_state(job_id).is_over == (choice == "cancel")
    assert not list(tmp_path.glob("run/job/end-*"))
