"""The command line: light help, clean errors with their exit codes, options in any order."""

from __future__ import annotations

import errno
import gc
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mock_scheduler import cli
from mock_scheduler.batch.columns import TensorColumn
from mock_scheduler.commands import launch
from mock_scheduler.launch.launcher import LaunchPlan
from mock_scheduler.recording.writing.writer import WriterOptions
from mock_scheduler.support.raw_tensors import ITEM_SIZES, RawTensor
from pipelines.config.loading import load_config
from tests.recording.builders import make_batch
from tests.recording.recordings import record as record_steps
from tests.report.recordings import make_odd_batch, record, write_shards


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    (tmp_path / "run.yaml").write_text("exp_name: x\nsystem_envs: {NCCL_ALGO: 'a b', A: 1}\n", encoding="utf-8")
    return str(tmp_path)


def test_help_imports_no_more_than_the_command_line() -> None:
    """What ``--help`` costs is what it imports; its time is in ``benchmarks/startup.py``."""
    code = "import sys; from mock_scheduler.cli import main; main(['--help']); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.splitlines()[-1].split()
    assert [name for name in modules if name.partition(".")[0] == "mock_scheduler"] == [
        "mock_scheduler",
        "mock_scheduler.adapters",
        "mock_scheduler.adapters.formats",
        "mock_scheduler.cli",
        "mock_scheduler.errors",
        "mock_scheduler.support",
        "mock_scheduler.support.command_line",
        "mock_scheduler.support.lazy_commands",
        "mock_scheduler.support.terminal_streams",
        "mock_scheduler.support.text",
        "mock_scheduler.support.versions",
    ]
    slow = {"torch", "numpy", "hydra", "omegaconf", "pydantic", "yaml", "plotly", "fsspec", "asyncio", "email", "ssl"}
    assert {name.partition(".")[0] for name in modules} & slow == set()
    names = (
        *("launch", "align", "compare", "env", "config", "inspect", "verify", "diff", "show", "plot", "version"),
        *("doctor", "replay-actions", "minimise", "extract", "import", "export", "new", "completion"),
    )
    assert [name for name in names if f"│ {name} " not in done.stdout] == []


def test_help_is_that_of_typer_with_the_options_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the command that is run has its options read."""
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.app(["--help"], prog_name="mock-scheduler")
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("is_enabled", [True, False])
def test_help_leaves_the_search_for_garbage_as_it_was(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if is_enabled else gc.disable)()
        assert cli.main(["--help"]) == 0
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_no_help_and_no_configuration_imports_torch(config_path: str) -> None:
    """One process runs them all: an import by any of them is found."""
    names = [info.name or (info.callback.__name__ if info.callback else "") for info in cli.app.registered_commands]
    assert len(names) == 23
    runs = [[name, "--help"] for name in names] + [["config", "run", "--config-path", config_path], ["version"]]
    code = f"import sys; from mock_scheduler.cli import main; print([main(run) for run in {runs!r}]); "
    code += "print(*{'torch', 'megatron'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [str([0] * len(runs)), ""]


def test_recordings_are_described_and_verified_without_torch(tmp_path: Path) -> None:
    extras = {
        name: TensorColumn.of_given(RawTensor(np.zeros(12 * size, dtype=np.uint8), name, (6, 2)))
        for name, size in ITEM_SIZES.items()
    }
    extras["ragged"] = TensorColumn(values=torch.ones(6, dtype=torch.bfloat16), offsets=torch.arange(7))
    batch = replace(make_batch(3, 2), extras=extras)
    record(tmp_path / "plain", {0: batch, 1: make_odd_batch()})
    write_shards(record(tmp_path / "shards", {0: batch}), 1, batch, count=2)
    record_steps(tmp_path / "zstd", (0, 1), options=WriterOptions(compression="zstd"))
    runs = [[name, str(tmp_path / folder)] for folder in ("plain", "shards", "zstd") for name in ("inspect", "verify")]
    code = f"import sys; from mock_scheduler.cli import main; print([main(run) for run in {runs!r}]); "
    code += "print(*{'torch', 'megatron'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == [str([0] * len(runs)), ""]


def test_a_value_that_is_none_of_a_list_is_named_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    """It began with pydantic's ``Value error``."""
    assert cli.main(["show", "a", "--mode", "eval"]) == 5
    assert capsys.readouterr().err.splitlines()[0] == (
        "error: Invalid value for '--mode': 'eval' is not one of 'train', 'val'."
    )


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"


