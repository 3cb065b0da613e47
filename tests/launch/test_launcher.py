"""Launch plans: command, environment and processes; carrying one out: exit codes, logs, and ending the child."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.launch.launcher import LaunchPlan, child_environment, plan_launch, run_plan
from mock_scheduler.launch.ranks import Place
from mock_scheduler.launch.supervision import report_failed_ranks
from mock_scheduler.support.processes import RankExit, find_culprit
from pipelines.config.schema import PipelineConfig

SOURCE = ("--config-path", "configs", "--config-name", "run", "seed=1")


def build_config(*, tp: int = 1, dp: int = 1, envs: dict[str, str] | None = None) -> PipelineConfig:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, data_parallel_size=dp)
    return PipelineConfig(exp_name="x", output_dir="out", parallel=parallel, system_envs=envs or {})


def build_plan(
    config: PipelineConfig, *, nnodes: int = 1, node_rank: int = 0, endpoint: str | None = None
) -> LaunchPlan:
    return plan_launch(
        config,
        ("-m", "pipelines.agentic", *SOURCE),
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=endpoint,
        python="python",
    )


def python_plan(
    code: str, *, num_processes: int = 1, env: dict[str, str] | None = None, output_dir: Path | None = None
) -> LaunchPlan:
    return LaunchPlan(
        argv=(sys.executable, "-c", code),
        env=env or {},
        num_processes=num_processes,
        world_size=num_processes,
        output_dir=output_dir,
    )


def read_error(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "error.json").read_text(encoding="utf-8"))
    return content


def run_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> tuple[int, str]:
    """The exit code and the log of two ranks that run ``entry``."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "entry.py").write_text(entry, encoding="utf-8")
    plan = plan_launch(build_config(tp=2), ("-m", "entry"))
    code = run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path)
    return code, (tmp_path / "log").read_text(encoding="utf-8")


def test_one_process_is_started_without_the_working_directory_in_its_import_path() -> None:
    plan = build_plan(build_config(envs={"NCCL_ALGO": "Ring"}))
    ranks = ("-P", "-m", "mock_scheduler.launch.ranks", "out", "1", "1", "0", "-")
    assert plan.argv == ("python", *ranks, "-m", "pipelines.agentic", *SOURCE)
    assert plan.env == {"NCCL_ALGO": "Ring"}
    assert (plan.num_processes, plan.world_size) == (1, 1)


def test_several_processes_of_one_machine_need_no_endpoint() -> None:
    ranks = ("-P", "-u", "-m", "mock_scheduler.launch.ranks", "out", "4", "1", "0", "-")
    for endpoint in (None, "host0:29500"):
        plan = build_plan(build_config(tp=2, dp=2), endpoint=endpoint)
        assert plan.argv == ("python", *ranks, "-m", "pipelines.agentic", *SOURCE)
        assert plan.num_processes == 4


def test_nodes_share_an_endpoint_and_keep_their_order() -> None:
    plan = build_plan(build_config(tp=2, dp=2), nnodes=2, node_rank=1, endpoint="host0:29500")
    assert plan.argv[4:10] == ("mock_scheduler.launch.ranks", "out", "2", "2", "1", "host0:29500")
    assert (plan.num_processes, plan.world_size) == (2, 4)
    place = Place(num_local=2, nnodes=2, node_rank=1, endpoint="host0:29500")
    assert place.rank_environment(1) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }


def test_a_plan_exports_no_variable_that_names_code() -> None:
    """Another program than the pipeline may load its configurations without the library's check."""
    with pytest.raises(ConfigError) as caught:
        build_plan(build_config(envs={"LD_PRELOAD": "x.so", "A": "1"}))
    assert str(caught.value) == (
        "cannot launch:\n"
        "  - system_envs.LD_PRELOAD: decides what code a process runs, so no configuration sets it; set LD_PRELOAD in "
        "your shell instead"
    )


def test_every_problem_of_the_nodes_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        build_plan(build_config(tp=2, dp=2), nnodes=3, node_rank=3)
    assert str(caught.value) == (
        "cannot launch:\n"
        "  - layout tp2 pp1 dp2 needs 4 processes, which do not divide over --nnodes 3\n"
        "  - --node-rank 3 is not in 0..2 (--nnodes 3)\n"
        "  - --nnodes 3 needs --rdzv-endpoint HOST:PORT on node 0, found None"
    )


