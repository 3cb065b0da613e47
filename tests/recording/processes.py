"""Runs a piece of a test in a forked process: what a real second process does to a recording."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def fork(action: Callable[[], object]) -> tuple[int, int]:
    """Fork a child that does ``action`` and ends; returns its process id and a descriptor to read its answer from.

    The child never returns from here, and torch computes there with one thread: a forked one has no thread pool.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    os.close(reader)
    answer = "done"
    try:
        torch.set_num_threads(1)
        action()
    except BaseException as error:  # noqa: BLE001  # the edge of the child process
        answer = f"{type(error).__name__}: {error}"
    finally:
        os.write(writer, answer.encode())
        os._exit(0)


def wait_for(child: int, reader: int) -> str:
    """``done``, the error's type and message, or ``signal 9``."""
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read().decode()
    status = os.waitpid(child, 0)[1]
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else answer


def run_in_child(action: Callable[[], object]) -> str:
    """Do ``action`` in a forked process and wait for it; answers as ``wait_for``."""
    return wait_for(*fork(action))
