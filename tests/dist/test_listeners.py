"""A run of several processes on one machine can be reached from that machine alone; looked up while it ran."""

from __future__ import annotations

import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the sockets of a process in /proc")
def test_four_ranks_of_one_machine_listen_on_loopback_alone(listeners: dict[str, list[str]]) -> None:
    """torchrun's store listened on all addresses, and unpickled what anybody put into it."""
    assert listeners["open"] == []
    assert listeners["all"] == ["127.0.0.1"]  # gloo's own, so the look was not at nothing
