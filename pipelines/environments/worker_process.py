"""Runs one worker process: ``python -m pipelines.environments.worker_process FD``.

``FD`` is its end of a pipe: first come the environments' settings and the tokenizer, then calls, one answer each; the
process ends when the other end is closed. It ends with its parent too, if that asks for it (``PARENT_VARIABLE``).
"""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from mock_scheduler.support.processes import end_with_parent
from pipelines.environments import gymnasium_ids as gymnasium_ids  # loaded while the parent still prepares
from pipelines.environments.slots import EnvironmentSlots


def serve(pipe: Connection) -> None:
    """Answer calls until the other end of the pipe is closed."""
    try:
        slots = EnvironmentSlots(*pipe.recv())
        while True:
            pipe.send(slots.answer(pipe.recv()))
    except (EOFError, ConnectionError):
        pass  # the pool was closed, or its process has ended


def main(file_descriptor: str) -> None:
    """Serve the pipe of that number."""
    # Ctrl-C reaches the whole group; the parent decides what it means, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(os.environ)
    with Connection(int(file_descriptor)) as pipe:
        serve(pipe)


if __name__ == "__main__":
    main(sys.argv[1])
