"""A run's files: metrics lines, foreign folders, and error.json of the first rank that failed."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mock_scheduler.errors import ConfigError, ContractError, ExitCode, TraceError
from mock_scheduler.support.run_output import (
    Clock,
    MetricsWriter,
    failure_exit_code,
    prepare_output_dir,
    remove_unfinished_files,
    report_failure,
)
from pipelines import run


def write_metrics(
    folder: Path, lines: list[tuple[int, dict[str, float]]], *, resumed_at: int | None = None
) -> list[str]:
    with MetricsWriter(folder, enabled=True, tensorboard=False, resumed_at=resumed_at) as writer:
        for step, metrics in lines:
            writer.write(step, metrics)
    return (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def test_a_line_has_the_step_and_full_precision_in_name_order(tmp_path: Path) -> None:
    assert write_metrics(tmp_path, [(0, {"b": 0.1, "a": 1 / 3})]) == [
        '{"step": 0, "metrics": {"a": 0.3333333333333333, "b": 0.1}}'
    ]


def test_nan_and_infinity_are_text_so_that_a_line_stays_json(tmp_path: Path) -> None:
    (line,) = write_metrics(tmp_path, [(2, {"a": math.nan, "b": math.inf, "c": -math.inf})])
    assert line == '{"step": 2, "metrics": {"a": "nan", "b": "inf", "c": "-inf"}}'


def test_a_resumed_run_goes_on_in_its_file_and_a_new_one_starts_over(tmp_path: Path) -> None:
    write_metrics(tmp_path, [(0, {})])
    assert [json.loads(line)["step"] for line in write_metrics(tmp_path, [(1, {})], resumed_at=1)] == [0, 1]
    assert [json.loads(line)["step"] for line in write_metrics(tmp_path, [(5, {})])] == [5]


def test_a_rank_that_does_not_write_leaves_no_file(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, enabled=False, tensorboard=True) as writer:
        writer.write(0, {"a": 1.0})
    assert os.listdir(tmp_path) == []


def test_the_metrics_of_another_run_are_not_mixed_with(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    prepare_output_dir(folder, resume=False)
    write_metrics(folder, [(0, {})])
    (folder / "run.json").write_text(json.dumps({"status": "completed"}))
    with pytest.raises(ConfigError) as caught:
        prepare_output_dir(folder, resume=False)
    assert str(caught.value) == (
        f"output_dir {folder} holds the metrics of another run; choose another output_dir, remove the folder, "
        "or continue that run with resume_from_checkpoint"
    )
    assert (folder / "run.json").is_file()
    prepare_output_dir(folder, resume=True)
    assert (folder / "metrics.jsonl").is_file()


@pytest.mark.parametrize(("steps", "resumed_at"), [(0, None), (1, None), (0, 0)])
def test_a_run_that_fails_before_its_first_step_leaves_its_folder_to_the_next(
    tmp_path: Path, steps: int, resumed_at: int | None
) -> None:
    def fail() -> None:
        with MetricsWriter(tmp_path, enabled=True, tensorboard=False, resumed_at=resumed_at) as writer:
            for step in range(steps):
                writer.write(step, {"a": 1.0})
            raise ValueError("no engine")

    with pytest.raises(ValueError, match="no engine"):
        fail()
    assert (tmp_path / "metrics.jsonl").exists() is (steps > 0 or resumed_at is not None)
    if steps == 0 and resumed_at is None:
        prepare_output_dir(tmp_path, resume=False)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["config.yaml", "run.json", "error.json", "code", "trace", "tensorboard"])
def test_what_lies_in_the_place_of_a_file_of_the_run_is_refused(tmp_path: Path, name: str, *, resume: bool) -> None:
    """A pipe in the place of code/ ended a run that had trained to its end, with a traceback."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        prepare_output_dir(tmp_path, resume=resume)
    assert str(caught.value) == f"{tmp_path / name}: neither the file nor the folder that a run writes there; remove it"
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("nowhere")
    prepare_output_dir(tmp_path, resume=resume)


