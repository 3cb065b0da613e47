"""Alignments whose runs are jobs: of Ray on several nodes, of Slurm, of submitit's own processes.

Whatever is killed, the verdicts are those of an alignment on one machine, and no run is made twice that had ended.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import yaml

from mock_scheduler.launch.job import load_record
from tests.command_program.simulated import TP2, write_config
from tests.integrations import slurm_head
from tests.integrations.ray_head import ROOT
from tests.integrations.ray_nodes import Nodes, start_nodes
from tests.launch.process_tree import find_below
from tests.recording.s3_server import s3_server

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(1200)]

CANDIDATES = {"same": [], "tp2": [TP2], "lr": ["options.lr=0.02"]}
RUNS = ("baseline", *CANDIDATES)
FEW = {"num_perturbations": 0, "emulate": False, "equal_inputs": False, "referee": "never", "localise": False}
LIMIT_S = 600.0
BUCKET = "runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where runs are carried out. kill_node: kills the node that a job runs on."""

    executor: dict[str, Any]
    environ: dict[str, str]
    kill_node: Callable[[str], None]
    list_jobs: Callable[[], dict[str, str]]


def write(folder: Path, executor: dict[str, Any]) -> Path:
    (folder / "hold").mkdir(parents=True)
    held = str(ROOT / "tests" / "integrations" / "held_training.py")
    words = ["{python}", held, str(folder), "--num-processes", "{world_size}", "--lr", "{options.lr}"]
    align = {"proofs": {**FEW, "consequence": False}, "executor": executor}
    return write_config(folder, CANDIDATES, command=words, align=align, env={"PYTHONPATH": str(ROOT)})


def start(path: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    with (path.parent / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "mock_scheduler.cli", "align", path.stem, "--config-path", str(path.parent)],
            cwd=ROOT,
            env={**os.environ, **environ, "XDG_STATE_HOME": str(path.parent / "state")},
            stdout=log,
            stderr=log,
            text=True,
        )


def finish(driver: subprocess.Popen[str], path: Path) -> dict[str, str]:
    driver.wait(LIMIT_S)
    result = path.parent / "out" / "align" / "align.json"
    assert result.is_file(), said(path)
    content = json.loads(result.read_text(encoding="utf-8"))
    assert content["times"] is not None, said(path)
    return {item["name"]: item["verdict"] for item in content["candidates"]}


def said(path: Path) -> str:
    return (path.parent / "driver.log").read_text(encoding="utf-8")


def starts(path: Path) -> Counter[str]:
    try:
        return Counter((path.parent / "starts").read_text().splitlines())
    except FileNotFoundError:
        return Counter()


def wait_for(is_so: Callable[[], bool], path: Path) -> None:
    ends_s = time.monotonic() + LIMIT_S / 2
    while not is_so():
        assert time.monotonic() < ends_s, said(path)
        time.sleep(0.2)