def test_env_prints_quoted_export_lines(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--config-path", config_path, "run"]) == 0
    assert capsys.readouterr().out == "export A=1\nexport NCCL_ALGO='a b'\n"
    assert cli.main(["env", "--config-path", config_path, "run", "--plain"]) == 0
    assert capsys.readouterr().out == "A=1\nNCCL_ALGO=a b\n"
    assert cli.main(["env", "--config-path", config_path, "run", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == {"A": "1", "NCCL_ALGO": "a b"}


def test_a_configuration_is_printed_as_json_too(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "run", "--config-path", config_path, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["exp_name"], found["system_envs"]) == ("x", {"NCCL_ALGO": "a b", "A": "1"})


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("align RUN", ["run.yaml"]),
        ("config quickst", ["quickstart"]),
        ("launch run rollout_mock.mo", ["rollout_mock.mode="]),
        ("compl", ["completion"]),
    ],
)
def test_a_shell_completes_names_of_configurations_and_keys(
    words: str,
    answer: list[str],
    config_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(config_path)
    line = f"mock-scheduler {words.replace('RUN', 'run')}"
    monkeypatch.setenv("_MOCK_SCHEDULER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
    assert cli.main([]) == 0
    assert capsys.readouterr().out.split() == answer


@pytest.mark.parametrize(
    ("command", "message"),
    [("align", "interrupted; the same command goes on, and takes finished runs again"), ("config", "interrupted")],
)
def test_an_interrupted_command_says_whether_it_goes_on(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_source", interrupt)
    assert cli.main([command, "x"]) == 130
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_package_that_is_missing_is_named_with_the_page_on_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_it(*arguments: object) -> None:
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setattr(cli, "_source", import_it)
    assert cli.main(["config", "x"]) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert said == f"error: the package hydra is not installed in {sys.prefix}: pip install it (docs/install.md)"


@pytest.mark.parametrize("setting", ["DETERMINISTIC_MODE: 1", "DETERMINISTIC_MODE: 2"])
def test_env_refuses_settings_that_a_run_refuses_and_prints_none(
    setting: str, config_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It exported NCCL_ALGO=Tree under DETERMINISTIC_MODE=1, which ``launch`` refuses."""
    arguments = ["run", f"system_envs={{NCCL_ALGO: Tree, {setting}}}", "--config-path", config_path]
    assert cli.main(["env", *arguments]) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "\n    - NCCL_ALGO is 'Tree': " in printed.err
    assert cli.main(["launch", *arguments]) == 4
    assert capsys.readouterr().err == printed.err


def test_config_prints_yaml_that_loads_back(
    config_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["config", "run", "seed=9", "--config-path", config_path, "~system_envs"]) == 0
    (tmp_path / "again.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    again = load_config("again", config_path=tmp_path)
    assert again == load_config("run", config_path=tmp_path, overrides=["seed=9", "~system_envs"])


def test_library_errors_are_one_clean_message(config_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "run", "rollout_mock.mode='[b]replay'", "--config-path", config_path]) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"error: configuration 'run' ({config_path}/run.yaml) has 1 problem:\n"
        "  - rollout_mock.mode: unknown mode '[b]replay'; known modes: real, dump, mock, cache, verify "
        "(given as \"rollout_mock.mode='[b]replay'\")\n"
    )


def test_unready_deterministic_mode_is_refused_before_anything_starts(
    config_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", "run", "system_envs={DETERMINISTIC_MODE: 1}", "--config-path", config_path]) == 4
    assert capsys.readouterr().err.startswith("error: system_envs do not make a deterministic run:\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["config"],
        ["config", "run", "--bogus"],
        ["launch", "x", "--nnodes", "y"],
        ["inspect"],
        ["diff", "only-one"],
        ["diff", "a", "b", "--limit", "0"],
        ["show", "a", "--mode", "test"],
        ["show", "a", "--step", "-1"],
    ],
)
def test_usage_errors_exit_with_5(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 5
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.endswith("Try 'mock-scheduler --help' or 'mock-scheduler COMMAND --help'.\n")


def test_a_missing_argument_is_named_with_the_order_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay-actions", "dumps/v1"]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: Missing argument 'recording'."
    assert lines[1] == "  Usage: mock-scheduler replay-actions [OPTIONS] {config_name} {recording} [overrides]..."


def fail_with(error: BaseException) -> Callable[[LaunchPlan], int]:
    def run_plan(plan: LaunchPlan) -> int:
        raise error

    return run_plan


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "/data/x"), "/data/x: Permission denied"),
        (OSError("no route"), "no route"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_message_and_exit_code_5(
    config_path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: OSError,
    message: str,
) -> None:
    """It ended with a traceback and exit code 1, which CI takes for ``diverged``."""
    monkeypatch.setattr(launch, "run_plan", fail_with(error))
    assert cli.main(["launch", "run", "--config-path", config_path]) == 5
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_unforeseen_error_is_a_traceback_and_exit_code_70(
    config_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit code for it is 1, which CI takes for ``diverged``."""
    monkeypatch.setattr(launch, "run_plan", fail_with(ZeroDivisionError("division by zero")))
    assert cli.main(["launch", "run", "--config-path", config_path]) == 70
    text = capsys.readouterr().err
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith(
        "\n  ZeroDivisionError: division by zero\n"
        "error: this is a fault of mock-scheduler, or of what it runs; the traceback above says where\n"
    )


def test_output_that_nobody_reads_is_not_a_verdict(config_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """typer itself exits with 1 on a closed pipe, as in ``mock-scheduler align ... | head``."""
    monkeypatch.setattr(launch, "run_plan", fail_with(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    # typer wraps both streams for good.
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    assert cli.main(["launch", "run", "--config-path", config_path]) == 141


def test_an_option_has_one_spelling_and_another_is_answered_with_it(
    config_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--config_path`` and ``--config-path`` stood side by side."""
    assert cli.main(["config", "run", "--config_path", config_path]) == 5
    assert capsys.readouterr().err.splitlines()[0] == (
        "error: No such option: --config_path (Possible options: --config-path)"
    )
    for name in ("launch", "align", "compare", "minimise", "doctor", "extract", "correction", "replay-actions"):
        assert cli.main([name, "--help"]) == 0
        words = capsys.readouterr().out.split()
        assert [word for word in words if word.startswith("--") and "_" in word] == []


def test_launch_runs_the_plan_and_exits_with_its_code(config_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[LaunchPlan] = []

    def record(plan: LaunchPlan) -> int:
        plans.append(plan)
        return 3

    monkeypatch.setattr(launch, "run_plan", record)
    assert cli.main(["launch", "run", "seed=9", "--config-path", config_path]) == 3
    assert plans[0].argv[1:-7] == ("-P", "-m", "mock_scheduler.launch.ranks", plans[0].argv[4], "1", "1", "0", "-")
    assert plans[0].argv[-7:] == (
        "-m",
        "pipelines.agentic",
        *("--config-path", config_path),
        *("--config-name", "run"),
        "seed=9",
    )
