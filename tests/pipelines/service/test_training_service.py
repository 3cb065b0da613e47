"""A run that trains in a service computes what a run that trains itself does, to the last bit; others are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from mock_scheduler.adapters.nexrl.comparison.report import compare_dumps, describe_verdict
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.errors import ConfigError, ExitCode, ServiceError
from mock_scheduler.recording.step.step_file import decode_step
from mock_scheduler.remote import TrainingClient, encode_datums, with_values
from mock_scheduler.remote.service_file import ServiceAccess, make_token, read_service_file, write_service_file
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import TrainingServiceConfig
from pipelines.training import find_service
from tests.pipelines.conftest import TinyAlignment
from tests.pipelines.tiny_runs import ROOT, read_json, run_cli, run_tiny, write_tiny_config
from tests.programs import run_program

pytestmark = pytest.mark.timeout(900)  # the first test may pay for an alignment of eight runs

SERVICE_STARTS_S = 240.0


@contextmanager
def serving(
    configs: Path, folder: Path, overrides: Sequence[str], environ: Mapping[str, str] | None = None
) -> Iterator[ServiceAccess]:
    """A service of the tiny configuration. It is ended where it has not ended by itself."""
    arguments = ["-m", "mock_scheduler.cli", "launch", "--config-path", str(configs), "tiny"]
    options = ["--entry", "pipelines.service.server", f"output_dir={folder}", *overrides]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *arguments, *options],
            cwd=ROOT,
            env={**os.environ, **(environ or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield wait_for_file(folder / "service.json", process)
            assert process.wait(timeout=120.0) == 0, Path(log.name).read_text()
            assert not (folder / "service.json").exists()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(timeout=60.0)


def wait_for_file(path: Path, process: subprocess.Popen[bytes]) -> ServiceAccess:
    """The way to a starting service, once its file is there."""
    ends_s = time.monotonic() + SERVICE_STARTS_S
    while time.monotonic() < ends_s and process.poll() is None:
        if path.is_file():
            return read_service_file(path, url=json.loads(path.read_text())["url"])
        time.sleep(0.05)
    raise AssertionError(f"no service within {SERVICE_STARTS_S} s (exit code {process.poll()})")


def train_there(
    configs: Path, folder: Path, recording: Path, service: ServiceAccess, *more: str
) -> subprocess.CompletedProcess[str]:
    mock = ["rollout_mock.enable=true", "rollout_mock.mode=mock", f"rollout_mock.dump_dir={recording}"]
    there = [f"training_service.url={service.url}", f"training_service.service_file={service.source}"]
    return run_tiny(configs, [*mock, f"output_dir={folder}", *there, *more])


def test_a_run_in_a_service_equals_the_run_itself(tiny_alignment: TinyAlignment, tmp_path: Path) -> None:
    """One service, which first refuses what is not its run, and is none the worse for it."""
    folder = tmp_path / "remote"
    configs, recording = tiny_alignment.configs, tiny_alignment.recording
    dump = [*REMOTE_DUMP, f"debug.dump_dir={tmp_path / 'dump'}"]
    baseline = tiny_alignment.folder / "baseline"
    kinds = yaml.safe_load((baseline / "config.yaml").read_text())["trace"]["kinds"]
    with serving(configs, folder, ["trace.level=full", f"trace.kinds=[{','.join(kinds)}]"]) as service:
        other = train_there(configs, tmp_path / "other", recording, service, "pg_clip=0.3")
        assert other.returncode == 5
        assert (
            f"the service at {service.url} is not this run's:\n  - pg_clip: 0.3 here, 0.2 in the service\n"
            in other.stderr
        )
        _refuses_wrong_requests(service, recording)
        finished = train_there(configs, folder, recording, service, *dump)
        assert finished.returncode == 0, finished.stderr
    ledger = read_json(folder / "ledger.json")
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "config.yaml", "service_config.yaml", "remote.log"} <= {path.name for path in left}
    assert [path for path in left if service.token.encode() in path.read_bytes()] == []
    assert service.token not in finished.stdout + finished.stderr + other.stdout + other.stderr
    assert ledger["built"] == {"engine": 0, "environment": 0, "scheduler": 0}
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [
        "datums",
        "prepared_trajectories",
        "training_metrics",
    ]
    compared = run_program("mock_scheduler.cli", ["compare", str(baseline), str(folder)])
    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert compared.stdout.startswith("identical: remote against baseline")


def _refuses_wrong_requests(service: ServiceAccess, recording: Path) -> None:
    client = TrainingClient(service, timeout_s=30.0)
    batch, _ = decode_step((recording / "train" / "step_000000.safetensors").read_bytes())
    values = batch.rollout_logprobs.double()
    datums = with_values(batch, values, values)
    with pytest.raises(ServiceError, match=r"step 1 was sent, and step 0 comes next \(status 409\)"):
        client.train(datums, step=1)
    with pytest.raises(ServiceError, match=r"(?s)advantages is absent.*\(status 400\)"):
        client._ask("POST", "/v1/steps/0/train", _document(batch, client._run_id), max_answer_bytes=1000)
    with pytest.raises(ServiceError, match=r"there are 15 trajectories, and rollout_batch_size is 16 \(status 400\)"):
        client.train(datums.select(range(15)), step=0)
    with pytest.raises(ServiceError, match=r"there is no POST /v2/steps \(status 404\)"):
        client._ask("POST", "/v2/steps", max_answer_bytes=1000)
    assert client.service().next_step == 0


def _document(batch: RolloutBatch, run_id: str) -> bytes:
    return encode_datums(batch, step=0, run_id=run_id)


@pytest.mark.all
def test_a_service_that_nobody_asks_ends_on_all_ranks_and_says_so(tmp_path: Path) -> None:
    configs = write_tiny_config(tmp_path)
    options = ["--entry", "pipelines.service.server", "training_service.timeout_s=1", f"output_dir={tmp_path / 'run'}"]
    options.append("parallel.tensor_model_parallel_size=2")
    finished = run_cli("launch", configs, options)
    assert finished.returncode == 5
    assert "no request came for 1 s (training_service.timeout_s); 0 steps were trained" in finished.stderr


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("training_service.url=ftp://x", "training_service.url: is 'ftp://x', expected http://HOST:PORT"),
        ("trace.level=full", "trace.level is full; set it to off"),
        ("save_steps=1", "save_steps is 1; set it to 0"),
        ("parallel.tensor_model_parallel_size=2", "parallel is tp2 pp1 dp1; set it to tp1 pp1 dp1"),
        ("rollout_mock.enable=false", "its rollouts must be recorded ones: set rollout_mock.enable=true"),
    ],
)
def test_a_client_is_not_asked_for_what_only_the_service_has(tmp_path: Path, override: str, problem: str) -> None:
    configs = write_tiny_config(tmp_path)
    mock = ["rollout_mock.enable=true", "rollout_mock.mode=mock", "rollout_mock.dump_dir=/nowhere"]
    url = [] if override.startswith("training_service") else ["training_service.url=http://127.0.0.1:1"]
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", config_path=configs, overrides=[*mock, *url, override])
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["training_service.url=http://me:secret@node7:80"], "url: has a user or a password in it"),
        (["training_service.url='http://node7:80/\x1b[2J'"], "expected http://HOST:PORT"),
        (["training_service.service_file=x"], "service_file has no effect without url, the address of the service"),
        (["training_service.token_variable=X"], "token_variable has no effect without url"),
        (
            [f"training_service.{key}" for key in ("url=http://h:1", "service_file=x", "token_variable=X")],
            "service_file and token_variable are two places for one token; give one of them",
        ),
        (["training_service.url=http://h:1", "training_service.token_variable='a b'"], "is no name of a variable"),
    ],
)
def test_the_token_of_a_service_has_one_place(tmp_path: Path, overrides: list[str], problem: str) -> None:
    configs = write_tiny_config(tmp_path)
    mock = ["rollout_mock.enable=true", "rollout_mock.mode=mock", "rollout_mock.dump_dir=/nowhere"]
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", config_path=configs, overrides=[*mock, *overrides])
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "source", "name"),
    [
        ({}, "{folder}/service.json", "service"),
        ({"service_file": "{folder}/other.json"}, "{folder}/other.json", "other"),
        ({"token_variable": "OUR_TOKEN"}, "the variable OUR_TOKEN", "variable"),
    ],
)
def test_a_client_finds_the_token_where_its_configuration_says(
    tmp_path: Path, keys: dict[str, str], source: str, name: str
) -> None:
    url = "http://127.0.0.1:1"
    service = {"url": url, **{key: value.format(folder=tmp_path) for key, value in keys.items()}}
    config = PipelineConfig.model_construct(
        output_dir=str(tmp_path), training_service=TrainingServiceConfig.model_validate(service)
    )
    tokens = {place: make_token() for place in ("service", "other", "variable")}
    for place in ("service", "other"):
        write_service_file(tmp_path / f"{place}.json", url=url, token=tokens[place])
    access = find_service(config, {"OUR_TOKEN": tokens["variable"]}, url=url)
    assert access.source == source.format(folder=tmp_path)
    assert access.token == tokens[name]


REMOTE_DUMP = (
    "debug.enable_data_dump=true",
    "debug.remote_api_dump_options={prepared_trajectories: true, datums: true, training_metrics: true}",
)
OWN_DUMP = (
    "debug.enable_data_dump=true",
    "debug.dump_options={trajectory: true, old_log_probs: true, forward_data: true, loss: true}",
)


@pytest.mark.all
def test_scores_of_a_service_make_the_same_advantages(tmp_path: Path) -> None:
    """With a critic and a KL penalty in the reward, advantages are made of what the service's models say.

    And NexRL's comparison of all three dumps (its guide, 5.2) has something to compare in each of its sections.
    """
    configs = write_tiny_config(tmp_path)
    algorithm = ["adv_estimator=gae", "kl_in_reward.coef=0.05", "kl_in_reward.target=0.1", "kl_in_reward.horizon=32"]
    recording = tmp_path / "recording"
    record = ["rollout_mock.enable=true", "rollout_mock.mode=dump", f"rollout_mock.dump_dir={recording}"]
    trace = ["trace.level=full", "trace.kinds=all"]
    folder = tmp_path / "own"
    dump = [*OWN_DUMP, f"debug.dump_dir={tmp_path / 'own_dump'}"]
    own = run_cli("launch", configs, [*algorithm, *record, *trace, *dump, f"output_dir={folder}"])
    assert own.returncode == 0, own.stderr
    for layout in ([], ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]):
        folder = tmp_path / f"remote{len(layout)}"
        dumps = {name: tmp_path / f"{name}{len(layout)}" for name in ("api_dump", "weaver_dump")}
        environ = {
            "WEAVER_DEBUG_DUMP_ENABLED": "1",
            "WEAVER_DEBUG_DUMP_DIR": str(dumps["weaver_dump"]),
            "WEAVER_DEBUG_DUMP_OPTIONS": "forward_data,loss,is_loss_debug",
        }
        with serving(configs, folder, [*algorithm, *layout, *trace], environ) as service:
            dump = [*REMOTE_DUMP, f"debug.dump_dir={dumps['api_dump']}"]
            finished = train_there(configs, folder, recording, service, *algorithm, *dump)
            assert finished.returncode == 0, finished.stderr
        compared = run_program("mock_scheduler.cli", ["compare", str(tmp_path / "own"), str(folder)])
        # Without measured noise, nothing shows that what tensor parallelism rounds otherwise is rounding.
        expected = (ExitCode.SUSPECT, "suspect") if layout else (ExitCode.ALIGNED, "identical")
        found = compared.returncode, compared.stdout.partition(":")[0]
        assert found == expected, compared.stdout + compared.stderr
        assert not layout or "within uncalibrated bounds of theory: 42 metrics" in " ".join(compared.stdout.split())
        for step in range(2):
            report = compare_dumps(tmp_path / "own_dump", dumps["api_dump"], dumps["weaver_dump"], step)
            assert report.exit_code == 0, describe_verdict(report)
            compared_in = {section.name for section, item in report.items() if item.difference.num_compared}
            assert compared_in == SECTIONS


SECTIONS = {"TRAJECTORIES", "FORWARD_DATA_ALL", "LOSS_DATA_ALL", "IS_LOSS_DEBUG_ALL", "DATUMS_ANALYSIS"}