def job_id(path: Path, name: str) -> str:
    record = load_record(path.parent / "out" / "align" / name)
    assert record is not None
    assert record.job_id is not None
    return record.job_id


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The verdicts of an alignment on this machine."""
    path = write(tmp_path_factory.mktemp("local"), {"kind": "local"})
    found = finish(start(path, {}), path)
    assert found == {"same": "identical", "tp2": found["tp2"], "lr": "diverged"}
    assert found["tp2"] in ("rounding", "suspect", "diverged")
    return found


@pytest.fixture(scope="module")
def slurm() -> Iterator[Place]:
    missing = slurm_head.find_missing() or ("" if importlib.util.find_spec("submitit") else "submitit is not installed")
    if missing:
        pytest.skip(missing)
    with slurm_head.start_slurm() as head:

        def kill_node(job: str) -> None:
            node = head.call("squeue", "--noheader", "--format=%N", f"--jobs={job}").strip()
            head.daemons[node].kill()
            head.daemons[node].wait()
            for process in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    variables = (process / "environ").read_bytes().split(b"\0")
                    own = f"SLURM_CONF={head.environ['SLURM_CONF']}".encode(), f"SLURMD_NODENAME={node}".encode()
                    if all(variable in variables for variable in own):
                        os.kill(int(process.name), signal.SIGKILL)

        def list_jobs() -> dict[str, str]:
            rows = head.call("squeue", "--noheader", "--states=all", "--format=%i %T").split("\n")
            return dict(row.split() for row in rows if row)  # type: ignore[misc]

        executor = {"kind": "slurm", "poll_s": 0.5, "parameters": {"mem_gb": 0.25}}
        yield Place(executor=executor, environ=head.environ, kill_node=kill_node, list_jobs=list_jobs)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Nodes with the address and the credentials of a bucket in their environment, as those of a cluster have them."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with s3_server(BUCKET), start_nodes(2) as nodes:
        yield nodes


def upload(folder: Path) -> str:
    """Copies a folder into the bucket; returns its URL."""
    url = f"s3://{BUCKET}/{folder.parent.name}"
    fsspec.filesystem("s3").put(str(folder), url, recursive=True)
    return url


@pytest.fixture(scope="module")
def ray(nodes: Nodes) -> Place:
    # Not by Ray's own client: Ray keeps the token of its import, and another module's cluster has another one.
    token = Path(nodes.environ["RAY_AUTH_TOKEN_PATH"]).read_text(encoding="utf-8")

    def ask(path: str) -> Any:
        url = f"{nodes.dashboard}/api/jobs/{path}"
        return httpx.get(url, headers={"Authorization": f"Bearer {token}"}).raise_for_status().json()

    def kill_node(job: str) -> None:
        nodes.kill(nodes.find(ask(job)["driver_node_id"]))

    def list_jobs() -> dict[str, str]:
        return {item["submission_id"]: item["status"] for item in ask("")}

    executor = {"kind": "ray", "address": nodes.dashboard, "poll_s": 0.5}
    return Place(executor=executor, environ=nodes.environ, kill_node=kill_node, list_jobs=list_jobs)


@pytest.fixture(scope="module")
def submitit() -> Place:
    pytest.importorskip("submitit")

    def kill_all(job: str) -> None:
        for process_id in find_below(int(job)):
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    executor = {"kind": "slurm", "cluster": "local", "poll_s": 0.5}
    return Place(executor=executor, environ={}, kill_node=kill_all, list_jobs=dict)


@pytest.mark.parametrize("kind", ["submitit", "slurm", "ray"])
def test_a_killed_driver_is_started_again_and_nothing_is_made_twice(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, expected: dict[str, str]
) -> None:
    place: Place = request.getfixturevalue(kind)
    path = write(tmp_path, place.executor)
    (tmp_path / "hold" / "tp2").touch()
    driver = start(path, place.environ)
    taken = tmp_path / "out" / "align" / "same" / "fingerprint.json"
    wait_for(lambda: (set(starts(path)) == {*RUNS} and taken.is_file()) or driver.poll() is not None, path)
    driver.kill()
    driver.wait()
    second = start(path, place.environ)
    wait_for(lambda: "goes on" in said(path), path)
    (tmp_path / "hold" / "tp2").unlink()
    assert finish(second, path) == expected
    assert starts(path) == dict.fromkeys(RUNS, 1)


@pytest.mark.parametrize("kind", ["submitit", "slurm", "ray"])
def test_a_run_whose_node_is_killed_is_made_again_and_no_other(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, expected: dict[str, str]
) -> None:
    place: Place = request.getfixturevalue(kind)
    path = write(tmp_path, place.executor)
    (tmp_path / "hold" / "tp2").touch()
    driver = start(path, place.environ)
    names = ("baseline", "same", "lr")
    files = [tmp_path / "out" / "align" / name / "fingerprint.json" for name in names]
    wait_for(lambda: all(file.is_file() for file in files) and "tp2" in starts(path), path)
    place.kill_node(job_id(path, "tp2"))
    wait_for(lambda: starts(path)["tp2"] == 2 or driver.poll() is not None, path)
    (tmp_path / "hold" / "tp2").unlink()
    assert finish(driver, path) == expected
    assert starts(path) == {**dict.fromkeys(names, 1), "tp2": 2}


@pytest.mark.parametrize("kind", ["submitit", "slurm", "ray"])
def test_an_interrupted_driver_cancels_its_jobs(tmp_path: Path, request: pytest.FixtureRequest, kind: str) -> None:
    place: Place = request.getfixturevalue(kind)
    path = write(tmp_path, place.executor)
    (tmp_path / "hold" / "baseline").touch()
    driver = start(path, place.environ)
    wait_for(lambda: "baseline" in starts(path), path)
    job = job_id(path, "baseline")
    driver.send_signal(signal.SIGINT)
    assert driver.wait(120) == 130, said(path)
    assert f"its job {job} of {'submitit' if kind == 'submitit' else kind} is cancelled" in " ".join(said(path).split())
    if kind != "submitit":
        assert place.list_jobs()[job] in ("CANCELLED", "STOPPED")
    wait_for(lambda: not any(str(tmp_path / "hold") in text or str(tmp_path) in text for text in command_lines()), path)


def command_lines() -> list[str]:
    """The command lines of all held trainings."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if "held_training.py" in text:
                found.append(text)
    return found


