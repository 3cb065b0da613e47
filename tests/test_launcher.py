"""Launch plans: command, environment and processes; carrying one out: exit codes, logs, and ending the child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mock_scheduler.config.schema import ParallelConfig, PipelineConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.launcher import LaunchPlan, child_environment, plan_launch, run_plan

SOURCE = ("--config_path", "configs", "--config_name", "run", "seed=1")


def build_config(*, tp: int = 1, dp: int = 1, envs: dict[str, str] | None = None) -> PipelineConfig:
    parallel = ParallelConfig(tensor_model_parallel_size=tp, data_parallel_size=dp)
    return PipelineConfig(exp_name="x", parallel=parallel, system_envs=envs or {})


def build_plan(
    config: PipelineConfig, *, nnodes: int = 1, node_rank: int = 0, endpoint: str | None = None
) -> LaunchPlan:
    return plan_launch(
        config,
        config_name="run",
        config_path="configs",
        overrides=["seed=1"],
        nnodes=nnodes,
        node_rank=node_rank,
        rdzv_endpoint=endpoint,
        python="python",
    )


def python_plan(code: str, *, num_processes: int = 1, env: dict[str, str] | None = None) -> LaunchPlan:
    return LaunchPlan(
        argv=(sys.executable, "-c", code), env=env or {}, num_processes=num_processes, world_size=num_processes
    )


def test_one_process_is_started_directly() -> None:
    plan = build_plan(build_config(envs={"NCCL_ALGO": "Ring"}))
    assert plan.argv == ("python", "-m", "pipelines.agentic", *SOURCE)
    assert plan.env == {"NCCL_ALGO": "Ring", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert (plan.num_processes, plan.world_size) == (1, 1)


def test_several_processes_go_through_torchrun_with_a_free_port_of_its_own() -> None:
    plan = build_plan(build_config(tp=2, dp=2))
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", plan.argv[12])
    torchrun = ("-m", "mock_scheduler.launcher", "--nproc-per-node", "4", "--nnodes", "1", *rendezvous)
    assert plan.argv == ("python", *torchrun, "-m", "pipelines.agentic", *SOURCE)
    assert plan.num_processes == 4
    assert plan.argv[12] != build_plan(build_config(tp=2, dp=2)).argv[12]


def test_nodes_share_an_endpoint_and_keep_their_order() -> None:
    plan = build_plan(build_config(tp=2, dp=2), nnodes=2, node_rank=1, endpoint="host0:29500")
    rendezvous = ("--rdzv-backend", "static", "--rdzv-endpoint", "host0:29500", "--node-rank", "1")
    assert plan.argv[1:13] == (
        *("-m", "mock_scheduler.launcher", "--nproc-per-node", "2", "--nnodes", "2"),
        *rendezvous,
    )
    assert (plan.num_processes, plan.world_size) == (2, 4)


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
    assert one == {"HOME": "/home", "NCCL_ALGO": "Ring", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    assert child_environment(python_plan("", num_processes=2), environ)["OMP_NUM_THREADS"] == "1"
    assert child_environment(python_plan("", num_processes=2), {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"


def test_output_goes_to_the_log_and_the_exit_code_comes_back(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['A'], flush=True); print('problem', file=sys.stderr); sys.exit(5)"
    log_path = tmp_path / "logs" / "run.log"
    assert run_plan(python_plan(code, env={"A": "7"}), log_path=log_path, cwd=tmp_path) == 5
    assert log_path.read_text(encoding="utf-8") == "7\nproblem\n"


def test_torchrun_passes_on_what_the_failed_rank_exits_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 crashes as a peer of a failed rank does; the code that rank 0 chose is the run's, and its message stays
    readable: torchrun alone exits with 1 and ends with thirty lines of its own traceback.
    """
    entry = "import os, sys\nsys.exit('peer lost' if os.environ['RANK'] == '1' else 3)\n"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    (tmp_path / "entry.py").write_text(entry, encoding="utf-8")
    plan = plan_launch(build_config(tp=2), config_name="run", config_path="configs", overrides=[], entry="entry")
    assert run_plan(plan, log_path=tmp_path / "log", cwd=tmp_path) == 3
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")


def test_ending_the_launcher_ends_its_child(tmp_path: Path) -> None:
    """The child tells its process id, then waits for ever; after SIGTERM to the launcher it must be gone."""
    child = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    code = (
        "import sys; from mock_scheduler.launcher import LaunchPlan, run_plan\n"
        f"run_plan(LaunchPlan(argv=(sys.executable, '-c', {child!r}), env={{}}, num_processes=1, world_size=1))"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child_id = int(launcher.stdout.readline())
    launcher.send_signal(signal.SIGTERM)
    _, stderr = launcher.communicate(timeout=20)
    assert "KeyboardInterrupt" in stderr
    with pytest.raises(ProcessLookupError):
        os.kill(child_id, 0)
