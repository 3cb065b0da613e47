"""The HTTP side of a training service: strangers, web pages, wrong, silent and vanished clients do nothing and harm
nobody else."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mock_scheduler.errors import ConfigError
from pipelines.service import access, http_app
from pipelines.service.http_app import Answer, Call
from pipelines.service.http_front import Front, listening
from pipelines.service.order import StepOrder
from tests.pipelines.service.clients import (
    MAX_BODY_BYTES,
    RUN,
    TRAIN,
    Carried,
    address,
    answered,
    ask,
    head,
    listening_front,
    train,
)

SERVICE = "GET /v1/service HTTP/1.1"
FINISH = "POST /v1/finish HTTP/1.1"


@pytest.fixture
def front() -> Iterator[Front]:
    """A front whose calls are answered with the size of their body."""
    with listening_front() as front, answered(front):
        yield front


@pytest.fixture(scope="module")
def refusing() -> Iterator[tuple[Front, Carried]]:
    """A front for clients none of whom may be heard."""
    with listening_front() as front, answered(front) as carried:
        yield front, carried


@pytest.fixture
def unasked(refusing: tuple[Front, Carried]) -> Iterator[Front]:
    """The front; no call may come of the test's requests."""
    front, carried = refusing
    yield front
    assert carried.calls == []


@pytest.mark.parametrize("line", [TRAIN, SERVICE, FINISH, "POST /v1/steps/0/score HTTP/1.1", "GET / HTTP/1.1"])
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer x",
        "Basic dDp0",
        "bearer {}",
        "Bearer {}x",
        "Bearer x{}",
        "{}",
        "B\xe9arer",
    ],
)
def test_a_request_without_the_token_is_told_no_more_than_that(
    unasked: Front, line: str, authorization: str | None
) -> None:
    """Anyone could train, and end a run; the paths of the service are told to nobody."""
    text = None if authorization is None else authorization.format(unasked.token)
    status, body, headers = ask(unasked, head(unasked, line, Authorization=text))
    assert (status, body) == (401, b'{"error": "Unauthorized"}')
    assert headers == {
        "content-type": "application/json",
        "content-length": "25",
        "connection": "close",
        "www-authenticate": "Bearer",
    }


@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
        {"Sec_Fetch_Site": "none"},
        {"Sec_Fetch_Site": "same-origin"},
        {"Sec_Fetch_Mode": "no-cors"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Host": "evil.example:80@127.0.0.1"},
        {"Host": ""},
    ],
)
@pytest.mark.parametrize("line", [TRAIN, SERVICE, FINISH, "OPTIONS /v1/finish HTTP/1.1"])
def test_a_web_page_is_refused_whatever_it_knows(unasked: Front, header: dict[str, str], line: str) -> None:
    """A page in a browser of this machine ended a run by one POST; a name that leads here is no better."""
    status, body, headers = ask(unasked, head(unasked, line, **header))
    assert (status, body) == (403, b'{"error": "Forbidden"}')
    assert not [name for name in headers if name.startswith("access-control")]


def test_the_names_of_the_loopback_are_those_of_the_service(front: Front) -> None:
    port = address(front)[1]
    for host in ("127.0.0.1", "localhost", "LOCALHOST", "[::1]"):
        assert ask(front, head(front, SERVICE, Host=f"{host}:{port}"))[0] == 200


LENGTH = b'{"error": "Content-Length is missing; chunked bodies are not read"}'
INVALID = b"Invalid HTTP request received."


