"""Data comes out of a pickle, and nothing in it is run: gadgets of every kind of opcode are refused by name."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.support.pickles.data import MAX_PICKLE_BYTES, Name, PickledDataError, Record, read_pickled_data

NAMES = ("torch.Size", "collections.OrderedDict", "torch.float32")
_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_DATA = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.lists(inner).map(tuple),
    max_leaves=20,
)


class Writes:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


@given(_DATA, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_out_as_it_went_in(value: object, protocol: int) -> None:
    if protocol < 3 and _has_bytes(value):
        return  # protocol 2 makes bytes by a call
    assert read_pickled_data(pickle.dumps(value, protocol), names=()) == value


def _has_bytes(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_bytes, [*value, *value.values()]))
    return isinstance(value, bytes) or (isinstance(value, list | tuple) and any(map(_has_bytes, value)))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_an_object_of_the_closed_list_is_a_record_and_no_object(protocol: int) -> None:
    value = [torch.Size([2, 3]), torch.float32, OrderedDict(a=1)]
    size, dtype, ordered = read_pickled_data(pickle.dumps(value, protocol), names=NAMES)
    assert isinstance(size, Record)
    assert (size.kind, size.arguments) == (Name("torch.Size"), ((2, 3),))
    assert dtype == Name("torch.float32")
    assert isinstance(ordered, Record)
    assert ordered.entries == {"a": 1}


def gadgets(folder: Path) -> dict[str, bytes]:
    """Pickles that make a folder where they are unpickled, by the kind of their opcodes."""
    target = text(str(folder))
    call = b"\x85R."  # TUPLE1, REDUCE, STOP
    module, name = b"\x8c\x02os", b"\x8c\x05mkdir"
    return {
        "GLOBAL and REDUCE": b"\x80\x02cos\nmkdir\n" + target + call,
        "STACK_GLOBAL and REDUCE": b"\x80\x04" + module + name + b"\x93" + target + call,
        "nested attribute": b"\x80\x04" + module + b"\x8c\x0dpath.os.mkdir" + b"\x93" + target + call,
        "attribute of a listed name": b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93" + target + call,
        "INST": b"(" + target + b"ios\nmkdir\n.",
        "OBJ": b"(cos\nmkdir\n" + target + b"o.",
        "NEWOBJ_EX": b"\x80\x04cbuiltins\nexec\n" + target + b"\x85}\x92.",
        "BUILD with a listed class": b"\x80\x02ctorch\nSize\n)\x81cos\nmkdir\n" + target + b"\x85Rb.",
        "EXT1": b"\x82\x01" + target + call,
        "EXT2": b"\x83\x01\x00" + target + call,
        "EXT4": b"\x84\x01\x00\x00\x00" + target + call,
        "PERSID": b"Pcode\n.",
        "BINPERSID": b"\x80\x02" + target + b"\x85Q.",
        "call of a list": b"\x80\x02](" + target + b"tR.",
        "call of a persistent id": b"\x80\x02" + target + b"\x85Q" + target + call,
        "prelude before data": b"\x80\x02cos\nmkdir\n" + target + b"\x85R0" + pickle.dumps({"a": 1}, 2)[2:],
        "protocol 0": pickle.dumps(Writes(folder), 0),
        "protocol 5": pickle.dumps(Writes(folder), 5),
        "out-of-band buffer": b"\x80\x05\x97.",
        "set": b"\x80\x04\x8f.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\n" + b"cos\n\n" + text("mkdir") + b"\x86R.",
        "numbers as text": b"I1\n.",
    }


@pytest.mark.parametrize("kind", gadgets(Path("x")))
def test_a_gadget_is_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    data = gadgets(tmp_path / "made")[kind]
    copyreg.add_extension("os", "mkdir", 1)
    try:
        with pytest.raises(PickledDataError):
            read_pickled_data(data, names=NAMES)
    finally:
        copyreg.remove_extension("os", "mkdir", 1)
    assert not (tmp_path / "made").exists()


def test_these_gadgets_run_where_they_are_unpickled(tmp_path: Path) -> None:
    """A control: the refused pickles are what they claim to be."""
    working = ("GLOBAL and REDUCE", "STACK_GLOBAL and REDUCE", "nested attribute", "INST", "OBJ", "prelude before data")
    for number, kind in enumerate(working):
        pickle.load(io.BytesIO(gadgets(tmp_path / str(number))[kind]))
        assert (tmp_path / str(number)).is_dir(), kind


def test_a_state_with_a_setter_is_data() -> None:
    data = b"\x80\x02ctorch\nSize\n)\x81}" + text("__setstate__") + b"ctorch\nSize\nsb."
    record = read_pickled_data(data, names=NAMES)
    assert record.get("__setstate__") == Name("torch.Size")
    assert type(record) is Record


BOMBS = {
    "a memo of 2^31 places": b"\x80\x02]r\xff\xff\xff\x7f.",
    "tuples in tuples as a key": b"\x80\x02})\x85" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xff.",
    "a text of 2^62 bytes": b"\x80\x04\x8d\x00\x00\x00\x00\x00\x00\x00\x40.",
    "bytes of 2^62 bytes": b"\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x40.",
    "a frame of 2^62 bytes": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x40N.",
    "an integer of 2^31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "lists in lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "values without end": b"\x80\x02" + b"N2" * 100_000,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_bomb_takes_no_more_than_its_file(kind: str) -> None:
    tracemalloc.start()
    with suppress(PickledDataError):
        read_pickled_data(BOMBS[kind], names=NAMES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 + 200 * len(BOMBS[kind])


def test_a_pickle_larger_than_any_description_is_not_read() -> None:
    with pytest.raises(PickledDataError, match=f"at most {MAX_PICKLE_BYTES} are read"):
        read_pickled_data(bytes(MAX_PICKLE_BYTES + 1), names=())


@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_refused(data: bytes) -> None:
    with suppress(PickledDataError):
        read_pickled_data(data, names=NAMES, has_persistent_ids=True)


@given(st.data())
def test_a_changed_pickle_is_data_or_refused(data: st.DataObject) -> None:
    content = bytearray(pickle.dumps([torch.Size([2]), {"a": (1, 2.0, None)}, OrderedDict(b="c")], 4))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(PickledDataError):
        read_pickled_data(bytes(content), names=NAMES)