def test_child_gets_the_plans_variables_and_no_other_launchers_ranks() -> None:
    environ = {"HOME": "/home", "RANK": "3", "MASTER_PORT": "1", "NCCL_ALGO": "Tree"}
    one = child_environment(python_plan("", env={"NCCL_ALGO": "Ring"}), environ)
    own = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert one == {"HOME": "/home", "NCCL_ALGO": "Ring", **own}
    assert child_environment(python_plan("", num_processes=2), environ)["OMP_NUM_THREADS"] == "1"
    # Runs of one rank and of several have one process to be forked from where the user chose a number of threads.
    environ["OMP_NUM_THREADS"] = "2"
    assert child_environment(python_plan("", num_processes=2), environ) == child_environment(python_plan(""), environ)
    assert child_environment(python_plan("", num_processes=2), {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_output_goes_to_the_log_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['A'], flush=True); print('problem', file=sys.stderr); sys.exit(5)"
    log_path = tmp_path / "logs" / "run.log"
    assert run_plan(python_plan(code, env={"A": "7"}), log_path=log_path, cwd=tmp_path) == 5
    assert log_path.read_text(encoding="utf-8") == "7\nproblem\n"


def test_what_the_failed_rank_exits_with_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 crashes as a peer of a failed rank does; the code that rank 0 chose is the run's, and its message stays
    readable: torchrun exits with 1 and ends with thirty lines of its own traceback.
    """
    entry = (
        "import os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    pipe = open('alive', 'w')\n"
        "    sys.exit(3)\n"
        "open('alive').read()\n"
        "sys.exit('peer lost')\n"
    )
    os.mkfifo(tmp_path / "alive")  # rank 1 waits until rank 0 is gone, or that may be ended before it has chosen
    code, log = run_two_ranks(tmp_path, monkeypatch, entry)
    assert code == 3
    assert "Traceback" not in log
    assert not (tmp_path / "out").exists()


def test_a_rank_that_was_killed_is_named_in_place_of_its_peers_connection_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of rank 1 ended the run with exit code 1, ``diverged``, and ``error.json`` blamed rank 0: "Connection
    reset by peer". Rank 0 waits until rank 1 is gone, then fails as a survivor does.
    """
    entry = (
        "import json, os, pathlib, signal, sys, time\n"
        "from mock_scheduler.support.processes import end_with_parent\n"
        "end_with_parent(os.environ)\n"
        "if os.environ['RANK'] == '1':\n"
        "    pipe = open('alive', 'w')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "open('alive').read()\n"
        "pathlib.Path('out').mkdir()\n"
        "pathlib.Path('out/error.json').write_text(json.dumps({'message': 'Connection reset by peer'}))\n"
        "sys.exit(70)\n"
    )
    os.mkfifo(tmp_path / "alive")  # its reader waits for the writer, and then until that is gone
    code, log = run_two_ranks(tmp_path, monkeypatch, entry)
    message = "rank 1 was ended by SIGKILL (signal 9), which the kernel sends where memory runs out"
    assert code == 137
    assert message in log.splitlines()
    assert read_error(tmp_path / "out") == {
        "type": "EndedBySignal",
        "message": message,
        "exit_code": 137,
        "global_rank": 1,
    }


def test_a_single_process_that_was_killed_exits_with_128_and_the_signal(tmp_path: Path) -> None:
    """It exited with 247 on the command line, and nothing said why."""
    (tmp_path / "entry.py").write_text("import os; os.kill(os.getpid(), 11)", encoding="utf-8")
    plan = plan_launch(build_config(), ("-m", "entry"))
    assert run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path) == 139
    assert (tmp_path / "log").read_text(encoding="utf-8") == "rank 0 was ended by SIGSEGV (signal 11)\n"
    assert read_error(tmp_path / "out") == {
        "type": "EndedBySignal",
        "message": "rank 0 was ended by SIGSEGV (signal 11)",
        "exit_code": 139,
        "global_rank": 0,
    }


