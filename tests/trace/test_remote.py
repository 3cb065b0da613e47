"""Runs and traces in a bucket are compared as local ones are, and fetched no further than they are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import mock_scheduler as ms
from mock_scheduler.comparison.pairing.selection import EVERYTHING
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.errors import ConfigError, MockSchedulerError, TraceError
from mock_scheduler.report.json_file import comparison_to_json
from mock_scheduler.run_folder.inputs import parse_selection
from mock_scheduler.support import fetched_folders
from mock_scheduler.support.fetched_folders import find_location
from mock_scheduler.support.node_cache import FOLDER_VARIABLE
from mock_scheduler.trace.remote import open_location
from mock_scheduler.verdict.compare_runs import compare_paths
from mock_scheduler.verdict.replicas import check_replicas_at
from tests.comparison.walk.test_shared_out import OtherProcesses
from tests.comparison.walk.test_walk import LAYER, WEIGHT, changed, make_run, noise
from tests.recording.processes import run_in_child
from tests.recording.recordings import record


@dataclass
class Bucket:
    """A store in memory; notes how often, and of which, whole files and ranges were asked for."""

    whole: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def upload(self, folder: Path, name: str) -> str:
        """Puts a folder, or a file, into the bucket; returns its URL."""
        paths = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else [folder]
        for path in paths:
            below = "" if path == folder else f"/{path.relative_to(folder).as_posix()}"
            MemoryFileSystem().pipe_file(f"/bucket/{name}{below}", path.read_bytes())
        return f"memory://bucket/{name}"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    found = Bucket()
    get_file, cat_file = MemoryFileSystem.get_file, MemoryFileSystem.cat_file

    def noted_get(self: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> Any:
        found.whole.append(path.partition("bucket/")[2])
        return get_file(self, path, *arguments, **options)

    def noted_cat(self: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> Any:
        found.ranges.append(path.partition("bucket/")[2])
        return cat_file(self, path, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", noted_get)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", noted_cat)
    # So that these small files have more than what is asked for first.
    monkeypatch.setattr(fetched_folders, "_HEADER_BYTES", 64)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "cache"))
    yield found
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Three steps; the candidate has another gradient and one tensor more, and its ranks disagree about a copy."""
    run = replace(make_run(), steps=3)
    gradient = run.tensors["gradient", WEIGHT]
    other = run.with_tensor("gradient", WEIGHT, changed(gradient * (1 + 2.0**-20), (3, 2), 0.5))
    other = other.with_tensor("activation", f"{LAYER}.more", noise("more", 3))
    other = replace(other, copies={(1, LAYER): changed(run.tensors["activation", LAYER], (1, 1), 2.0**-10)})
    return run.write(tmp_path / "a" / "trace"), other.write(tmp_path / "b" / "trace")


def test_a_comparison_in_a_bucket_is_that_of_the_folders(folders: tuple[Path, Path], bucket: Bucket) -> None:
    urls = [bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True)]
    here, there = compare_paths(*folders), compare_paths(*urls)
    assert there.verdict == here.verdict
    assert there.bounds == here.bounds
    assert [side.name for side in (there.baseline, there.candidate)] == ["a", "b"]
    assert [side.location for side in (there.baseline, there.candidate)] == urls
    assert len(bucket.whole) == len(set(bucket.whole)) == 12
    said = [comparison_to_json(result) for result in (here, there)]
    for side, url in zip(("baseline", "candidate"), urls, strict=True):
        assert said[1].pop(side) == {**said[0].pop(side), "path": url}
    assert said[1] == said[0]
    # The node has kept all of it.
    asked = len(bucket.whole), len(bucket.ranges)
    assert compare_paths(*urls).verdict == there.verdict
    assert (len(bucket.whole), len(bucket.ranges)) == asked


def test_tasks_fetch_their_steps_and_the_driver_what_it_explains(folders: tuple[Path, Path], bucket: Bucket) -> None:
    urls = [bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True)]
    spread = OtherProcesses()
    there = compare_paths(*urls, spread=spread)
    assert spread.num_tasks == 3
    assert there.verdict == compare_paths(*folders).verdict
    # One process has one cache here, from which the driver takes what tasks have fetched.
    assert len(bucket.whole) == len(set(bucket.whole)) == 12


