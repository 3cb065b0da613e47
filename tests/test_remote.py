"""The training service's protocol: documents come back bit for bit, and everything else is refused with its reason."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from mock_scheduler.errors import ServiceError
from mock_scheduler.remote import (
    TrainingClient,
    contract_problems,
    decode_datums,
    decode_scores,
    encode_datums,
    encode_scores,
    metrics_as_json,
    parse_metrics,
    take_values,
    with_values,
)
from tests.batches import make_batch

BATCH = make_batch(2, 2)
NUM_TOKENS = len(BATCH.rollout_logprobs)
ADVANTAGES = torch.linspace(-1.0, 1.0, NUM_TOKENS, dtype=torch.float64)
RETURNS = torch.arange(NUM_TOKENS, dtype=torch.float64) / 3.0


def test_datums_come_back_bit_for_bit() -> None:
    body = encode_datums(with_values(BATCH, ADVANTAGES, RETURNS), step=3, run_id="r")
    datums, run_id = decode_datums(body, step=3)
    assert run_id == "r"
    assert torch.equal(take_values(datums).advantages, ADVANTAGES)
    assert torch.equal(take_values(datums).returns, RETURNS)
    assert torch.equal(datums.tokens, BATCH.tokens)
    assert torch.equal(datums.rollout_logprobs, BATCH.rollout_logprobs)
    assert datums.identities == BATCH.identities


def test_datums_without_values_say_what_is_missing() -> None:
    with pytest.raises(ServiceError) as caught:
        take_values(BATCH)
    assert str(caught.value) == (
        "these datums cannot be trained on:\n"
        "  - advantages is absent; expected a ragged float64 column with one value per response token\n"
        "  - returns is absent; expected a ragged float64 column with one value per response token"
    )


def test_an_advantage_that_is_no_number_is_refused() -> None:
    broken = ADVANTAGES.clone()
    broken[1] = torch.nan
    with pytest.raises(ServiceError, match="advantages has NaN or infinity"):
        take_values(with_values(BATCH, broken, RETURNS))


def test_datums_of_another_step_are_refused() -> None:
    with pytest.raises(ServiceError, match="these are the datums of step 3, sent as those of step 4"):
        decode_datums(encode_datums(BATCH, step=3, run_id="r"), step=4)


@pytest.mark.parametrize("position", [10, -5])
def test_a_changed_byte_is_refused(position: int) -> None:
    body = bytearray(encode_datums(BATCH, step=0, run_id="r"))
    body[position] ^= 1
    with pytest.raises(ServiceError, match="the datums of step 0"):
        decode_datums(bytes(body), step=0)


def test_scores_come_back_and_others_are_refused() -> None:
    body = encode_scores({"values": RETURNS})
    assert torch.equal(decode_scores(body, names=("values",), num_tokens=NUM_TOKENS)["values"], RETURNS)
    with pytest.raises(ServiceError, match="the service answered with scores"):
        decode_scores(body, names=("values",), num_tokens=NUM_TOKENS + 1)
    with pytest.raises(ServiceError, match="cannot be read"):
        decode_scores(b"nothing", names=("values",), num_tokens=NUM_TOKENS)


def test_metrics_keep_every_bit_and_what_json_lacks() -> None:
    metrics = {"a": 1 / 3, "b": float("inf"), "c": float("-inf"), "d": -0.0}
    assert parse_metrics(json.loads(json.dumps(metrics_as_json(metrics), allow_nan=False))) == metrics
    assert str(parse_metrics({"n": "nan"})["n"]) == "nan"
    with pytest.raises(ServiceError, match="metric m is 'much', expected a number"):
        parse_metrics({"m": "much"})


def test_every_differing_field_of_a_contract_is_named_with_both_values() -> None:
    assert contract_problems({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}) == [
        "b: 2 here, 3 in the service",
        "c: 3 here, 'absent' in the service",
        "d: 'absent' here, 4 in the service",
    ]


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """A server on the loopback that answers everything alike; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Silent."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (409, b'{"error": "step 3 comes next"}', "step 3 comes next (status 409)"),
        (502, b"<html>", "b'<html>' (status 502)"),
        (200, b"<html>", "the answer is no JSON: b'<html>'"),
        (200, b"[]", "the answer is no object: b'[]'"),
        (200, b'{"protocol": 9}', "speaks protocol 9, this client 1: run both with one release"),
    ],
)
def test_an_answer_that_is_no_service_is_an_error_with_its_text(status: int, body: bytes, problem: str) -> None:
    with answering(status, body) as url, pytest.raises(ServiceError) as caught:
        TrainingClient(url, timeout_s=10.0).service()
    assert str(caught.value).startswith(url)
    assert str(caught.value).endswith(problem)


def test_a_service_of_another_run_is_refused_with_every_difference() -> None:
    body = json.dumps({"protocol": 1, "next_step": 2, "layout": "tp2", "contract": {"seed": 1}}).encode()
    with answering(200, body) as url, pytest.raises(ServiceError) as caught:
        TrainingClient(url, timeout_s=10.0).check({"seed": 2}, first_step=0)
    assert str(caught.value) == (
        f"the service at {url} is not this run's:\n"
        "  - seed: 2 here, 1 in the service\n"
        "  - step: this run begins with 0, the service goes on with 2"
    )


def test_no_service_is_an_error_that_says_where() -> None:
    with answering(200, b"{}") as url:
        pass
    with pytest.raises(ServiceError, match=f"{url}/v1/service: no answer: .*refused.*still running"):
        TrainingClient(url, timeout_s=1.0).service()
