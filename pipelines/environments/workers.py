"""A pool of environments plays many episodes at once, in this process, in several of its own, or in a cluster's.

A worker is started by its module's name over one pipe. ``multiprocessing`` would import the run's main module, and all
of its imports, into every worker.

Contract: a slot's environments live in worker ``slot % num_workers``, a call sends one message to each concerned
worker, and answers come in the order asked. Results depend on tags, seeds, splits and tokens alone, never on the number
of workers. After an error the pool is closed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol, TypeVar

from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.support.processes import PARENT_VARIABLE, describe_signal
from mock_scheduler.support.text import list_some
from pipelines.config.environments import CustomEnvConfig
from pipelines.environments.base import ResetRequest as ResetRequest
from pipelines.environments.base import ResetResult, StepResult, Tokenizer
from pipelines.environments.slots import Answer, Call, CallFailure, EnvironmentSlots, ResetCall, StepCall

Item = TypeVar("Item")

_GRACE_S = 10.0
_NUM_NAMED = 4


class Worker(Protocol):
    """The environments of some slots. Calls raise ``OSError`` or ``EOFError`` once it has ended for good."""

    def send(self, call: Call) -> None:
        """Asks; ``receive`` follows before the next call."""

    def receive(self) -> Answer:
        """Waits for the answer to the last call."""
        ...

    def describe_end(self) -> str:
        """Says what became of it, as ``process 4711 ended with exit code 1``."""
        ...

    def hang_up(self) -> None:
        """Has it end; does not wait."""

    def wait(self) -> None:
        """Waits for its end."""


class _LocalWorker:
    """Plays the environments in this process."""

    def __init__(self, slots: EnvironmentSlots) -> None:
        self._slots = slots
        self._answer: Answer = []

    def send(self, call: Call) -> None:
        """Answers the call; ``receive`` gives the answer."""
        self._answer = self._slots.answer(call)

    def receive(self) -> Answer:
        """Returns the answer to the last call."""
        return self._answer

    def hang_up(self) -> None:
        """Close the environments."""
        self._slots.close()

    def wait(self) -> None:
        """Nothing to wait for."""

    def describe_end(self) -> str:
        """Never asked: it answers without a pipe."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class _WorkerProcess:
    """The environments in a process of their own. Its calls raise ``OSError`` or ``EOFError`` where it has ended."""

    process: subprocess.Popen[bytes]
    pipe: Connection

    @classmethod
    def start(cls, custom_envs: Mapping[str, CustomEnvConfig], tokenizer: Tokenizer) -> _WorkerProcess:
        """Starts the process; returns while it still imports."""
        ours, theirs = Pipe()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pipelines.environments.worker_process", str(theirs.fileno())],
                env=_child_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        worker = cls(process=process, pipe=ours)
        with suppress(OSError):  # the first call tells where it has ended already
            ours.send((dict(custom_envs), tokenizer))
        return worker

    def send(self, call: Call) -> None:
        """Asks; returns at once."""
        self.pipe.send(call)

    def receive(self) -> Answer:
        """Waits for the answer to the last call."""
        answer: Answer = self.pipe.recv()
        return answer

    def hang_up(self) -> None:
        """Closes the pipe, on which the process ends by itself."""
        self.pipe.close()

    def wait(self) -> None:
        """Waits for the process to end, and kills it after a grace."""
        try:
            self.process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def describe_end(self) -> str:
        """Says ``process 4711 was ended by SIGKILL (signal 9)``, once it can no longer be reached."""
        self.hang_up()
        self.wait()
        code = self.process.returncode
        ended = f"was ended by {describe_signal(code)}" if code < 0 else f"ended with exit code {code}"
        return f"process {self.process.pid} {ended}"