def test_copies_in_a_bucket_are_those_of_the_folder(folders: tuple[Path, Path], bucket: Bucket) -> None:
    url = bucket.upload(folders[1], "b/trace")
    here = check_replicas_at(folders[1])
    assert len(here.conflicts) == 3
    assert check_replicas_at(url) == replace(here, path=url)
    assert check_replicas_at(url, spread=OtherProcesses()) == replace(here, path=url)
    assert check_replicas_at(url, verify=True) == replace(here, path=url)


def test_steps_that_are_not_chosen_are_not_fetched(folders: tuple[Path, Path], bucket: Bucket) -> None:
    urls = [bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True)]
    selection = replace(EVERYTHING, steps=StepRanges.parse("2"))
    there, here = (compare_paths(*pair, selection=selection).verdict for pair in (urls, folders))
    assert (there.kind, there.tensors, there.first) == (here.kind, here.tensors, here.first)
    asked = {name.split("/")[2] for name in (*bucket.whole, *bucket.ranges)}
    # An update may be held to the moments before it.
    assert asked == {"step_000001", "step_000002"}


def test_only_headers_are_fetched_where_no_tensor_is_read(folders: tuple[Path, Path], bucket: Bucket) -> None:
    with ms.open_trace(bucket.upload(folders[0], "a/trace")) as trace:
        assert trace.steps == (0, 1, 2)
        assert trace.location == "memory://bucket/a/trace"
        assert bucket.whole == []
        tensor = trace.tensor(trace.key(1, "gradient", WEIGHT))
        assert sorted(bucket.whole) == [f"a/trace/step_000001/rank_0000{rank}.part_000.safetensors" for rank in (0, 1)]
    with ms.open_trace(folders[0]) as trace:
        assert tensor.equal(trace.tensor(trace.key(1, "gradient", WEIGHT)))


def test_tensors_of_two_steps_lie_on_the_disk_and_nothing_is_left(
    folders: tuple[Path, Path], bucket: Bucket, tmp_path: Path
) -> None:
    with open_location(bucket.upload(folders[0], "a/trace")) as folder:
        whole = []
        for step in range(3):
            for path in sorted((folder / f"step_{step:06d}").iterdir()):
                fetched_folders.complete(path)
            whole.append(
                [
                    path.name
                    for path in sorted(folder.iterdir())
                    if (path / "rank_00001.part_000.safetensors").read_bytes()
                    == (folders[0] / path.name / "rank_00001.part_000.safetensors").read_bytes()
                ]
            )
    steps = [f"step_{step:06d}" for step in range(3)]
    assert whole == [steps[:1], steps[:2], steps[1:]]
    assert list((tmp_path / "cache" / "folders").iterdir()) == []


def test_the_folder_of_a_killed_comparison_is_removed_by_the_next(
    folders: tuple[Path, Path], bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_folders, "_MOMENT_S", -60.0)
    url = bucket.upload(folders[0], "a/trace")

    def die() -> None:
        with open_location(url):
            os._exit(9)

    assert run_in_child(die) == ""
    (left,) = (tmp_path / "cache" / "folders").iterdir()
    with open_location(url), open_location(url) as folder:
        assert (folder / "step_000000").is_dir()
        assert len(list((tmp_path / "cache" / "folders").iterdir())) == 2
        assert not left.exists()


def test_sketches_and_metrics_are_compared_too(tmp_path: Path, bucket: Bucket) -> None:
    run = make_run()
    changed_run = run.with_tensor("gradient", WEIGHT, changed(run.tensors["gradient", WEIGHT], (0, 0), 1.0))
    for name, one in (("a", run), ("b", changed_run)):
        one.write(tmp_path / name, is_sketch=True)
        (tmp_path / f"{name}.jsonl").write_text(
            f'{{"step": 0, "metrics": {{"loss": {ord(name)}}}}}\n', encoding="utf-8"
        )
    for ending in ("", ".jsonl"):
        paths = [tmp_path / f"{name}{ending}" for name in "ab"]
        urls = [bucket.upload(path, path.name) for path in paths]
        here, there = compare_paths(*paths), compare_paths(*urls)
        assert there.verdict == here.verdict
        assert there.candidate.kind == here.candidate.kind
        assert not there.passes


