"""The global random generators of this process: how a live rollout left them, and how a replayed one leaves them so.

A trainer that draws right after a rollout (TRL shuffles its rows with torch's generator) would draw other numbers after
a replayed one, which moves no generator. So the states that a live rollout moved are recorded with its step, and set
after it is replayed. They are those of Python's ``random``, NumPy's legacy ``numpy.random``, torch's default CPU
generator and, where CUDA is in use, that of the current device; a generator object of the trainer's own is not seen.

Contract: a state counts as moved by the rollout only where nothing else of this process can have moved it: two live
calls at a time, of whichever proxy, leave the generators out. ``before`` is the digest of a state before the rollout,
``after`` the state itself. A process sets the states that it recorded itself; another process sets them only where its
generator stood where the writer's did, since each process has generators of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from mock_scheduler.config.rollout_mock import RandomStates
from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.step.step_info import GeneratorStates

#: Name of a generator -> its state as bytes.
States: TypeAlias = dict[str, bytes]

_PYTHON = struct.Struct("<I625I?d")  # version, words and position, whether a normal variate is kept, the variate
_NUMPY = struct.Struct("<624IIId")  # key, position, whether a normal variate is kept, the variate


@dataclass(frozen=True, slots=True)
class _Generator:
    """``read`` gives None where there is no such generator in this process."""

    read: Callable[[], bytes | None]
    write: Callable[[bytes], None]


def _read_python() -> bytes:
    version, words, variate = random.getstate()
    return _PYTHON.pack(version, *words, variate is not None, variate or 0.0)


def _write_python(state: bytes) -> None:
    version, *words, is_kept, variate = _PYTHON.unpack(state)
    random.setstate((version, tuple(words), variate if is_kept else None))


def _read_numpy() -> bytes | None:
    state: Any = np.random.get_state(legacy=True)  # the global generator itself is meant
    if not isinstance(state, tuple) or state[0] != "MT19937":  # someone put another bit generator there
        return None
    _, key, position, is_kept, variate = state
    return _NUMPY.pack(*key.tolist(), position, is_kept, variate)


def _write_numpy(state: bytes) -> None:
    *key, position, is_kept, variate = _NUMPY.unpack(state)
    if position > len(key):  # which NumPy does not check, and reads what lies behind its key
        raise ValueError(f"its position is {position}; expected at most {len(key)}")
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, is_kept, variate))


def _read_torch() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _write_torch(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _read_cuda() -> bytes | None:
    # Asking for a state would begin CUDA in a process that does not use it.
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda.get_rng_state().numpy().tobytes()


def _write_cuda(state: bytes) -> None:
    torch.cuda.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_GENERATORS = {
    "cuda": _Generator(_read_cuda, _write_cuda),
    "numpy": _Generator(_read_numpy, _write_numpy),
    "python": _Generator(_read_python, _write_python),
    "torch": _Generator(_read_torch, _write_torch),
}
_ALWAYS_THERE = ("numpy", "python", "torch")


def read_states() -> States:
    """Read the states of the generators that this process has, by name."""
    found = {name: generator.read() for name, generator in _GENERATORS.items()}
    return {name: state for name, state in found.items() if state is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStates:
    """The states recorded with a step, to be set once its replay is answered.

    ``before``: digests; ``after``: states; ``is_own``: this process recorded them; ``where``: the step's file.
    """

    before: Mapping[str, str]
    after: States
    is_own: bool
    where: str

    @classmethod
    def of(
        cls, recorded: GeneratorStates | None, *, where: str, is_own: bool, are_all_needed: bool
    ) -> RecordedStates | None:
        """Read the states of a step; None where there are none.

        Raises ``RecordingError`` where ``are_all_needed`` and some are lacking, or where one is no state.
        """
        missing = [name for name in _ALWAYS_THERE if name not in (recorded or {})]
        if missing and are_all_needed:
            raise RecordingError(
                f"[Rollout Mock] {where} was recorded without the states of the random generators "
                f"{', '.join(missing)}, which rollout_mock.random_states=all asks for. Record again with all, or "
                "replay with random_states=moved, which sets those that are recorded."
            )
        if not recorded:
            return None
        unknown = sorted(set(recorded) - set(_GENERATORS))
        if unknown:
            raise RecordingError(
                f"[Rollout Mock] {where} has the states of random generators {unknown}; known are {sorted(_GENERATORS)}"
            )
        after: States = {}
        for name, (_, text) in recorded.items():
            try:
                after[name] = base64.b64decode(text, validate=True)
            except binascii.Error as error:
                raise RecordingError(
                    f"[Rollout Mock] {where}: the state of the random generator {name!r} is no base64: {error}"
                ) from error
        return cls(before={name: pair[0] for name, pair in recorded.items()}, after=after, is_own=is_own, where=where)

    def restore(self, warn: Callable[..., None]) -> None:
        """Set the states; ``warn`` is told, once for each generator, which are left as they are.

        Raises ``RecordingError`` where a state is none of its generator.
        """
        for name, state in self.after.items():
            current = _GENERATORS[name].read()
            if current is None:
                warn(f"{self.where}: the recorded state of {name!r} is not set: it is not in use here", once=name)
            elif not self.is_own and digest_of(current) != self.before[name]:
                warn(
                    f"{self.where}: the recorded state of the random generator {name!r} is not set in this process: "
                    "another one recorded it, whose generator stood elsewhere before the rollout",
                    once=name,
                )
            else:
                self._set(name, state)

    def _set(self, name: str, state: bytes) -> None:
        try:
            _GENERATORS[name].write(state)
        except (RuntimeError, ValueError, TypeError, OverflowError, struct.error) as error:
            raise RecordingError(
                f"[Rollout Mock] {self.where}: the recorded state cannot be set in the random generator {name!r}: "
                f"{error}. It is of another release, or was changed; rollout_mock.random_states=none leaves all "
                "generators as they are."
            ) from error


def digest_of(state: bytes) -> str:
    """Returns SHA-256 (hex) of a state."""
    return hashlib.sha256(state).hexdigest()


class _LiveCalls:
    """Counts the live calls of this process, of all proxies: the generators are the process's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = self._num_begun = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[], bool]]:
        """A live call; the value says whether it has been alone so far."""
        with self._lock:
            was_alone = self._num_open == 0
            self._num_open += 1
            self._num_begun += 1
            number = self._num_begun
        try:
            yield lambda: was_alone and self._num_begun == number
        finally:
            with self._lock:
                self._num_open -= 1