def test_a_folder_that_cannot_be_written_is_refused_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """root may write everywhere, so the system's answer is changed."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="cannot be made or written: Permission denied; set another output_dir"):
        prepare_output_dir(tmp_path, resume=False)


def test_a_failure_is_written_with_its_type_message_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = report_failure(ContractError("seed differs\nset it"), tmp_path, global_rank=1, started_s=time.time())
    assert code == 3
    assert json.loads((tmp_path / "error.json").read_text(encoding="utf-8")) == {
        "type": "ContractError",
        "message": "seed differs\nset it",
        "exit_code": 3,
        "global_rank": 1,
    }
    assert capsys.readouterr().err == "[rank 1] ContractError: seed differs\n  set it\n"


def test_the_first_rank_that_fails_has_the_word_and_others_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started_s = time.time() - 5
    report_failure(ConfigError("the cause"), tmp_path, global_rank=2, started_s=started_s)
    assert report_failure(RuntimeError("peer lost\nlong"), tmp_path, global_rank=0, started_s=started_s) == 70
    assert json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))["message"] == "the cause"
    assert capsys.readouterr().err == "[rank 2] ConfigError: the cause\n[rank 0] RuntimeError: peer lost\n"


def test_the_error_of_an_earlier_run_is_replaced(tmp_path: Path) -> None:
    report_failure(ConfigError("old"), tmp_path, global_rank=0, started_s=0.0)
    os.utime(tmp_path / "error.json", (1000.0, 1000.0))
    report_failure(ConfigError("new"), tmp_path, global_rank=0, started_s=2000.0)
    assert json.loads((tmp_path / "error.json").read_text(encoding="utf-8"))["message"] == "new"


def test_an_error_that_is_not_ours_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError) as caught:
        raise KeyError("lost")
    assert report_failure(caught.value, None, global_rank=0, started_s=0.0) == 70
    text = capsys.readouterr().err
    assert text.startswith("[rank 0] KeyError: Traceback (most recent call last):\n")
    assert text.endswith("\n  KeyError: 'lost'\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "/x"), 5),
        (ConnectionResetError(104, "Connection reset by peer"), 70),
        (MemoryError(), 70),
        (RuntimeError("1"), 70),
    ],
)
def test_no_error_that_is_not_ours_ends_with_a_verdicts_code(error: Exception, code: int) -> None:
    assert failure_exit_code(error) == code


def test_a_failure_is_printed_where_its_file_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With output_dir under a file, writing error.json failed itself: a traceback of that, and exit code 1."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    assert report_failure(ContractError("seed differs"), folder, global_rank=0, started_s=time.time()) == 3
    assert capsys.readouterr().err == (
        f"[rank 0] error.json cannot be written: [Errno 20] {tmp_path}/file is not a folder\n"
        "[rank 0] ContractError: seed differs\n"
    )


def test_an_output_dir_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "run"
    with pytest.raises(ConfigError) as caught:
        prepare_output_dir(folder, resume=False)
    assert str(caught.value) == (
        f"output_dir {folder} cannot be made or written: Not a directory; set another output_dir"
    )


def test_a_resumed_run_replaces_what_it_computes_anew(tmp_path: Path) -> None:
    """A run that ended with a validation logged its next step; resumed, it logs that step again, as a whole."""
    write_metrics(tmp_path, [(0, {"a": 1.0}), (1, {"a": 2.0}), (2, {"val/a": 3.0})])
    lines = write_metrics(tmp_path, [(2, {"a": 4.0, "val/a": 3.0})], resumed_at=2)
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "metrics": {"a": 1.0}},
        {"step": 1, "metrics": {"a": 2.0}},
        {"step": 2, "metrics": {"a": 4.0, "val/a": 3.0}},
    ]


@pytest.mark.parametrize("rest", ['{"step": 2, "met', "\0\0\0\0", "{", '{"step": 2, "metrics": {"a": 1.0}\xff'])
def test_a_torn_last_line_is_cut_off_at_a_resume_and_said(
    tmp_path: Path, rest: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Every resume ended with a JSONDecodeError."""
    before = write_metrics(tmp_path, [(0, {"a": 1.0}), (1, {"a": 2.0})])
    path, torn = tmp_path / "metrics.jsonl", rest.encode("latin-1")
    path.write_bytes(path.read_bytes() + torn)
    after = write_metrics(tmp_path, [(2, {"a": 3.0})], resumed_at=2)
    assert after == [*before, '{"step": 2, "metrics": {"a": 3.0}}']
    assert caplog.messages == [
        f"{path}: its last line was not written to its end (a full disk, or a machine that went down): these "
        f"{len(torn)} bytes are cut off"
    ]