def _child_environment() -> dict[str, str]:
    """Copies this process's environment, with its import path, and its number where the child may end with it."""
    # Linux tells a child of the end of the thread that started it; only the main thread lives as long as the process.
    # Otherwise the closed pipe ends the child.
    environ = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
    environ["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    if threading.current_thread() is threading.main_thread():
        environ[PARENT_VARIABLE] = str(os.getpid())
    return environ


StartWorker = Callable[[Mapping[str, CustomEnvConfig], Tokenizer], Worker]


class EnvironmentPool:
    """Keeps environments of every tag in ``custom_envs``, by slot, built on first use.

    ``num_workers``: workers to step them at the same time; 0 steps them in this process.
    ``start``: starts a worker; unset, a process of this machine.
    """

    def __init__(
        self,
        custom_envs: Mapping[str, CustomEnvConfig],
        tokenizer: Tokenizer,
        *,
        num_workers: int,
        start: StartWorker | None = None,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}; expected 0 or more")
        self._tags = sorted(custom_envs)
        self._playing: dict[int, ResetRequest] = {}
        self._built: set[tuple[int, str, str]] = set()
        self._is_closed = False
        start = start or _WorkerProcess.start
        self._workers: list[Worker] = (
            [start(custom_envs, tokenizer) for _ in range(num_workers)]
            if num_workers
            else [_LocalWorker(EnvironmentSlots(custom_envs, tokenizer))]
        )

    @property
    def num_built(self) -> int:
        """Counts environments built so far: one for each slot, tag and split in use."""
        return len(self._built)

    @property
    def process_ids(self) -> list[int]:
        """The ids of the workers that are processes of this machine."""
        return [worker.process.pid for worker in self._workers if isinstance(worker, _WorkerProcess)]

    def reset_many(self, requests: Sequence[ResetRequest]) -> list[ResetResult]:
        """Starts these episodes, each in a slot of its own.

        Raises:
            ConfigError: a tag has no environment, or its settings allow no layout.
            SchedulerError: a slot was named twice, an environment failed, a worker has ended, or the pool is closed.
        """
        unknown = sorted({request.tag for request in requests} - set(self._tags))
        if unknown:
            raise ConfigError(f"tags {unknown} are not in custom_envs {self._tags}")
        slots = [request.slot for request in requests]
        self._check_slots(slots)
        for request in requests:
            self._playing[request.slot] = request
        results: list[ResetResult] = self._call(requests, slots, lambda share: ResetCall(requests=share))
        self._built.update((request.slot, request.tag, request.split) for request in requests)
        return results

    def step_many(self, turns: Sequence[tuple[int, Sequence[int]]]) -> list[StepResult]:
        """Takes these turns, each a slot and its sampled tokens.

        Raises:
            SchedulerError: a slot was named twice or never reset, an environment failed, a worker has ended, or the
                pool is closed.
        """
        slots = [slot for slot, _ in turns]
        self._check_slots(slots)
        idle = sorted(set(slots) - set(self._playing))
        if idle:
            raise SchedulerError(f"slots {idle} have no episode: reset them before they are stepped")
        results: list[StepResult] = self._call(turns, slots, lambda share: StepCall(turns=share))
        return results

    def close(self) -> None:
        """Closes all environments and ends all workers; a pool may be closed twice."""
        self._is_closed = True
        for worker in self._workers:
            worker.hang_up()
        for worker in self._workers:
            worker.wait()

    def _check_slots(self, slots: Sequence[int]) -> None:
        if self._is_closed:
            raise SchedulerError("the environments are closed, by their owner or after an error")
        twice = sorted(slot for slot, count in Counter(slots).items() if count > 1)
        if twice:
            raise SchedulerError(f"slots {twice} are named twice in one call: a slot plays one episode at a time")

    def _call(self, items: Sequence[Item], slots: Sequence[int], make_call: Callable[[list[Item]], Call]) -> list[Any]:
        """Returns all items' results in their order; each worker is sent its share before any answer is read."""
        shares: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            shares.setdefault(slot % len(self._workers), []).append(position)
        results: list[Any] = [None] * len(items)
        failures: list[CallFailure] = []
        try:
            for index, positions in shares.items():
                self._workers[index].send(make_call([items[position] for position in positions]))
            for index, positions in shares.items():
                answer = self._workers[index].receive()
                if isinstance(answer, CallFailure):
                    failures.append(answer)
                else:
                    for position, result in zip(positions, answer, strict=True):
                        results[position] = result
        except (OSError, EOFError) as error:
            self._raise_ended(index, [slots[position] for position in positions], error)
        except BaseException:  # an interrupt, say: unread answers would be taken for the next call's
            self.close()
            raise
        if failures:
            self._raise_failure(min(failures, key=lambda failure: slots.index(failure.slot)))
        return results

    def _raise_failure(self, failure: CallFailure) -> NoReturn:
        """Raises an environment's error, from any process, with the traceback there as a note."""
        self.close()
        kind = ConfigError if failure.is_config_error else SchedulerError
        error = kind(f"environment of {self._describe(failure.slot)}: {failure.message}")
        error.add_note(failure.traceback_text)
        raise error

    def _raise_ended(self, index: int, slots: Sequence[int], error: OSError | EOFError) -> NoReturn:
        end = self._workers[index].describe_end()
        self.close()
        playing = list_some([self._describe(slot) for slot in slots], _NUM_NAMED)
        raise SchedulerError(
            f"environment worker {index}: {end} while it played {playing}; what it wrote to stderr says why"
        ) from error

    def _describe(self, slot: int) -> str:
        request = self._playing[slot]
        return f"slot {slot} (tag {request.tag}, seed {request.seed}, split {request.split})"