@pytest.mark.parametrize(
    ("line", "changed", "status", "text"),
    [
        (TRAIN, {"Content_Length": None}, 411, LENGTH),
        (TRAIN, {"Content_Length": None, "Transfer_Encoding": "chunked"}, 411, LENGTH),
        (TRAIN, {"Transfer_Encoding": "chunked"}, 411, LENGTH),
        (TRAIN, {"Content_Length": "-1"}, 400, INVALID),
        (TRAIN, {"Content_Length": "x"}, 400, INVALID),
        (TRAIN, {"Content_Length": "0x10"}, 400, INVALID),
        (TRAIN, {"Content_Length": "5, 6"}, 400, INVALID),
        (TRAIN, {"Content_Length": str(MAX_BODY_BYTES + 1)}, 413, b'{"error": "1048577 bytes are more than 1048576, '),
        (TRAIN, {"Content_Length": "4294967296"}, 413, b'{"error": "4294967296 bytes are more than 1048576, '),
        (TRAIN, {"Content_Type": None}, 415, b'{"error": "Content-Type must be application/octet-stream"}'),
        (TRAIN, {"Content_Type": "text/plain"}, 415, b'{"error": "Content-Type must be application/octet-stream"}'),
        (FINISH, {"Content_Type": "application/x-www-form-urlencoded"}, 415, b'{"error": "Content-Type must be'),
        (TRAIN, {"Run_Id": None}, 400, b'{"error": "the header Run-Id must be [0-9a-f]{32}"}'),
        (TRAIN, {"Run_Id": "../x"}, 400, b'{"error": "the header Run-Id must be'),
        (TRAIN, {"Content_SHA256": "x"}, 400, b'{"error": "the header Content-SHA256 must be'),
        (TRAIN, {"Content_SHA256": "0" * 64}, 400, b'{"error": "the body is not that of its Content-SHA256"}'),
        ("POST /v1/steps/1/train HTTP/1.1", {}, 409, b'{"error": "step 1 was sent, and step 0 comes next"}'),
        ("POST /v1/steps/7/train HTTP/1.1", {}, 409, b'{"error": "step 7 was sent, and max_steps is 3"}'),
        ("GET /v1/finish HTTP/1.1", {}, 404, b'{"error": "there is no GET /v1/finish"}'),
        ("GET /v1/steps/0/train HTTP/1.1", {}, 404, b'{"error": "there is no GET'),
        ("PUT /v1/finish HTTP/1.1", {}, 404, b'{"error": "there is no PUT'),
        ("POST /v1/steps/0/train?x=1 HTTP/1.1", {}, 404, b'{"error": "there is no POST'),
        ("POST /v1/steps/-1/train HTTP/1.1", {}, 404, b'{"error": "there is no POST'),
        ("POST /v1/steps/%D9%A0/train HTTP/1.1", {}, 404, b'{"error": "there is no POST'),
        ("POST /v1/steps/9999999999/train HTTP/1.1", {}, 404, b'{"error": "there is no POST'),
        ("POST /v1/steps/../../etc/passwd HTTP/1.1", {}, 404, b'{"error": "there is no POST'),
        ("POST /v1/finish/ HTTP/1.1", {}, 404, b'{"error": "there is no POST'),
    ],
)
def test_every_other_request_is_refused_with_its_reason(
    unasked: Front, line: str, changed: dict[str, str | None], status: int, text: bytes
) -> None:
    found, body = train(unasked, line=line, **changed)
    assert found == status
    assert body.startswith(text)


def test_the_service_names_no_release(front: Front) -> None:
    headers = ask(front, head(front, SERVICE))[2]
    assert headers == {"content-type": "application/json", "content-length": "12", "connection": "close"}


@pytest.mark.parametrize(
    ("line", "changed", "status"),
    [
        (TRAIN, {"Authorization": None}, 401),
        (TRAIN, {"Origin": "null"}, 403),
        ("POST /v1/steps/7/train HTTP/1.1", {}, 409),
        (TRAIN, {"Run_Id": "b" * 32}, 409),
        (TRAIN, {"Content_Length": str(2**32)}, 413),
    ],
)
def test_no_byte_of_a_refused_body_is_asked_for(line: str, changed: dict[str, str], status: int) -> None:
    """A body was read, up to 4 GiB, before step and run were looked at; here the answer comes before the body."""
    with listening_front() as front, answered(front):
        assert train(front, b"of the run")[0] == 200  # from now on it is this run's service, at step 1
        line = line.replace("steps/0", "steps/1")
        text = head(front, line, **{"Content_Length": str(MAX_BODY_BYTES), **changed})
        assert ask(front, text)[0] == status


@pytest.mark.parametrize(
    "line",
    [
        "GET /v1%2fservice HTTP/1.1",
        "GET /v1/%73ervice HTTP/1.1",
        "POST /v1%2Ffinish HTTP/1.1",
        "POST /v1/steps/%30/train HTTP/1.1",
        "GET http://127.0.0.1/v1/service HTTP/1.1",
    ],
)
def test_a_path_has_one_spelling(unasked: Front, line: str) -> None:
    path = line.split()[1]
    expected = f'{{"error": "there is no {line.split()[0]} {path}"}}'.encode()
    assert ask(unasked, head(unasked, line))[:2] == (404, expected)


def test_an_answer_to_a_refused_request_is_not_lost_with_its_body(front: Front) -> None:
    """Where the body lay unread when the connection was closed, the client had a reset in place of the answer."""
    body = bytes(MAX_BODY_BYTES)
    for _ in range(5):
        assert train(front, body, Authorization="Bearer x") == (401, b'{"error": "Unauthorized"}')
        assert train(front, body, line="POST /v1/steps/7/train HTTP/1.1", Connection="close")[0] == 409