def test_a_last_line_that_lacks_its_end_alone_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = write_metrics(tmp_path, [(0, {"a": 1.0}), (1, {"a": 2.0})])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    assert write_metrics(tmp_path, [(2, {})], resumed_at=2) == [*before, '{"step": 2, "metrics": {}}']
    assert caplog.messages == []


@pytest.mark.parametrize("line", ["{", "[]", '{"stop": 1}', '{"step": "1"}', "\xff"])
def test_a_line_that_is_broken_in_the_middle_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    """It was not torn by a crash, so nothing is cut off."""
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 0, "metrics": {}}\n' + line.encode("latin-1") + b'\n{"step": 2, "metrics": {}}\n'
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"metrics\.jsonl:2"):
        write_metrics(tmp_path, [], resumed_at=3)
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_at_a_resume_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    write_metrics(tmp_path, [(step, {"a": 1.0}) for step in range(5)])
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if call == "write":
        monkeypatch.setattr(Path, "write_bytes", fail)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(TraceError) as caught:
        write_metrics(tmp_path, [], resumed_at=2)
    assert str(caught.value) == f"{path}: metrics cannot be written: No space left on device; it stays as it was"
    assert (path.read_bytes(), os.listdir(tmp_path)) == (content, ["metrics.jsonl"])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_to_keep_metrics_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An error of ``fsync`` before a checkpoint, and at the end of a run, was a traceback."""

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    expected = f"{tmp_path / 'metrics.jsonl'}: metrics may not be on the disk: {os.strerror(number)}; look at the disk"
    writer = MetricsWriter(tmp_path, enabled=True, tensorboard=False)
    writer.write(0, {"a": 1.0})
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TraceError) as before_checkpoint:
        writer.sync()
    with pytest.raises(TraceError) as at_end:
        writer.__exit__(None, None, None)
    assert [str(one.value) for one in (before_checkpoint, at_end)] == [f"{expected}, and resume"] * 2


def test_a_disk_that_fails_at_the_end_replaces_no_earlier_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def run() -> None:
        with MetricsWriter(tmp_path, enabled=True, tensorboard=False):
            monkeypatch.setattr(os, "fsync", fail)
            raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        run()


@pytest.mark.parametrize(
    ("number", "has_traceback"),
    [(errno.EIO, False), (errno.ENOSPC, False), (errno.EMFILE, False), (errno.EISDIR, True)],
)
def test_an_error_of_the_disk_has_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, has_traceback: bool
) -> None:
    """A full disk at the last file of a run, the record of its code, was a traceback."""
    try:
        raise OSError(number, os.strerror(number), "/x/run.json")
    except OSError as error:
        code = report_failure(error, tmp_path, global_rank=0, started_s=time.time())
    text = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert f"[Errno {number}] {os.strerror(number)}: '/x/run.json'" in text
    assert ("Traceback" in text) is has_traceback


@pytest.mark.parametrize("num_written", [0, 1, 20])
def test_a_full_disk_while_a_line_is_written_leaves_whole_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """A half line was left, and the next resume ended with a traceback."""
    write, path = os.write, tmp_path / "metrics.jsonl"

    def write_some(descriptor: int, data: memoryview) -> int:
        if not num_written or len(data) <= 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:num_written])

    with MetricsWriter(tmp_path, enabled=True, tensorboard=False) as writer:
        writer.write(0, {"a": 1.0})
        content = path.read_bytes()
        monkeypatch.setattr(os, "write", write_some)
        with pytest.raises(TraceError) as caught:
            writer.write(1, {"a": 2.0, "b": 1.0})
        monkeypatch.undo()
        assert path.read_bytes() == content
        assert caught.value.exit_code == ExitCode.USAGE
        assert str(caught.value) == (
            f"{path}: step 1 cannot be logged: No space left on device; all lines before it are whole"
        )
        writer.write(1, {"a": 2.0})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def kill_resumes(folder: Path, *, num_kills: int, num_steps: int, resumed_at: int) -> int:
    """Kills so many resumes at random moments, and checks what each left; returns how many left a hidden file."""
    path = folder / "metrics.jsonl"
    lines = [
        json.dumps({"step": step, "metrics": {f"metric_{index}": step / 7 for index in range(40)}}) + "\n"
        for step in range(num_steps)
    ]
    whole, kept = "".join(lines).encode(), "".join(lines[:resumed_at]).encode()
    rng, num_hidden = random.Random(0), 0

    def resume() -> None:
        with MetricsWriter(folder, enabled=True, tensorboard=False, resumed_at=resumed_at) as writer:
            writer.write(resumed_at, {})

    path.write_bytes(whole)
    started_s = time.perf_counter()
    resume()
    elapsed_s = time.perf_counter() - started_s
    after = kept + f'{{"step": {resumed_at}, "metrics": {{}}}}\n'.encode()
    assert path.read_bytes() == after
    for _ in range(num_kills):
        path.write_bytes(whole)
        child = os.fork()
        if not child:
            resume()
            os._exit(0)
        time.sleep(rng.uniform(0, elapsed_s * 1.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert path.read_bytes() in (whole, kept, after)
        hidden = [name for name in os.listdir(folder) if name != path.name]
        num_hidden += bool(hidden)
        remove_unfinished_files(folder)
        assert os.listdir(folder) == [path.name]
    resume()
    assert path.read_bytes() == after
    return num_hidden


@pytest.mark.parametrize("resumed_at", [400, 100])
def test_a_resume_that_is_killed_loses_no_metrics(tmp_path: Path, resumed_at: int) -> None:
    """The log was rewritten in place: 2 of 60 kills lost it, once all 2,000 steps."""
    kill_resumes(tmp_path, num_kills=8, num_steps=400, resumed_at=resumed_at)


@pytest.mark.all
@pytest.mark.parametrize("resumed_at", [2000, 1000])
def test_hundreds_of_killed_resumes_lose_no_metrics(tmp_path: Path, resumed_at: int) -> None:
    assert kill_resumes(tmp_path, num_kills=150, num_steps=2000, resumed_at=resumed_at) > 0


def test_metrics_are_on_the_disk_before_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss the weights of step 1 were there, and the metrics before it, still in memory, were not."""
    calls: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    for name in ("vocab_size_in_effect", "fixed_settings", "training_settings", "read_recording_place"):
        monkeypatch.setattr(run, name, lambda *_, **__: {})
    pipeline = SimpleNamespace(
        _config=SimpleNamespace(
            save_steps=1,
            output_dir=str(tmp_path),
            checkpoint_config=SimpleNamespace(output_dir=None),
            rollout_mock=SimpleNamespace(effective_mode="mock"),
        ),
        _output_dir=tmp_path,
        _runtime=SimpleNamespace(is_writer=True),
        _tokenizer=None,
        _clock=Clock(),
        _scheduler=SimpleNamespace(state_dict=lambda: {"mode": "mock"}, checkpoint_saved=lambda _: None),
        _training=SimpleNamespace(state_dict=dict, save=lambda *_: calls.append("checkpoint")),
    )
    with MetricsWriter(tmp_path, enabled=True, tensorboard=False) as writer:
        writer.write(0, {"a": 1.0})
        calls.clear()
        run.AgenticPipeline._save_if_due(cast(run.AgenticPipeline, pipeline), 1, writer)
        assert calls == [str(tmp_path / "metrics.jsonl"), "checkpoint"]


