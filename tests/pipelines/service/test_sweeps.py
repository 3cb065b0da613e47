"""Many hostile clients at once: the front stays small and quick, and an honest client trains on.

``-s`` prints the figures.
"""

from __future__ import annotations

import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from pipelines.service import access
from pipelines.service.http_front import Front
from tests.pipelines.service.clients import address, answered, ask, head, listening_front, train

pytestmark = [pytest.mark.all, pytest.mark.timeout(600)]

PROCESS = psutil.Process()


def _seconds_of_training(front: Front, step: int) -> float:
    began_s = time.monotonic()
    assert train(front, line=f"POST /v1/steps/{step}/train HTTP/1.1") == (200, b'{"bytes": 5}')
    return time.monotonic() - began_s


def test_three_hundred_slow_strangers_neither_stay_nor_delay_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 stayed for 75 s, each with a thread."""
    monkeypatch.setattr(access, "_HEAD_S", 4.0)
    with listening_front() as front, answered(front), ExitStack() as open_ones:
        threads = PROCESS.num_threads()
        strangers = [socket.create_connection(address(front), timeout=30.0) for _ in range(300)]
        for stranger in strangers:
            open_ones.enter_context(stranger)
        texts = ["", "POST /v1/steps/0/train HT", head(front, Authorization=None, Content_Length="4294967296")]
        for number, stranger in enumerate(strangers):
            _send(stranger, texts[number % 3].encode())
        slowest_s = max(_seconds_of_training(front, step) for step in range(2))
        ends_s, left = time.monotonic() + 30.0, strangers
        while left and time.monotonic() < ends_s:
            left = [stranger for stranger in left if _send(stranger, b"x")]
            time.sleep(0.2)
        more = PROCESS.num_threads() - threads
        print(f"\n300 strangers: slowest step {slowest_s:.2f} s, {len(left)} left, {more} threads more")
        assert slowest_s < 10.0
        assert left == []
        assert PROCESS.num_threads() <= threads
        _seconds_of_training(front, 2)


def _send(connection: socket.socket, data: bytes) -> bool:
    """Whether the connection takes it; what it answers is dropped."""
    try:
        connection.sendall(data)
        connection.settimeout(0.001)
        return connection.recv(4096) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("with_token", [True, False])
def test_bodies_that_nobody_asked_for_take_no_memory(with_token: bool) -> None:
    """8 connections of 128 MiB held 1.08 GB."""
    chunk = bytes(2**20)
    with listening_front(max_body_bytes=2**28) as front, answered(front):
        changed = {} if with_token else {"Authorization": None}
        text = head(front, "POST /v1/steps/2/train HTTP/1.1", Content_Length=str(2**27), **changed)
        before = PROCESS.memory_info().rss
        peak = 0

        def send() -> None:
            with socket.create_connection(address(front), timeout=60.0) as connection:
                connection.sendall(text.encode())
                for _ in range(128):
                    connection.sendall(chunk)
                assert connection.recv(12) == (b"HTTP/1.1 409" if with_token else b"HTTP/1.1 401")

        threads = [threading.Thread(target=send) for _ in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, PROCESS.memory_info().rss)
            time.sleep(0.02)
        print(f"\n8 bodies of 128 MiB: {(peak - before) / 2**20:.0f} MiB more at most")
        assert peak - before < 64 * 2**20


def test_bursts_of_strangers_leave_descriptors_for_the_files_of_the_run(tmp_path: Path) -> None:
    """Of 3000 that came at once 1024 were taken, and three of four files of the run could not be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listening_front() as front, answered(front):
        strangers = subprocess.Popen([sys.executable, "-c", _BURSTS, *map(str, address(front)), str(hard)])
        # What a login shell has by default; connections may take a part of it.
        resource.setrlimit(resource.RLIMIT_NOFILE, (PROCESS.num_fds() + 700, hard))
        most = opened = 0
        try:
            while strangers.poll() is None:
                sum(range(10**6))  # as a training holds the interpreter
                (tmp_path / "metrics.jsonl").write_text("x", encoding="utf-8")
                opened, most = opened + 1, max(most, PROCESS.num_fds())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            strangers.kill()
            strangers.wait()
        print(f"\nbursts of 3000 strangers: {opened} files opened, at most {most} descriptors")
        assert opened > 0
        _seconds_of_training(front, 0)


_BURSTS = """
import resource, socket, sys, time
hard = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
ends_s = time.monotonic() + 8.0
while time.monotonic() < ends_s:
    open_ones = []
    for _ in range(3000):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex((sys.argv[1], int(sys.argv[2])))
        open_ones.append(one)
    for one in open_ones:
        one.close()
"""


def test_two_thousand_odd_requests_end_nothing() -> None:
    statuses: Counter[int | str] = Counter()
    with listening_front() as front, answered(front) as carried:
        for seed in range(2000):
            statuses[_ask_oddly(front, random.Random(seed))] += 1
        print(f"\n2000 odd requests: {dict(statuses)}, {len(carried.calls)} carried out")
        assert ask(front, head(front, "GET /v1/service HTTP/1.1"))[0] == 200
    assert {call.operation for call in carried.calls} <= {"service", "train", "score", "finish"}
    assert statuses[500] == 0


def _ask_oddly(front: Front, chance: random.Random) -> int | str:
    method = chance.choice(["GET", "POST", "HEAD", "OPTIONS", "PUT", "\x00"])
    path = chance.choice(
        ["/v1/steps/0/train", "/v1/steps/0/score", "/v1/finish", "/v1/service", "/", "*", "//", "/%00"]
    )
    odd = [None, "", "x", "0", "-1", "1e9", "9" * 30, "a" * 3000, "\xff", "a, b", "chunked", "close", "h2c"]
    names = ["Authorization", "Host", "Content_Length", "Content_Type", "Run_Id", "Content_SHA256", "Origin"]
    names += ["Transfer_Encoding", "Connection", "Upgrade", "Expect"]
    changed = {chance.choice(names): chance.choice(odd) for _ in range(chance.randrange(3))}
    text = head(front, f"{method} {path} HTTP/1.{chance.randrange(2)}", b"hello", **changed)
    if chance.random() < 0.2:
        text = text[: chance.randrange(len(text))]
    with socket.create_connection(address(front), timeout=30.0) as connection:
        connection.sendall(text.encode("latin-1") + b"hello")
        connection.shutdown(socket.SHUT_WR)
        try:
            answer = connection.recv(12)
        except OSError as error:
            return type(error).__name__
    return int(answer[9:12]) if answer[:5] == b"HTTP/" else "closed"
