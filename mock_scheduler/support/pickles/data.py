"""Reads the data of a pickle without unpickling it: no class is looked up, nothing is called, nothing is imported.

Contract: the opcodes of a closed list are followed; any other refuses the file, with its place. Numbers, texts, bytes,
lists, tuples and dicts come out as they are. A global of the caller's closed list becomes a ``Name``, and what a pickle
would build of it by a call or a state becomes a ``Record``: inert data. Everything that comes out is proportional to
the file: an opcode makes one object, and a key of a dict is a text, a number, bytes or a ``Record``, so that no hash
runs through nested data.
"""

from __future__ import annotations

import io
import pickletools
import re
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

#: No more is read where a caller states no other limit: a description of tensors has some hundred bytes for each.
MAX_PICKLE_BYTES = 64 * 2**20

#: Numbers one after another, as lists of token ids and log-probabilities have: read together, twenty times as fast.
_NUMBER_RUN = re.compile(rb"(?:K.|M..|J....|G.{8}){8,}", re.DOTALL)
_NUMBER = re.compile(rb"K.|M..|J....|G.{8}", re.DOTALL)
_FLOAT = struct.Struct(">xd")
_OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}


class PickledDataError(ValueError):
    """A pickle has an opcode, a global or a form outside the closed lists; the text goes on from the file's name."""


class UnlistedNameError(PickledDataError):
    """A pickle names a global outside the caller's closed list."""


@dataclass(frozen=True, slots=True)
class Name:
    """Holds a global as the pickle writes it: its module, a dot, its own name."""

    text: str