def test_unfinished_files_of_a_killed_run_are_removed_and_all_others_stay(tmp_path: Path) -> None:
    kept = ["metrics.jsonl", "trace/step_000000/rank_00000.part_000.safetensors", ".hidden", "trace/.notes.tmp.txt"]
    left = [
        ".metrics.jsonl.7.0a1b2c3d.tmp",
        ".config.yaml.7.0a1b2c3d.tmp",
        "trace/step_000000/.rank_00000.part_001.safetensors.7.0a1b2c3d.tmp",
        "trace/.step_000003.7.0a1b2c3d.tmp/rank_00000.part_000.safetensors",
        "operations/step_000000/.rank_0.jsonl.7.0a1b2c3d.tmp",
    ]
    for name in (*kept, *left):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{")
    remove_unfinished_files(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)


def test_an_error_that_ends_a_run_which_was_ending_tells_of_the_first_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def close() -> None:
        raise ConfigError("nothing could be written")

    with pytest.raises(ConfigError) as caught:  # noqa: PT012 - the first error is part of what is raised
        try:
            raise RuntimeError("the step failed")
        finally:
            close()
    report_failure(caught.value, tmp_path, global_rank=0, started_s=time.time())
    assert capsys.readouterr().err == (
        "[rank 0] ConfigError: nothing could be written\n"
        "  The run was ending already, with RuntimeError: the step failed\n"
    )
