"""The process that starts a command: real processes of small scripts, without torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from mock_scheduler.command_program.entry import run_command
from mock_scheduler.command_program.program import PROGRAM, own_config
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.launch.launcher import plan_launch, run_plan
from mock_scheduler.program import load_config
from mock_scheduler.support.node_cache import FOLDER_VARIABLE

# What attach leaves of a run of two steps, by its run file alone.
ATTACHED = """
import json, os, sys
run = json.load(open(os.environ["MOCK_SCHEDULER_RUN"]))
layout = sys.argv[1] if len(sys.argv) > 1 else "tp1 pp1 dp1"
steps = range(int(sys.argv[2]) if len(sys.argv) > 2 else run["last_step"] + 1)
os.makedirs(run["output_dir"], exist_ok=True)
json.dump({"built": {}}, open(run["output_dir"] + "/ledger.json", "w"))
done = {"status": "completed", "layout": layout, "wall_s": 1.0, "rollout_s": 0.0}
done["batches"] = {str(step): "0" for step in steps}
json.dump(done, open(run["output_dir"] + "/run.json", "w"))
"""
SPAWN = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def write(folder: Path, script: str, *words: str, **values: object) -> Path:
    (folder / "train.py").write_text(script, encoding="utf-8")
    content = {"command": ["{python}", "train.py", *words], "output_dir": str(folder / "out"), **values}
    (folder / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


def run(folder: Path) -> int:
    return run_command(own_config(PROGRAM.build_loader("run", folder)(())), folder=folder)


def stated(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "out" / "error.json").read_text(encoding="utf-8"))
    return content


def test_an_attached_command_ends_well_in_the_folder_of_its_file(tmp_path: Path) -> None:
    assert run(write(tmp_path, ATTACHED)) == 0
    assert not (tmp_path / "out" / "error.json").exists()
    again = load_config(ConfigSource(config_name="command", config_path=str(tmp_path / "out")), PROGRAM)
    assert own_config(again).command == ["{python}", "train.py"]
    # Started again from where it lies, it is the same run.
    assert run_command(own_config(again), folder=tmp_path / "out") == 0


def test_a_command_without_attach_is_told_how_to_attach(tmp_path: Path) -> None:
    assert run(write(tmp_path, "print('trained')")) == 3
    assert stated(tmp_path) == {
        "type": "AlignmentError",
        "message": (
            f"the command ended with exit code 0 and wrote no run.json to {tmp_path}/out, so nothing was attached to "
            "it. Call run = megatron.attach(model_chunks, optimizer) (from mock_scheduler import megatron) once the "
            "training has built both. Where it is called, MOCK_SCHEDULER_RUN did not reach the processes: a launcher "
            "for other machines must pass it on, as in [ray, job, submit, --, env, '{env}', '{command}']"
        ),
        "exit_code": 3,
        "global_rank": None,
    }


def test_files_of_an_earlier_run_do_not_speak_for_this_one(tmp_path: Path) -> None:
    run(write(tmp_path, ATTACHED))
    assert run(write(tmp_path, "")) == 3


def test_another_layout_than_asked_for_is_refused(tmp_path: Path) -> None:
    assert run(write(tmp_path, ATTACHED, "tp2 pp1 dp1")) == 5
    assert stated(tmp_path)["message"] == (
        "the command trained with the layout tp2 pp1 dp1, and tp1 pp1 dp1 was asked for; check that arguments passes "
        "each axis, and that the command passes them on"
    )


def test_a_run_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    assert run(write(tmp_path, ATTACHED, "tp1 pp1 dp1", "1", max_steps=3)) == 3
    assert stated(tmp_path)["message"] == (
        "the command ended after step 0, and max_steps=3 asks for steps 0 to 2; let it train for longer, or set "
        "max_steps=1"
    )


@pytest.mark.parametrize("code", [1, 2, 4])
def test_an_exit_code_of_the_commands_own_is_no_verdict(
    tmp_path: Path, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """argparse ends with 2, and 2 means suspect here."""
    assert run(write(tmp_path, f"raise SystemExit({code})")) == 70
    told = capfd.readouterr().err.splitlines()
    assert told[-1] == f"the command ended with exit code {code}: {sys.executable} train.py"


def test_a_refusal_of_the_attached_run_keeps_its_code(tmp_path: Path) -> None:
    script = (
        "import json, os; run = json.load(open(os.environ['MOCK_SCHEDULER_RUN']));"
        "json.dump({'type': 'UnsupportedModelError', 'message': 'CUDA graphs', 'exit_code': 5, 'global_rank': 0},"
        "open(run['output_dir'] + '/error.json', 'w')); raise SystemExit(1)"
    )
    assert run(write(tmp_path, script)) == 5
    assert stated(tmp_path)["message"] == "CUDA graphs"


def test_a_killed_command_says_so(tmp_path: Path) -> None:
    assert run(write(tmp_path, "import os; os.kill(os.getpid(), 9)")) == 137
    assert str(stated(tmp_path)["message"]).startswith("the command was ended by SIGKILL (signal 9), which the kernel")


def test_a_command_that_hangs_is_ended_after_its_time(tmp_path: Path) -> None:
    assert run(write(tmp_path, "import time; time.sleep(600)", timeout_s=0.3)) == 3
    assert str(stated(tmp_path)["message"]).startswith("the command had not ended after 0.3 s (timeout_s), so it was")


def test_a_job_elsewhere_is_cancelled_where_its_time_is_over(tmp_path: Path) -> None:
    cancel = ["{python}", "-c", "open('{folder}/cancelled', 'w').write('{exp_name}')"]
    folder = write(tmp_path, "import time; time.sleep(600)", timeout_s=0.3, cancel=cancel, exp_name="job-7")
    assert run(folder) == 3
    assert (tmp_path / "cancelled").read_text(encoding="utf-8") == "job-7"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"command": ["no-such-launcher"]}, "command: 'no-such-launcher' cannot be started: No such file or directory"),
        ({"working_dir": "gone"}, "working_dir: there is no folder {folder}/gone"),
    ],
)
def test_a_command_that_cannot_start_is_a_clear_error(tmp_path: Path, values: dict[str, object], message: str) -> None:
    assert run(write(tmp_path, "", **values)) == 5
    assert stated(tmp_path)["message"] == message.format(folder=tmp_path)


def test_the_command_is_no_rank_of_ours_and_finds_its_own_variables(tmp_path: Path) -> None:
    script = "import json, os; json.dump(dict(os.environ), open('environ.json', 'w'))"
    config = load_config(ConfigSource(config_name="run", config_path=str(write(tmp_path, script, env={"A": "{tp}"}))))
    source = ConfigSource(config_name="run", config_path=str(tmp_path))
    plan = plan_launch(config, PROGRAM.arguments(PROGRAM.entry, source), num_processes=1)
    assert run_plan(plan, log_path=tmp_path / "log") == 3  # nothing was attached
    environ = json.loads((tmp_path / "environ.json").read_text(encoding="utf-8"))
    assert (environ["A"], environ["DETERMINISTIC_MODE"], environ["PYTHONHASHSEED"]) == ("1", "1", "0")
    assert environ["MOCK_SCHEDULER_RUN"] == str(tmp_path / "out" / "attached_run.json")
    assert not {"RANK", "WORLD_SIZE", "MOCK_SCHEDULER_PARENT_PID"} & set(environ)


def is_running(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.all
@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGKILL])
def test_all_processes_of_a_command_end_with_the_launcher(tmp_path: Path, which: signal.Signals) -> None:
    """A launcher's workers are in sessions of their own; they end too, even where the launcher is killed."""
    write(tmp_path, SPAWN)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "mock_scheduler.cli", "launch", str(tmp_path / "run")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pids = tmp_path / "pids"
    until(lambda: pids.is_file() and len(pids.read_text(encoding="utf-8").split()) == 2)
    started = [int(text) for text in pids.read_text(encoding="utf-8").split()]
    assert all(map(is_running, started))
    os.kill(launcher.pid, which)
    launcher.wait(timeout=60)
    until(lambda: not any(map(is_running, started)))


