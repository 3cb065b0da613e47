"""The file of a training service: for its owner alone, whole, and told from any other file."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mock_scheduler.errors import ServiceError
from mock_scheduler.remote.service_file import (
    ServiceAccess,
    make_token,
    published,
    read_service_file,
    take_token,
    write_service_file,
)
from mock_scheduler.support import files

URL = "http://127.0.0.1:8300"


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_it_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    modes: list[int] = []
    opened = os.open

    def note(path: Path, flags: int, mode: int = 0o777, **more: int) -> int:
        descriptor = opened(path, flags, mode, **more)
        if flags & os.O_CREAT:
            assert flags & os.O_EXCL
            modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return descriptor

    monkeypatch.setattr(files.os, "open", note)
    before = os.umask(mask)
    try:
        write_service_file(tmp_path / "service.json", url=URL, token=make_token())
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert stat.S_IMODE((tmp_path / "service.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["service.json"]


def test_it_comes_back_and_its_token_is_shown_nowhere(tmp_path: Path) -> None:
    token = make_token()
    path = tmp_path / "service.json"
    write_service_file(path, url=URL, token=token)
    access = read_service_file(path, url=URL)
    assert access == ServiceAccess(url=URL, token=token, source=str(path), process_id=os.getpid())
    assert token not in repr(access)
    assert not access.has_ended()
    with pytest.raises(FileExistsError):
        write_service_file(path, url=URL, token=token)


def test_no_two_tokens_are_alike_and_each_has_256_bits() -> None:
    tokens = {make_token() for _ in range(100)}
    assert len(tokens) == 100
    assert {len(token) for token in tokens} == {43}  # 6 bits each, and the last 4


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("nothing", "it is not JSON"),
        ("[" * 5000, "it is not JSON"),
        ("[]", "it is no JSON object"),
        ("{}", "it needs a url, a process_id and a token"),
        (json.dumps({"url": URL, "process_id": 1, "token": "secret"}), "it needs a url, a process_id and a token"),
        (json.dumps({"url": URL, "process_id": 10**30, "token": "t" * 43}), "it needs a url, a process_id and a token"),
        (json.dumps({"url": "http://\x1b[2J", "process_id": 1, "token": "t" * 43}), r"'http://\x1b[2J', and"),
        (" " * 100_000, "it is not JSON"),
    ],
)
def test_another_file_is_refused_without_its_content(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "service.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ServiceError) as caught:
        read_service_file(path, url=URL)
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "t" * 43 not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "service.json"
    write_service_file(path, url=URL, token=make_token())
    path.chmod(mode)
    with pytest.raises(ServiceError, match=rf"has the rights {mode:04o}: others may have its token"):
        read_service_file(path, url=URL)


def test_neither_a_link_nor_a_pipe_nor_a_folder_is_waited_for(tmp_path: Path) -> None:
    write_service_file(tmp_path / "real.json", url=URL, token=make_token())
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    os.mkfifo(tmp_path / "pipe.json", 0o600)
    (tmp_path / "folder.json").mkdir()
    for name, problem in {
        "link.json": "Too many levels of symbolic links",
        "pipe.json": "is no regular file",
        "folder.json": "is no regular file",
        "absent.json": "No such file",
    }.items():
        with pytest.raises(ServiceError, match=problem):
            read_service_file(tmp_path / name, url=URL)


def test_a_variable_has_the_token_of_a_service_elsewhere() -> None:
    token = make_token()
    access = take_token("OUR_TOKEN", {"OUR_TOKEN": token}, url="http://node7:8300")
    assert access.token == token
    assert not access.has_ended()
    with pytest.raises(ServiceError, match=r"the variable OUR_TOKEN \(training_service.token_variable\) is not set"):
        take_token("OUR_TOKEN", {}, url=URL)
    with pytest.raises(ServiceError, match="is no token of a training service") as caught:
        take_token("OUR_TOKEN", {"OUR_TOKEN": "secret"}, url=URL)
    assert "secret" not in str(caught.value)


def test_a_process_of_another_machine_is_not_looked_for() -> None:
    gone = {"token": "t" * 43, "source": "x", "process_id": 2**31 - 1}
    assert ServiceAccess(url=URL, **gone).has_ended()  # type: ignore[arg-type]
    assert not ServiceAccess(url="http://10.0.0.7:8300", **gone).has_ended()  # type: ignore[arg-type]


# One process that imports once, and a child for each end.
_ENDS = """
import os, signal, sys, time
from pathlib import Path
from mock_scheduler.remote.service_file import published

path = Path(sys.argv[1])
for name in ("SIGTERM", "SIGHUP", "SIGKILL", "exit"):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
        with published(path, url="http://127.0.0.1:1", token="t" * 43):
            if name == "exit":
                sys.exit(3)
            while True:
                time.sleep(0.01)
    while name != "exit" and not path.exists():
        time.sleep(0.01)
    time.sleep(0.1)  # until the child waits in the block
    if name != "exit":
        os.kill(child, getattr(signal, name))
    status = os.waitpid(child, 0)[1]
    print(name, os.waitstatus_to_exitcode(status), path.exists())
    path.unlink(missing_ok=True)
"""


def test_the_file_ends_with_its_service_in_every_way_but_a_kill(tmp_path: Path) -> None:
    """And the process ends as it would have ended without it: the launcher tells ranks apart by that."""
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS, str(tmp_path / "service.json")],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120.0,
        check=True,
    )
    assert ended.stdout.splitlines() == ["SIGTERM -15 False", "SIGHUP -1 False", "SIGKILL -9 True", "exit 3 False"]


def test_the_file_of_another_service_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "service.json"
    path.write_text("another's")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(FileExistsError), published(path, url=URL, token=make_token()):
        pass
    assert path.read_text() == "another's"
    assert signal.getsignal(signal.SIGTERM) is before


_EARLY_ENDS = """
import os, signal, sys, time
from pathlib import Path
from mock_scheduler.remote.service_file import published
from mock_scheduler.support import files

folder = Path(sys.argv[1])
for place in ("_write_pieces", "_link_new", "_sync"):
    child = os.fork()
    if child == 0:
        real = getattr(files, place)

        def end_then(*arguments):
            real(*arguments)
            os.kill(os.getpid(), signal.SIGTERM)

        setattr(files, place, end_then)
        with published(folder / "service.json", url="http://127.0.0.1:1", token="t" * 43):
            time.sleep(60.0)
    status = os.waitpid(child, 0)[1]
    print(place, os.waitstatus_to_exitcode(status), [path.name for path in folder.iterdir()])
"""


def test_a_service_that_is_ended_as_its_file_appears_leaves_nothing(tmp_path: Path) -> None:
    """Of 300 that were ended in that moment, 100 left the file, and 93 the one aside, each with the token."""
    ended = subprocess.run(
        [sys.executable, "-c", _EARLY_ENDS, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120.0,
        check=True,
    )
    assert ended.stdout.splitlines() == ["_write_pieces -15 []", "_link_new -15 []", "_sync -15 []"]
