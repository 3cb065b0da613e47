"""What the fuzzers share: mutations of JSON and bytes, a seal that fits again, and limits of memory and time."""

from __future__ import annotations

import contextlib
import io
import json
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mock_scheduler import cli
from mock_scheduler.support.digests import canonical_json, seal
from mock_scheduler.support.files import encode_json

#: Memory beyond what the process has, and seconds that one example may take.
MAX_MORE_BYTES = 3 * 2**30
MAX_SECONDS = 60

_Path = tuple[str | int, ...]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63),
    *(2**64, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-320, "", "x", "0", "-1", "nan", "NaN", "inf"),
    *("-inf", "1e999", "\N{LATIN SMALL LETTER Y WITH DIAERESIS}", "a\x00b", "\x1b[31mRED", "../../etc/passwd"),
    *("__metadata__", "token", "gradient", "float32", "int32", "bool", "complex128", "float2048", "quint8", "int4"),
    *("\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}", "1_000", "A" * 5000, "9" * 5000, "0" * 64, "f" * 64),
    *([], [[]], [None], [0, 2**62], [-1], [1] * 100, [""], ["x"], [[0, 0, 0]], [[1, 2]], [0.5], {}, {"a": 1}),
    *({"": {}}, {"0": "x"}, {"value": None}, [{}], [[[]]], _nested(90), _nested(400)),
)


def mutate_json(document: Any, rng: random.Random) -> list[str]:
    """Changes one to three places of a document in place; says what it did."""
    said = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [place for place in _places(document) if place]
        if not places:
            break
        said.append(_mutate_at(document, rng.choice(places), rng))
    return said


def _mutate_at(document: Any, place: _Path, rng: random.Random) -> str:
    holder, key, action = _value_at(document, place[:-1]), place[-1], rng.randrange(6)
    if action == 0:
        del holder[key]
        return f"deleted {place}"
    value = json.loads(json.dumps(rng.choice(VALUES) if action < 3 else _near(holder[key], rng)))
    if action == 5 and isinstance(holder, dict):
        key = rng.choice([str(rng.choice(VALUES))[:50], f"{key}x"])
    elif action == 5:
        holder.insert(rng.randrange(len(holder) + 1), value)
        return f"inserted {str(value)[:40]} at {place}"
    holder[key] = value
    return f"set {(*place[:-1], key)} to {str(value)[:40]}"


def _near(value: Any, rng: random.Random) -> Any:
    """Gives a value of another size, type or sign than this one."""
    if isinstance(value, bool):
        return rng.choice([0, 1, not value, "true", None])
    if isinstance(value, int):
        return rng.choice(
            [value + 1, value - 1, -value, value * 2, value + 2**31, value << 40, float(value % 2**1000), [value]]
        )
    if isinstance(value, float):
        return rng.choice([-value, value * 1e300 if abs(value) < 1e8 else 0.0, str(value), value + 1, int(value)])
    if isinstance(value, str):
        return rng.choice([f"{value}x", value[:-1], value.upper(), value * 2, f"{value}\n", value[::-1], [value]])
    if isinstance(value, list):
        return rng.choice([value + value, value[:-1], value[::-1], [value], value[1:], value * 50, [*value, None], {}])
    if isinstance(value, dict):
        return rng.choice([list(value.values()), list(value), {**value, "extra": 1}, dict(list(value.items())[:-1])])
    return rng.choice(VALUES)


def _places(value: Any, place: _Path = ()) -> Iterator[_Path]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*place, key))


def _value_at(document: Any, place: _Path) -> Any:
    for key in place:
        document = document[key]
    return document


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flips bits, cuts, doubles or overwrites some of the bytes."""
    changed, action = bytearray(data), rng.randrange(5)
    at = rng.randrange(max(len(data), 1))
    if action == 0:
        for _ in range(rng.choice([1, 1, 8])):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif action == 1:
        del changed[at:]
    elif action == 2:
        changed[at:at] = changed[at : at + rng.choice([1, 8, 100])]
    elif action == 3:
        changed[at : at + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1, 10**8]))
    else:
        changed += bytes(rng.choice([1, 8, 10_000]))
    return bytes(changed)


def sealed_text(document: dict[str, Any]) -> str:
    """The document as canonical JSON with a digest that fits; where it is no JSON, as it is."""
    document.pop("digest", None)
    try:
        return canonical_json(seal(document))
    except (ValueError, TypeError, RecursionError):
        return json.dumps(document, default=str)


def sealed_file(document: dict[str, Any]) -> bytes:
    """The same in the layout of a recording's small files."""
    document.pop("digest", None)
    try:
        return encode_json(seal(document))
    except (ValueError, TypeError, RecursionError):
        return json.dumps(document, default=str).encode()


@contextlib.contextmanager
def limits(more_bytes: int = MAX_MORE_BYTES) -> Iterator[None]:
    """Bounds memory and time of a block: beyond them it ends in ``MemoryError`` or ``TimeoutError``.

    more_bytes: what it may map beyond what the process has mapped already.
    """

    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {MAX_SECONDS} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(MAX_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_command(*arguments: str | Path) -> str:
    """Runs a command of this project within the limits; gives what is wrong with its end, empty where nothing is."""
    out, err = io.StringIO(), io.StringIO()
    with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(item) for item in arguments])
    if code in range(6) and "Traceback" not in err.getvalue():
        return ""
    return f"{' '.join(map(str, arguments))} ended with {code}:\n{err.getvalue()}"


def fuzz(num_examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test with so many generators of random numbers, the same ones each time."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
        options = settings(
            max_examples=num_examples, derandomize=True, database=None, deadline=None, suppress_health_check=checks
        )
        seeds = st.integers(0, 2**32 - 1).map(random.Random)
        return options(given(rng=seeds)(test))

    return decorate
