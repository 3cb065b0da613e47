"""Megatron-Bridge's own callbacks, ms-swift's own trainer and megatron/rl's own functions, each through its adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.bits import bits
from tests.dist.conftest import launch
from tests.megatron.attach.test_attach import different, exit_codes, load
from tests.megatron.callback_loops import FILE_VARIABLE
from tests.programs import DETERMINISTIC, ROOT

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1800)]

BUILT = Path(os.environ.get("BUILT_PACKAGES", Path(sys.prefix) / "built"))
SWIFT = Path(os.environ.get("SWIFT_PACKAGES", Path(sys.prefix) / "swift"))
TEXT = Path(os.environ.get("TEXT_PACKAGES", Path(sys.prefix) / "text"))
SOURCES = os.environ.get("MEGATRON_LM", "")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("called")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FILE_VARIABLE, str(BUILT / "megatron/bridge/training/callbacks.py"))
        launch(1, folder, ("one", "called-real"), module="tests.megatron.attach.own_training")
        launch(2, folder, ("pp2", "called-real-pp2"), module="tests.megatron.attach.own_training")
    return folder


@pytest.mark.parametrize(("name", "by_hand"), [("called-real", "one"), ("called-real-pp2", "pp2")])
def test_megatron_bridges_own_callbacks_trace_what_a_line_by_hand_does(runs: Path, name: str, by_hand: str) -> None:
    assert exit_codes(runs, name) == {"0"}
    assert different(runs, name, other=by_hand) == []
    assert load(runs / name / "run.json")["batches"] == load(runs / by_hand / "run.json")["batches"]


def run(module: str, folder: Path, mode: str, environ: dict[str, str]) -> dict[str, Any]:
    """Starts a Python of its own, since TransformerEngine must be imported before Megatron-core; gives its answer."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.integrations.{module}", mode, str(folder)],
        cwd=ROOT,
        env={**os.environ, **DETERMINISTIC, "LOCAL_RANK": "0", "HF_HUB_OFFLINE": "1", **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said: dict[str, Any] = json.loads((folder / f"{mode}.json").read_text(encoding="utf-8"))
    return said


def test_ms_swifts_own_trainer_replays_without_an_engine_and_is_traced(tmp_path: Path) -> None:
    launch(1, tmp_path, ("one",), module="tests.megatron.attach.own_training")
    said = {}
    for mode in ("dump", "mock"):
        settings, run_file = tmp_path / f"{mode}.yaml", tmp_path / f"{mode}-run.json"
        settings.write_text(
            f"rollout_mock: {{enable: true, mode: {mode}, dump_dir: {tmp_path / 'recording'}}}\n", encoding="utf-8"
        )
        keys = {"last_step": 7, "trace": {"level": "full", "kinds": "all"}, "pad_token_id": 0, "vocab_size": 64}
        keys |= {"initial_state": str(tmp_path / "one" / "trace"), "output_dir": str(tmp_path / f"traced-{mode}")}
        run_file.write_text(json.dumps(keys), encoding="utf-8")
        environ = {"MOCK_SCHEDULER_MS_SWIFT": str(settings), "MOCK_SCHEDULER_RUN": str(run_file)}
        said[mode] = run("ms_swift_run", tmp_path, mode, {"PYTHONPATH": f"{ROOT}:{BUILT}:{TEXT}:{SWIFT}", **environ})
    assert said["dump"]["calls"] == ["engine", *("weights", "infer", "score") * 2]
    assert said["mock"]["calls"] == []
    assert said["mock"]["ledger"]["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    live, replayed = (torch.load(tmp_path / f"{mode}.pt", weights_only=False) for mode in ("dump", "mock"))
    assert len(live) == 2
    assert {sample["class"] for sample in live[0][0]} == {"GRPOSample"}
    assert bits(replayed) == bits(live)
    for mode in ("dump", "mock"):
        assert different(tmp_path, f"traced-{mode}") == []


@pytest.mark.skipif(not SOURCES, reason="set MEGATRON_LM to Megatron-LM's sources: no wheel has megatron/rl")
def test_megatron_rls_own_functions_collect_and_replay(tmp_path: Path) -> None:
    said = {}
    only = tmp_path / "sources"  # their tests are a package, and would be found in place of ours
    only.mkdir()
    (only / "megatron").symlink_to(Path(SOURCES) / "megatron")
    for mode in ("dump", "mock"):
        path = f"{only}:{ROOT}:{BUILT}:{TEXT}"
        said[mode] = run("megatron_rl_run", tmp_path, mode, {"PYTHONPATH": path})
    assert said["dump"]["calls"] == [*("inference mode", "generator") * 2, "evaluation", "shutdown"]
    assert said["mock"]["calls"] == ["shutdown"]
    assert said["mock"]["ledger"]["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    for key in ("rollouts", "stats", "trajectories", "records"):
        assert said["mock"][key] == said["dump"][key], key
    assert said["mock"]["classes"] == ["FinishedRequestRecord", "RolloutGroup", "TokenRollout"]