@pytest.mark.parametrize(("process", "is_left"), [("os.getpid()", False), ("os.getppid()", True), ("'x'", True)])
def test_the_file_of_a_training_service_that_was_killed_is_removed(tmp_path: Path, process: str, is_left: bool) -> None:
    """A running service may have the same folder: that of a client whose launcher this is."""
    path = tmp_path / "service.json"
    code = f"""
import json, os, signal
with open({str(path)!r}, "w") as file:
    json.dump({{"process_id": {process}}}, file)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_plan(python_plan(code, output_dir=tmp_path), log_path=tmp_path / "log") == 137
    assert path.exists() == is_left


def test_a_signal_is_told_on_stderr_where_error_json_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "out"
    plan = python_plan("import os; os.kill(os.getpid(), 9)", num_processes=2, output_dir=folder)
    assert run_plan(plan) == 137
    assert capsys.readouterr().err == (
        "the process that started this machine's ranks was ended by SIGKILL (signal 9), which the kernel sends where "
        f"memory runs out\n{folder}/error.json cannot be written: {tmp_path}/file is not a folder\n"
    )


def test_a_crash_of_python_itself_is_not_a_verdict() -> None:
    """An entry that cannot be imported ends Python with 1, which CI took for ``diverged``."""
    assert run_plan(python_plan("import sys; sys.exit(1)")) == 70


def rank(global_rank: int, code: int, *, noticed_s: int = 100) -> RankExit:
    return RankExit(global_rank=global_rank, code=code, noticed_s=noticed_s)


@pytest.mark.parametrize(
    ("failures", "culprit"),
    [
        ([rank(0, 70), rank(1, -9)], 1),  # the survivor lost its peer
        ([rank(1, 3), rank(0, -9, noticed_s=130)], 1),  # the survivor was killed after a grace
        ([rank(1, 70), rank(0, -9, noticed_s=130)], 1),
        ([rank(0, 70), rank(1, -15)], 0),  # the survivor was ended at once
        ([rank(0, -15), rank(1, 70)], 0),  # a signal that came first was nobody's here
        ([rank(0, -6), rank(1, -9)], 1),  # NCCL's watchdog aborted the survivor
        ([rank(0, -6), rank(1, 4)], 1),
        ([rank(0, 1), rank(1, 70)], 1),
        ([rank(0, 1), rank(1, 1)], 0),
    ],
)
def test_the_rank_that_failed_first_explains_the_others(failures: list[RankExit], culprit: int) -> None:
    assert find_culprit(failures).global_rank == culprit


def test_a_rank_that_said_why_is_the_cause_though_it_was_asked_to_end(tmp_path: Path) -> None:
    """A full disk ended a run of two ranks with 70: the one that lost its peer was the faster to end."""
    failures = [rank(1, 70), rank(0, -15)]
    assert report_failed_ranks(failures, tmp_path, started_s=0.0) == 70
    error = tmp_path / "error.json"
    error.write_text(json.dumps({"type": "ConfigError", "message": "full", "exit_code": 5, "global_rank": 0}))
    assert report_failed_ranks(failures, tmp_path, started_s=0.0) == 5
    assert report_failed_ranks(failures, tmp_path, started_s=time.time() + 60.0) == 70  # that of an earlier run
    assert report_failed_ranks([rank(1, -9), rank(2, 70)], tmp_path, started_s=0.0) == 137
    error.write_text("[]")
    assert report_failed_ranks(failures, tmp_path, started_s=0.0) == 70


PARENT_IS_GONE = (
    "import os, subprocess, sys, time\n"
    "child = 'import os, signal; from mock_scheduler.support.processes import end_with_parent; '\n"
    "child += 'end_with_parent(os.environ); '\n"
    "child += 'print(os.getpid(), flush=True); signal.pause()'\n"
    "environ = dict(os.environ, MOCK_SCHEDULER_PARENT_PID=str(os.getpid()))\n"
    "subprocess.Popen([sys.executable, '-c', child], env=environ, start_new_session=True)\n"
    "time.sleep(60)\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_process_of_a_killed_launcher_ends() -> None:
    """SIGKILL of the launcher left the training running, in a session of its own, where nothing would find it."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT_IS_GONE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_id = int(parent.stdout.readline())
    parent.kill()
    parent.wait(timeout=20)
    # The child holds the other end of this pipe: it is read to its end when the child is gone.
    assert parent.stdout.read() == ""
    parent.stdout.close()
    assert not Path(f"/proc/{child_id}/fd/1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_process_that_starts_after_its_launcher_has_ended_ends_too() -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    code = (
        "import os; from mock_scheduler.support.processes import end_with_parent; "
        "end_with_parent(os.environ); print('alive')"
    )
    process_id = int(gone.stdout)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MOCK_SCHEDULER_PARENT_PID": str(process_id)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")
    assert done.stderr == f"the launcher (process {process_id}) has ended, so this process ends\n"


def test_nohup_is_respected() -> None:
    """Under nohup SIGHUP is ignored, and a run must outlive its terminal."""
    code = (
        "import signal; from mock_scheduler.support.processes import ending_signals_as_interrupt\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "with ending_signals_as_interrupt():\n"
        "    print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, callable(signal.getsignal(signal.SIGTERM)))\n"
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True"]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_ending_the_launcher_ends_its_child(ending: signal.Signals) -> None:
    """The child tells its process id, then waits for ever; after SIGTERM to the launcher it must be gone. SIGHUP, which
    a closed terminal sends, once ended the launcher alone.
    """
    child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    code = (
        "import signal, sys; from mock_scheduler.launch.launcher import LaunchPlan, run_plan\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # ignored where the tests run under nohup
        f"run_plan(LaunchPlan(argv=(sys.executable, '-c', {child!r}), env={{}}, num_processes=1, world_size=1))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child_id = int(launcher.stdout.readline())
    launcher.send_signal(ending)
    _, stderr = launcher.communicate(timeout=20)
    assert "KeyboardInterrupt" in stderr
    with pytest.raises(ProcessLookupError):
        os.kill(child_id, 0)