@pytest.mark.parametrize(
    ("executor", "says"),
    [
        ({"kind": "slurm", "cluster": "local", "parameters": {"nodes": 2}}, "parameters has nodes"),
        ({"kind": "slurm", "cluster": "local", "parameters": {"slurm_partitoin": "a"}}, "slurm_partitoin"),
        ({"kind": "ray", "address": "http://127.0.0.1:9"}, "no Ray dashboard answers there"),
        ({"kind": "ray"}, "align.executor.address is not set"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_runs(
    tmp_path: Path, executor: dict[str, Any], says: str
) -> None:
    path = write(tmp_path, executor)
    assert yaml.safe_load(path.read_text())["align"]["executor"] == executor
    driver = start(path, {})
    assert driver.wait(LIMIT_S) == 5
    assert says in " ".join(said(path).split())
    assert not (tmp_path / "out").exists()


def test_a_comparison_of_ray_tasks_has_every_figure_of_one_process(nodes: Nodes, tmp_path: Path) -> None:
    """A baseline and a candidate with another learning rate; and a candidate of two ranks by itself."""
    path = write(tmp_path, {"kind": "local"})
    assert finish(start(path, {}), path)["lr"] == "diverged"
    folder = tmp_path / "out" / "align"
    found = {}
    places = {"here": str(folder), "ray": str(folder), "bucket": upload(folder)}
    for name, options, environ in (
        ("here", [], {}),
        ("ray", ["--ray"], {**nodes.environ, "RAY_ADDRESS": nodes.address}),
        ("bucket", ["--ray"], {**nodes.environ, "RAY_ADDRESS": nodes.address}),
    ):
        for command, runs in (("compare", ["baseline", "lr"]), ("replicas", ["tp2"])):
            words = [sys.executable, "-m", "mock_scheduler.cli", command, *(f"{places[name]}/{run}" for run in runs)]
            done = subprocess.run(
                [*words, *options, "--json", "-"],
                cwd=ROOT,
                env={**os.environ, **environ},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            assert done.returncode == (1 if command == "compare" else 0), done.stderr
            found[name, command] = done.stdout
    assert found["here", "compare"] == found["ray", "compare"]
    assert found["here", "replicas"] == found["ray", "replicas"]
    for command in ("compare", "replicas"):
        assert found["bucket", command].replace(places["bucket"], places["here"]) == found["here", command]