def test_recordings_are_compared_too(tmp_path: Path, bucket: Bucket) -> None:
    for name, steps in (("a", (0, 1)), ("b", (0, 1)), ("c", (0, 1, 2))):
        record(tmp_path / name, steps).close()
    urls = [bucket.upload(tmp_path / name, name) for name in "abc"]
    for candidate in (1, 2):
        here = compare_paths(tmp_path / "a", tmp_path / "abc"[candidate])
        there = compare_paths(urls[0], urls[candidate])
        assert (there.verdict, there.candidate.location) == (here.verdict, urls[candidate])
    assert not there.passes


def refused(kind: type[MockSchedulerError], *urls: str, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        compare_paths(*urls, **options)
    assert "cache" not in str(caught.value)
    return str(caught.value)


def test_messages_name_urls(folders: tuple[Path, Path], bucket: Bucket) -> None:
    first, second = (bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True))
    assert refused(ConfigError, first, first) == f"{first} and {first} are the same folder; give two different ones"
    absent = "memory://bucket/none"
    assert refused(ConfigError, absent, f"{absent}2") == f"{absent} does not exist\n{absent}2 does not exist"
    steps = parse_selection(steps=StepRanges.parse("7"))
    assert refused(ConfigError, first, second, selection=steps) == (
        "steps 7: there is no such step; a has steps 0-2; b has steps 0-2"
    )
    MemoryFileSystem().rm_file("/bucket/b/trace/step_000001/rank_00001.part_000.safetensors")
    assert refused(TraceError, first, second).startswith(f"{second}/step_000001: no file of global rank 1 of 2")
    assert refused(ConfigError, "nowhere://x/y", second).startswith("nowhere://x/y: Protocol not known: nowhere")


def test_a_protocol_is_spelled_in_any_case(folders: tuple[Path, Path], bucket: Bucket) -> None:
    url = bucket.upload(folders[0], "a")
    with open_location(url.replace("memory", "MEMORY")) as place:
        assert find_location(place) == url
    assert refused(ConfigError, "file://host/x", url) == (
        "'file://host/x' names no local folder: write file:///absolute/path, or the path without file://"
    )


def test_a_changed_byte_is_named_with_its_url(folders: tuple[Path, Path], bucket: Bucket) -> None:
    name = "a/trace/step_000001/rank_00001.part_000.safetensors"
    first, second = (bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True))
    data = bytearray(MemoryFileSystem().cat_file(f"/bucket/{name}"))
    data[-1] ^= 1
    MemoryFileSystem().pipe_file(f"/bucket/{name}", bytes(data))
    assert refused(TraceError, first, second).startswith(f"memory://bucket/{name}: ")


def test_a_task_names_the_url_too(folders: tuple[Path, Path], bucket: Bucket) -> None:
    """Of a tensor that it alone reads: its folder is gone when its message is shown."""
    name = "a/trace/step_000001/rank_00001.part_000.safetensors"
    first, second = (bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True))
    data = bytearray(MemoryFileSystem().cat_file(f"/bucket/{name}"))
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    MemoryFileSystem().pipe_file(f"/bucket/{name}", bytes(data))
    spread = OtherProcesses()
    assert refused(TraceError, first, second, spread=spread).startswith(f"memory://bucket/{name}: ")
    assert spread.num_tasks == 3


def test_a_store_that_refuses_is_named(
    folders: tuple[Path, Path], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (bucket.upload(folder, f"{name}/trace") for folder, name in zip(folders, "ab", strict=True))

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(MemoryFileSystem, "get_file", refuse)
    name = "step_000000/rank_00000.part_000.safetensors"
    assert refused(TraceError, first, second) == (
        f"cannot read {first}/{name}: PermissionError: AccessDenied. Check the bucket, the credentials and the "
        "endpoint (AWS_ENDPOINT_URL for S3), and the disk of this node"
    )


def test_an_alignment_in_a_bucket_is_told_with_its_runs(bucket: Bucket, tmp_path: Path) -> None:
    for name in ("align.json", "baseline/run.json", "tp2/run.json"):
        (tmp_path / "align" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "align" / name).write_text("{}", encoding="utf-8")
    url = bucket.upload(tmp_path / "align", "align")
    shutil.rmtree(tmp_path / "align")
    assert refused(ConfigError, url, "memory://bucket/x").splitlines()[0] == (
        f"{url} is the folder of an alignment, not of a run; give one of its runs, such as {url}/tp2: baseline, tp2"
    )