def test_the_same_request_is_carried_out_once_and_answered_alike() -> None:
    """A client that lost its answer could only end; a step is trained once all the same."""
    with listening_front(score_names=("values",)) as front, answered(front) as carried:
        score = "POST /v1/steps/0/score HTTP/1.1"
        assert train(front)[1] == b'{"error": "step 0 must be scored first, for values"}'
        for line in (score, TRAIN):
            assert [train(front, line=line) for _ in range(3)] == [(200, b'{"bytes": 5}')] * 3
        assert train(front, b"other")[1] == b'{"error": "step 0 was sent, and step 1 comes next"}'
        assert train(front, Run_Id="b" * 32)[0] == 409
        assert train(front, line=FINISH, Run_Id="b" * 32)[0] == 409
    assert [call.operation for call in carried.calls] == ["score", "train"]


def test_a_request_that_is_carried_out_is_joined_by_its_repeat() -> None:
    with listening_front() as front:
        statuses: list[tuple[int, bytes]] = []
        asking = [threading.Thread(target=lambda: statuses.append(train(front))) for _ in range(5)]
        asking[0].start()
        call = front.calls.get(timeout=30.0)
        for thread in asking[1:]:
            thread.start()
        assert train(front, b"other") == (503, b'{"error": "another request is being read or carried out; try again"}')
        assert front.calls.empty()
        assert call.request is not None
        front.order.record(call.request, Answer.json({"steps": 1}))
        call.answer(Answer.json({"steps": 1}))
        for thread in asking:
            thread.join()
        assert statuses == [(200, b'{"steps": 1}')] * 5


def test_the_repeat_of_a_request_in_the_middle_of_its_body_takes_its_place(front: Front) -> None:
    """The first connection may be dead without a sign; the client need not wait for the end of its time."""
    with socket.create_connection(address(front)) as dead:
        dead.sendall(head(front, body=b"hello").encode() + b"he")
        assert _comes_true(lambda: train(front, b"other")[0] == 503)  # its body is being read
        assert train(front) == (200, b'{"bytes": 5}')


def _comes_true(holds: object) -> bool:
    ends_s = time.monotonic() + 30.0
    while time.monotonic() < ends_s:
        if holds():  # type: ignore[operator]
            return True
    return False


def test_a_body_of_which_no_more_comes_is_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "_TRANSFER_S", 0.2)
    monkeypatch.setattr(http_app, "_SLOWEST_BYTES_PER_S", 2**40)
    status, body, _ = ask(front, head(front, Content_Length="1000000"), b"hello")
    assert status == 408
    assert re.fullmatch(rb'\{"error": "5 of the body\'s 1000000 bytes came within 0\.2\d* s"\}', body)


