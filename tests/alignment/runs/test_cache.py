"""Fingerprints of runs: what they are of, and what keeps a finished run from being taken again."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.alignment.runs import cache
from mock_scheduler.alignment.runs.cache import (
    Fingerprint,
    NotReusable,
    Reusable,
    compute_fingerprint,
    find_cached,
    save_fingerprint,
)
from mock_scheduler.alignment.runs.folder_digests import digest_checkpoint, digest_folder
from mock_scheduler.support import sources
from mock_scheduler.support.digests import JSON, seal
from mock_scheduler.support.sources import digest_sources
from tests.alignment.finished_runs import finish, plan_run
from tests.recording.recordings import record

MACHINE = {"processor": "A", "cpu_capability": "AVX2"}


def fingerprint_of(run: PlannedRun, *, machine: str = "A", sources: JSON = "s", threads: str = "1") -> Fingerprint:
    return compute_fingerprint(
        run,
        code={"sources": sources},
        machine={**MACHINE, "processor": machine},
        environ={"OMP_NUM_THREADS": threads},
        read={"recording": "r"},
    )


@pytest.fixture
def run(tmp_path: Path) -> PlannedRun:
    """A run that completed and was kept."""
    run = plan_run(tmp_path, "tp2")
    finish(run)
    save_fingerprint(run.output_dir, fingerprint_of(run), elapsed_s=12.5)
    return run


def reason_of(run: PlannedRun, wanted: Fingerprint | None = None) -> str:
    found = find_cached(run.output_dir, wanted or fingerprint_of(run))
    assert isinstance(found, NotReusable)
    assert found.was_there
    return found.reason


def test_the_same_run_is_found_with_its_time(run: PlannedRun) -> None:
    assert find_cached(run.output_dir, fingerprint_of(run)) == Reusable(elapsed_s=12.5)


def test_folders_names_and_the_align_section_are_no_part_of_a_run(tmp_path: Path, run: PlannedRun) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = plan_run(elsewhere, "other-name", "align.at_once=3")
    assert fingerprint_of(other).digest == fingerprint_of(run).digest
    assert "config.seed" in fingerprint_of(run).keys


@pytest.mark.parametrize(
    ("overrides", "change"),
    [
        (["seed=43"], "config.seed was 42 and is 43"),
        (["parallel.data_parallel_size=2"], "config.parallel.data_parallel_size was 1 and is 2"),
        (
            ["trace.kinds=[gradient]"],
            "config.trace.kinds was ['initial', 'gradient', 'parameter', 'weight'] and is ['gradient']",
        ),
        (
            ["+system_envs.NCCL_ALGO=Ring"],
            "config.system_envs was {} and is not set; config.system_envs.NCCL_ALGO was not set and is Ring",
        ),
    ],
)
def test_a_key_that_has_changed_is_named(tmp_path: Path, run: PlannedRun, overrides: list[str], change: str) -> None:
    assert reason_of(run, fingerprint_of(plan_run(tmp_path, "tp2", *overrides))) == change


def test_code_machine_and_settings_are_part_of_a_run(run: PlannedRun) -> None:
    newer = replace(run, versions={"python": "3.11.2", "torch": "2.14.1"}, entry="my.kernel")
    assert reason_of(run, fingerprint_of(newer)) == (
        "code.torch was 2.13.0 and is 2.14.1; entry was pipelines.agentic and is my.kernel"
    )
    assert reason_of(run, fingerprint_of(run, machine="B")) == "machine.processor was A and is B"
    assert reason_of(run, fingerprint_of(run, threads="4")) == "environ.OMP_NUM_THREADS was 1 and is 4"


def test_a_change_of_many_keys_names_the_first(tmp_path: Path, run: PlannedRun) -> None:
    other = plan_run(tmp_path, "tp2", "seed=1", "max_steps=3", "gamma=0.5", "ppo_epochs=2", "pg_clip=0.3")
    assert reason_of(run, fingerprint_of(other)) == (
        "config.gamma was 1.0 and is 0.5; config.max_steps was 2 and is 3; config.pg_clip was 0.2 and is 0.3; "
        "and 2 more"
    )


def test_digests_are_not_spelled_out(run: PlannedRun) -> None:
    save_fingerprint(run.output_dir, fingerprint_of(run, sources="a" * 64), elapsed_s=1.0)
    assert reason_of(run, fingerprint_of(run, sources="b" * 64)) == "code.sources has changed"


def test_sources_that_have_changed_are_named(run: PlannedRun) -> None:
    """Only ``code.sources has changed`` was said, of hundreds of files."""
    before: dict[str, JSON] = {f"pipelines/{name}.py": "1" for name in "abcdef"}
    save_fingerprint(run.output_dir, fingerprint_of(run, sources=before), elapsed_s=1.0)
    now = {**before, "pipelines/b.py": "2"}
    assert reason_of(run, fingerprint_of(run, sources=now)) == "code.sources has changed: pipelines/b.py"
    del now["pipelines/c.py"]
    now |= {"pipelines/c2.py": "1", "pipelines/e.py": "2", "pipelines/f.py": "2"}
    assert reason_of(run, fingerprint_of(run, sources=now)) == (
        "code.sources has changed: pipelines/b.py, pipelines/c.py (gone), pipelines/c2.py (new), and 2 more"
    )


def edit(path: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_bytes(content) and None


def flip_in_header(folder: Path) -> None:
    """One letter of a tensor's digest in a trace's header."""
    path = folder / "trace" / "step_000001" / "rank_00000.part_000.safetensors"
    content = bytearray(path.read_bytes())
    place = content.index(b"sha256") + 20
    content[place] ^= 1
    path.write_bytes(content)


def truncate(folder: Path) -> None:
    path = folder / "trace" / "step_000000" / "rank_00000.part_000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def forget(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (edit("config.yaml", b"seed: 2\n"), "config.yaml has changed since the run completed"),
        (edit("metrics.jsonl", b"{ }\n"), "metrics.jsonl has changed since the run completed"),
        (flip_in_header, "trace/step_000001/rank_00000.part_000.safetensors has changed since the run completed"),
        (truncate, "trace/step_000000/rank_00000.part_000.safetensors has changed since the run completed"),
        (forget("run.json"), "run.json is gone"),
        (
            forget("trace/step_000001/rank_00000.part_000.safetensors"),
            "trace/step_000001/rank_00000.part_000.safetensors is gone",
        ),
        (edit("trace/step_000001/extra", b""), "trace/step_000001/extra is new since the run completed"),
        (
            forget("fingerprint.json"),
            "there is no fingerprint.json: the run did not complete, or its files were changed",
        ),
        (
            edit("fingerprint.json", b"{"),
            "fingerprint.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        ),
    ],
)
def test_a_run_that_does_not_lie_there_as_it_completed_is_never_taken(
    run: PlannedRun, damage: Callable[[Path], None], reason: str
) -> None:
    damage(run.output_dir)
    assert reason_of(run) == reason


def test_an_edited_or_newer_fingerprint_is_never_taken(run: PlannedRun) -> None:
    path = run.output_dir / "fingerprint.json"
    document = json.loads(path.read_text())
    document["elapsed_s"] = 1.0
    path.write_text(json.dumps(document))
    assert reason_of(run) == "fingerprint.json does not match its digest"
    del document["digest"]
    path.write_text(json.dumps(seal({**document, "format_version": 5})))
    assert reason_of(run) == "fingerprint.json has version 5, expected 4"


@pytest.mark.parametrize("place", [0, 1 << 23, (1 << 24) + 5])
def test_a_changed_byte_of_long_metrics_is_found_wherever_it_lies(run: PlannedRun, place: int) -> None:
    """Of files beyond 16 MiB the two ends were looked at, and a run with other metrics was taken again."""
    path = run.output_dir / "metrics.jsonl"
    content = bytearray(b" " * ((1 << 24) + 6))
    path.write_bytes(content)
    save_fingerprint(run.output_dir, fingerprint_of(run), elapsed_s=12.5)
    assert isinstance(find_cached(run.output_dir, fingerprint_of(run)), Reusable)
    content[place] = 0
    path.write_bytes(content)
    assert reason_of(run) == "metrics.jsonl has changed since the run completed"


def test_what_cannot_be_read_has_the_run_made_anew(run: PlannedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be looked into ended the alignment instead."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "code/record.json")

    monkeypatch.setattr(cache, "describe_run_files", refuse)
    assert reason_of(run) == "code/record.json cannot be read: Permission denied"


def test_hidden_files_and_logs_do_not_count(run: PlannedRun) -> None:
    for name in ("run.log", "trace/.left.tmp"):
        (run.output_dir / name).write_text("text")
    assert isinstance(find_cached(run.output_dir, fingerprint_of(run)), Reusable)


def test_a_run_that_was_never_made_says_so(tmp_path: Path) -> None:
    run = plan_run(tmp_path, "new")
    found = find_cached(run.output_dir, fingerprint_of(run))
    assert found == NotReusable(reason="it has not run yet", was_there=False)


def test_a_checkpoint_is_told_by_its_files_and_when_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "step_000001" / "policy" / "__0_0.distcp"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"weights")
    os.utime(path, ns=(5, 5))
    before = digest_checkpoint(tmp_path / "step_000001")
    assert before == digest_checkpoint(tmp_path / "step_000001")
    os.utime(path, ns=(5, 6))
    assert digest_checkpoint(tmp_path / "step_000001") != before
    path.write_bytes(b"Weights")
    os.utime(path, ns=(5, 5))
    assert digest_checkpoint(tmp_path / "step_000001") != before


def test_a_recording_is_told_by_what_its_files_say(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    record(first, [0, 1])
    before = digest_folder(first)
    assert before == digest_folder(first)
    record(second, [0])
    assert digest_folder(second) != before
    next((first / "train").iterdir()).unlink()
    assert digest_folder(first) != before


def test_sources_are_told_by_their_paths_and_content(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "sub").mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "sub" / "b.py").write_text("2")
    (package / "notes.txt").write_text("3")
    (package / "c.h").write_text("1")
    one, two = (hashlib.sha256(text).hexdigest() for text in (b"1", b"2"))
    assert digest_sources([package]) == {"package/a.py": one, "package/c.h": one, "package/sub/b.py": two}
    other = tmp_path / "other" / "package"
    other.mkdir(parents=True)
    (other / "a.py").write_text("2")
    assert digest_sources([package, other], [package / "a.py"]) == {
        "a.py": one,
        "package/a.py": f"{one} {two}",
        "package/c.h": one,
        "package/sub/b.py": two,
    }


def test_a_source_is_read_again_where_its_file_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, read = tmp_path / "package", []
    package.mkdir()
    (package / "a.py").write_text("1")
    original = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or original(path))
    first = digest_sources([package])
    assert digest_sources([package]) == first
    assert read == ["a.py"] * 2  # it has only just changed
    monkeypatch.setattr(sources.time, "time_ns", lambda: (package / "a.py").stat().st_ctime_ns + 3 * 10**9)
    for _ in range(3):
        assert digest_sources([package]) == first
    assert read == ["a.py"] * 3
    (package / "a.py").write_text("2")
    assert digest_sources([package]) == {"package/a.py": hashlib.sha256(b"2").hexdigest()}


def test_a_secret_value_is_known_by_its_digest_under_the_users_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MY_PATTERN", "hunter2")
    changes = ["+system_envs.MY_TOKEN=hunter2", "trace.patterns=['${oc.env:MY_PATTERN}']"]
    run = plan_run(tmp_path, "tp2", *changes)
    finish(run)
    save_fingerprint(run.output_dir, fingerprint_of(run), elapsed_s=1.0)
    assert "hunter2" not in (run.output_dir / "fingerprint.json").read_text()
    assert find_cached(run.output_dir, fingerprint_of(plan_run(tmp_path, "tp2", *changes))) == Reusable(elapsed_s=1.0)
    other = plan_run(tmp_path, "tp2", "+system_envs.MY_TOKEN=hunter3", changes[1])
    assert reason_of(run, fingerprint_of(other)) == "config.system_envs.MY_TOKEN has changed"
    monkeypatch.setenv("MY_PATTERN", "hunter3")
    assert reason_of(run, fingerprint_of(plan_run(tmp_path, "tp2", *changes))) == "config.trace.patterns has changed"