@dataclass(slots=True, eq=False)
class Record:
    """An object as the pickle describes it: its class or function, the arguments and the state. Equal only to itself.

    ``entries``: pairs that the pickle puts into an object that is a mapping.
    """

    kind: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    entries: dict[Any, Any] = field(default_factory=dict)

    def get(self, name: str) -> Any:  # noqa: ANN401 - data of any kind
        """Returns a field of the state; raises ``PickledDataError`` where there is none."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise PickledDataError(f"has a {self.kind.text} without {name}")
        return self.state[name]


def read_pickled_data(
    data: bytes, *, names: Collection[str], has_persistent_ids: bool = False, max_bytes: int = MAX_PICKLE_BYTES
) -> Any:  # noqa: ANN401
    """Reads one pickle of protocol 2 or later.

    Args:
        data: the whole pickle.
        names: the globals that may occur, as ``module.name``.
        has_persistent_ids: let persistent ids of the file's own data stand for objects, as torch's storages do.
        max_bytes: the largest pickle that is read.

    Returns:
        The data, with ``Name`` and ``Record`` for globals and objects; a persistent id is its tuple.

    Raises:
        PickledDataError: the file is no such pickle.
    """
    if len(data) > max_bytes:
        raise PickledDataError(f"is a pickle of {len(data)} bytes; at most {max_bytes} are read")
    machine = _Machine(names=frozenset(names), has_persistent_ids=has_persistent_ids)
    stream, numbers = io.BytesIO(data), _Integers()
    while True:
        position = stream.tell()
        try:
            run = _NUMBER_RUN.match(data, position)
            if run is not None:
                machine.stack.extend(numbers.read(run[0]))
                stream.seek(run.end())
                continue
            name, argument = _read_opcode(stream)
            if name == "STOP":
                return machine.finish(is_last=position + 1 == len(data))
            machine.follow(name, argument)
        except PickledDataError as error:
            raise type(error)(f"{error} (byte {position})") from None
        # What pickletools and the machine's own stack raise for a pickle that contradicts itself.
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            raise PickledDataError(f"is no whole pickle: {error} (byte {position})") from error


def _read_opcode(stream: io.BytesIO) -> tuple[str, Any]:
    code = stream.read(1)
    if not code:
        raise PickledDataError("is no whole pickle: it has no end")
    opcode = _OPCODES.get(code)
    if opcode is None:
        raise PickledDataError(f"is no whole pickle: no opcode is {code!r}")
    return opcode.name, None if opcode.arg is None else opcode.arg.reader(stream)


class _Integers(dict[bytes, int]):
    """The integers met, by their opcodes and arguments: token ids repeat."""

    def __missing__(self, piece: bytes) -> int:
        value = int.from_bytes(piece[1:], "little", signed=piece[:1] == b"J")
        self[piece] = value
        return value

    def read(self, run: bytes) -> list[int | float]:
        """Returns the numbers of a run."""
        pieces: list[bytes] = _NUMBER.findall(run)
        return [self[piece] if len(piece) < _FLOAT.size else _FLOAT.unpack(piece)[0] for piece in pieces]


class _Mark:
    """The place on the stack where the items of a collection begin."""


_MARK = _Mark()


@dataclass(slots=True)
class _Machine:
    """Holds the stack and the memo of one pickle, with an entry for each of the closed list of opcodes."""

    names: frozenset[str]
    has_persistent_ids: bool
    stack: list[Any] = field(default_factory=list)
    # A dict, since an index is a number of the file's choice, for which a list would take memory.
    memo: dict[int, Any] = field(default_factory=dict)

    def follow(self, name: str, argument: Any) -> None:  # noqa: ANN401 - of the opcode
        """Carries one opcode out."""
        if name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            self.stack.append(argument)
        elif name in _PUTS:
            self.memo[argument] = self.stack[-1]
        elif name in _GETS:
            self.stack.append(self.memo[argument])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        else:
            raise PickledDataError(f"has the opcode {name}, which plain data does not need; it is not followed")

    def finish(self, *, is_last: bool) -> Any:  # noqa: ANN401 - data of any kind
        """Returns the value of the whole pickle."""
        if not is_last or len(self.stack) != 1:
            raise PickledDataError("is no whole pickle: it has more than one value, or bytes after its end")
        return self.stack[0]

    def pop_to_mark(self) -> list[Any]:
        """Takes the items above the last mark, and the mark."""
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        items.reverse()
        return items

    def memoize(self, _argument: object) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def push_name(self, argument: object) -> None:
        """``GLOBAL``: pickletools gives module and name as one text with a space."""
        self._push_global(*str(argument).split(" ", 1))

    def push_stacked_name(self, _argument: object) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise PickledDataError("names a global by something other than two texts")
        self._push_global(module, name)

    def _push_global(self, module: str, name: str) -> None:
        text = f"{module}.{name}"
        if text not in self.names:
            raise UnlistedNameError(f"names {text!r}, which is not on the closed list; nothing of it is run")
        self.stack.append(Name(text))

    def push_tuple(self, size: int | None) -> None:
        items = self.pop_to_mark() if size is None else [self.stack.pop() for _ in range(size)][::-1]
        if any(item is _MARK for item in items):
            raise PickledDataError("is no whole pickle: a tuple has an open collection in it")
        self.stack.append(tuple(items))

    def build_object(self, _argument: object) -> None:
        """``REDUCE`` and ``NEWOBJ``: a class or function with its arguments."""
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, Name) or not isinstance(arguments, tuple):
            raise PickledDataError("calls something other than a global of the closed list")
        self.stack.append(Record(kind=kind, arguments=arguments))

    def set_state(self, _argument: object) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Record):
            raise PickledDataError("gives a state to something other than an object")
        target.state = state

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise PickledDataError("appends to something other than a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target = target.entries if isinstance(target, Record) else target
        if not isinstance(target, dict) or len(items) % 2:
            raise PickledDataError("sets items of something other than a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A tuple of tuples of tuples would be hashed to its last leaf, each time it occurs.
            if not isinstance(key, str | int | float | bytes | Record):
                raise PickledDataError(f"has a key of type {type(key).__name__}")
            target[key] = value

    def push_persistent(self, _argument: object) -> None:
        if not self.has_persistent_ids:
            raise PickledDataError("has a persistent id; nothing is looked up for it")
        if not isinstance(self.stack[-1], tuple):
            raise PickledDataError("has a persistent id that is no tuple")


_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"),
    }
)
_PUTS = frozenset({"BINPUT", "LONG_BINPUT"})
_GETS = frozenset({"BINGET", "LONG_BINGET"})
_OPERATIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda _machine, _argument: None,
    "FRAME": lambda _machine, _argument: None,
    "EMPTY_DICT": lambda machine, _argument: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _argument: machine.stack.append([]),
    "MEMOIZE": _Machine.memoize,
    "GLOBAL": _Machine.push_name,
    "STACK_GLOBAL": _Machine.push_stacked_name,
    "TUPLE": lambda machine, _argument: machine.push_tuple(None),
    "TUPLE1": lambda machine, _argument: machine.push_tuple(1),
    "TUPLE2": lambda machine, _argument: machine.push_tuple(2),
    "TUPLE3": lambda machine, _argument: machine.push_tuple(3),
    "REDUCE": _Machine.build_object,
    "NEWOBJ": _Machine.build_object,
    "BUILD": _Machine.set_state,
    "APPEND": lambda machine, _argument: machine.append([machine.stack.pop()]),
    "APPENDS": lambda machine, _argument: machine.append(machine.pop_to_mark()),
    "SETITEM": lambda machine, _argument: machine.set_items([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine, _argument: machine.set_items(machine.pop_to_mark()),
    "BINPERSID": _Machine.push_persistent,
}