@pytest.mark.parametrize("start", ["", "POST /v1/st", f"{TRAIN}\r\nHost: x\r\n"])
def test_a_head_that_does_not_come_ends_its_connection(
    front: Front, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """A silent connection stayed as long as it liked, and one byte now and then kept it."""
    monkeypatch.setattr(access, "_HEAD_S", 0.2)
    with socket.create_connection(address(front), timeout=30.0) as slow:
        slow.sendall(start.encode())
        with pytest.raises(OSError, match=r"reset|Broken pipe"):  # noqa: PT012  # either may see the end first
            while True:
                time.sleep(0.02)
                slow.sendall(b"x")
    assert ask(front, head(front, SERVICE))[0] == 200


def test_strangers_do_not_take_the_place_of_a_client(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections were not counted: 300 of them stayed, with a thread each."""
    monkeypatch.setattr(access, "MAX_CONNECTIONS", 8)
    strangers = [socket.create_connection(address(front), timeout=30.0) for _ in range(40)]
    assert train(front) == (200, b'{"bytes": 5}')
    ended = [stranger for stranger in strangers if _has_ended(stranger)]
    assert ended == strangers[: len(ended)]  # the oldest
    assert len(ended) >= 40 - 8
    for stranger in strangers:
        stranger.close()


def _has_ended(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_a_client_that_hangs_up_in_the_middle_of_its_body_makes_no_call() -> None:
    with listening_front() as front:
        with socket.create_connection(address(front)) as connection:
            connection.sendall(head(front, Content_Length="100").encode() + b"half")
        asking = threading.Thread(target=ask, args=(front, head(front, SERVICE)))
        asking.start()
        call = front.calls.get(timeout=30.0)
        assert call.operation == "service"
        call.answer(Answer.json({}))
        asking.join()
        assert front.calls.empty()


def test_a_call_without_an_answer_is_told_that_the_service_has_ended() -> None:
    answers: list[tuple[int, bytes]] = []
    with listening_front() as front:
        asking = threading.Thread(target=lambda: answers.append(ask(front, head(front, SERVICE))[:2]))
        asking.start()
        front.calls.get(timeout=30.0)
    asking.join()
    assert answers == [(410, b'{"error": "the service has ended"}')]


def test_a_silent_client_keeps_nobody_waiting_and_the_service_ends() -> None:
    """The service waited for ever, at its end, for a connection on which nothing came."""
    with listening_front() as front:
        with answered(front):
            silent = [socket.create_connection(address(front)) for _ in range(3)]
            silent[1].sendall(head(front, Content_Length="100").encode() + b"half")
            silent[2].sendall(head(front, Content_Length="100", Authorization=None).encode())
            assert ask(front, head(front, SERVICE))[0] == 200
        ends_s = time.monotonic()
    assert time.monotonic() - ends_s < 9.0  # less than the time that answers on their way have
    for connection in silent:
        connection.close()


def test_the_last_answer_is_sent_before_the_end() -> None:
    """Between the last answer and the end, a client was told that the service had ended without."""
    for _ in range(5):
        with listening_front() as front:
            answers: list[tuple[int, bytes]] = []
            asking = threading.Thread(target=lambda: answers.append(ask(front, head(front, FINISH))[:2]))  # noqa: B023
            asking.start()
            front.calls.get().answer(Answer.json({"steps": 2}))
        asking.join()
        assert answers == [(200, b'{"steps": 2}')]


def test_an_address_in_use_is_an_error_that_says_so(front: Front) -> None:
    host, port = address(front)
    order: StepOrder[Answer] = StepOrder(max_steps=1)
    with pytest.raises(ConfigError) as caught, listening(host, port, order=order, max_body_bytes=1):
        pass
    assert str(caught.value) == (
        f"training_service.host 127.0.0.1 and port {port} cannot be listened at: Address already in use; port=0 takes "
        "a free one"
    )


def test_a_hundred_clients_at_once_are_served(front: Front) -> None:
    """Of 100 clients at once 42 were reset."""
    statuses: list[int] = []
    threads = [threading.Thread(target=lambda: statuses.append(train(front)[0])) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert statuses == [200] * 100


def test_a_call_is_answered_once() -> None:
    call = Call(operation="service")
    call.answer(Answer.json({"a": 1}))
    call.answer(Answer.json({"a": 2}))
    assert call.answered.result().body == b'{"a": 1}'


def test_the_run_of_a_front_is_that_of_its_first_accepted_datums(front: Front) -> None:
    assert train(front, line=FINISH, Run_Id="b" * 32)[0] == 200  # nobody's yet
    assert train(front, Run_Id="b" * 32)[0] == 200
    assert train(front, line="POST /v1/steps/1/train HTTP/1.1", Run_Id=RUN)[0] == 409


@pytest.mark.parametrize("changed", [{"Authorization": None}, {}])
def test_no_chunk_is_parsed_of_a_body_that_nobody_wants(front: Front, changed: dict[str, str | None]) -> None:
    """Parsing chunks of one byte, 20 strangers kept a client waiting for 30 s."""
    heads = {"Content_Length": None, "Transfer_Encoding": "chunked", **changed}
    text = head(front, **heads).encode()
    with ExitStack() as open_ones:
        unwanted = [open_ones.enter_context(socket.create_connection(address(front), timeout=30.0)) for _ in range(8)]
        for connection in unwanted:
            connection.sendall(text + b"1\r\nx\r\n" * 500_000)
        # The answer comes, and what is no chunk at all is dropped alike.
        for connection in unwanted:
            connection.sendall(b"no chunk")
            assert connection.recv(12) == (b"HTTP/1.1 411" if "Authorization" not in changed else b"HTTP/1.1 401")
        began_s = time.monotonic()
        assert train(front) == (200, b'{"bytes": 5}')
        assert time.monotonic() - began_s < 5.0


@pytest.mark.parametrize(("size", "status"), [(3000, 200), (9000, 400), (200_000, 400)])
def test_a_head_is_short(front: Front, size: int, status: int) -> None:
    """A head that came at once was parsed whatever its length."""
    with socket.create_connection(address(front), timeout=30.0) as connection:
        connection.sendall(head(front, SERVICE).encode()[:-2] + b"a:\r\n" * (size // 4) + b"\r\n")
        try:
            assert int(connection.recv(12)[9:]) == status
        except ConnectionResetError:  # more of the head lay unread
            assert status == 400


def test_a_body_with_another_digest_is_answered_and_its_connection_closed(front: Front) -> None:
    """It stayed open for 20 s, though all of the body had come."""
    with socket.create_connection(address(front), timeout=10.0) as connection:
        connection.sendall(head(front, body=b"other").encode() + b"hello")
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 400")