def until(holds: object, *, seconds: float = 60.0) -> None:
    assert callable(holds)
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.05)


def test_torchrun_on_one_machine_is_warned_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "torchrun").write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    (tmp_path / "torchrun").chmod(0o755)
    write(tmp_path, "", command=[str(tmp_path / "torchrun"), "train.py"])
    assert run(tmp_path) == 70
    assert "warning: torchrun listens on every address of this machine" in capfd.readouterr().err


@pytest.mark.parametrize("code", [0, 1, "no-such-program"])
def test_no_file_of_a_failed_command_has_a_value_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], code: int | str
) -> None:
    """Its words and variables, with their values, went into the log, the terminal and the error of an alignment."""
    monkeypatch.setenv("A_WORD", "value-from-outside")
    words = [code] if isinstance(code, str) else ["{python}", "train.py"]
    write(tmp_path, f"raise SystemExit({code!r})", command=[*words, "--word", "${oc.env:A_WORD}"])
    content = yaml.safe_load((tmp_path / "run.yaml").read_text(encoding="utf-8"))
    content |= {"env": {"OWN": "x-${oc.env:A_WORD}"}, "cancel": ["no-such", "${oc.env:A_WORD}"]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    assert run(tmp_path) in (3, 5, 70)
    texts = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert "value-from-outside" not in "".join([*texts, *capfd.readouterr()])


def test_a_command_gets_no_place_of_ours_and_no_interface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own launcher may start it on several machines, and takes the environment along."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    saying = "import json, os; json.dump(dict(os.environ), open('environ.json', 'w'))"
    config = load_config(ConfigSource(config_name="run", config_path=str(write(tmp_path, saying + ATTACHED))), PROGRAM)
    source = ConfigSource(config_name="run", config_path=str(tmp_path))
    assert run_plan(plan_launch(config, PROGRAM.arguments(PROGRAM.entry, source), num_processes=1)) == 0
    environ = json.loads((tmp_path / "environ.json").read_text(encoding="utf-8"))
    del environ[FOLDER_VARIABLE]  # the tests' own
    ours = [name for name in environ if name.startswith("MOCK_SCHEDULER_") or name.endswith(("RANK", "_IFNAME"))]
    assert {name for name in ours if not name.startswith("TEST")} == {"MOCK_SCHEDULER_RUN", "MOCK_SCHEDULER_STARTED_IN"}
    assert not {"MASTER_ADDR", "WORLD_SIZE"} & environ.keys()
