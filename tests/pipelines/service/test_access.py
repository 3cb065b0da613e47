"""The ``Host`` headers of a service, and the addresses that are of this machine alone."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from pipelines.service.access import Access, bracketed, is_loopback, own_hosts


def test_the_loopback_has_three_names_and_the_port() -> None:
    names = {"127.0.0.1:80", "localhost:80", "[::1]:80"}
    assert own_hosts("127.0.0.1", "127.0.0.1", 80) == names
    assert own_hosts("localhost", "127.0.0.1", 80) == names
    assert own_hosts("::1", "::1", 80) == names


def test_another_address_has_the_names_that_the_user_gave() -> None:
    assert own_hosts("Node7", "10.0.0.7", 80) == {"node7:80", "10.0.0.7:80"}
    assert own_hosts("fe80::7", "fe80::7%eth0", 80) == {"[fe80::7]:80", "[fe80::7%eth0]:80"}
    assert own_hosts("0.0.0.0", "0.0.0.0", 80) is None
    assert own_hosts("::", "::", 80) is None


@pytest.mark.parametrize(
    ("address", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.7", False)],
)
def test_addresses_of_this_machine_alone(address: str, expected: bool) -> None:
    assert is_loopback(address) == expected


def test_one_host_and_one_token_are_needed() -> None:
    access = Access(token="t", hosts=frozenset({"h:1"}))
    host, token = (b"host", b"h:1"), (b"authorization", b"Bearer t")
    assert access.refuse(Headers(raw=[host, token])) is None
    assert access.refuse(Headers(raw=[host, token, token])) == 401
    assert access.refuse(Headers(raw=[host, host, token])) == 403
    assert access.refuse(Headers(raw=[token])) == 403
    assert access.refuse(Headers(raw=[(b"host", b"any:9"), token])) == 403
    assert Access(token="t", hosts=None).refuse(Headers(raw=[(b"host", b"any:9"), token])) is None
    assert "'t'" not in repr(access)


def test_a_url_has_brackets_around_an_ipv6_address() -> None:
    assert bracketed("::1") == "[::1]"
    assert bracketed("node7") == "node7"