_LIVE_CALLS = _LiveCalls()


class GeneratorWatch:
    """Watches what the real scheduler does to the random generators, from one answer to the next.

    ``kind`` None, the default: ``moved`` for calls from the main thread of a synchronous trainer, which waits for them;
    elsewhere a trainer may draw while a rollout is on its way, and nothing tells whose draws they were.
    """

    def __init__(self, kind: RandomStates | None, *, is_async: bool, is_watching: bool) -> None:
        self._kind = kind
        self._is_async = is_async
        self._is_watching = is_watching and kind != "none"
        self._before: States | None = None
        self._moved: set[str] = set()
        self._is_shared = False

    def reset(self) -> None:
        """Begin anew: the pipeline has its answer."""
        self._before, self._moved, self._is_shared = None, set(), False

    @contextmanager
    def live_call(self) -> Iterator[None]:
        """Note the generators moved by a call of the real scheduler, or by building it."""
        if not self._is_watching or not self._is_attributable():
            with _LIVE_CALLS.one():  # others must know of it
                yield
            return
        before = read_states()
        self._before = self._before or before
        with _LIVE_CALLS.one() as is_alone:
            try:
                yield
            finally:
                after = read_states()
                self._moved |= {name for name, state in after.items() if before.get(name) != state}
                self._is_shared |= not is_alone()

    def take(self) -> GeneratorStates | None:
        """Return the states to record with the batch that was just given, and begin anew; None: none are recorded."""
        before, moved, is_shared = self._before, self._moved, self._is_shared
        self.reset()
        return None if before is None or is_shared else self._encode(before, read_states(), moved)

    def read(self) -> States | None:
        """Read the states before the trainer computes values; None where none are recorded."""
        return read_states() if self._is_watching and self._is_attributable() else None

    def take_since(self, before: States | None) -> GeneratorStates | None:
        """Return the states to record after the trainer computed values; ``before``: from ``read``."""
        if before is None:
            return None
        after = read_states()
        return self._encode(before, after, {name for name, state in after.items() if before.get(name) != state})

    def _encode(self, before: States, after: States, moved: set[str]) -> GeneratorStates | None:
        names = sorted(after) if self._kind == "all" else sorted(moved & after.keys())
        encoded = {name: base64.b64encode(after[name]).decode() for name in names}
        return {name: (digest_of(before.get(name, b"")), text) for name, text in encoded.items()} or None

    def _is_attributable(self) -> bool:
        if self._kind is not None:
            return True
        return not self._is_async and threading.current_thread() is threading.main_thread()
