"""Debug dumps with forged content and bytes: read, or refused by name, and compared without a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import random
import shutil
import traceback
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.adapters.nexrl.files import load_content
from mock_scheduler.adapters.nexrl.names import DumpKind
from mock_scheduler.compare_debug_dumps import main
from mock_scheduler.errors import TraceError
from tests.adapters.test_nexrl_comparison import micro_batch, put, write
from tests.fuzz.mutations import VALUES, fuzz, limits, mutate_bytes, mutate_json


class _Storage:
    """Stands for a storage in a pickle: a claimed number of float32 in the entry ``data/0``."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


class _Claim:
    """Pickles as a tensor of any size, stride and offset in such a storage."""

    def __init__(self, storage: _Storage, offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        hooks: OrderedDict[str, object] = OrderedDict()
        self._parts = (storage, offset, size, stride, False, hooks)

    def __reduce__(self) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self._parts  # type: ignore[attr-defined]


def claim_tensor(*, numel: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> object:
    """A value of ``pack_pt``: a float32 tensor in a storage of ``numel`` elements."""
    return _Claim(_Storage(numel), offset, size, stride)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        return ("storage", torch.FloatStorage, "0", "cpu", obj.numel) if isinstance(obj, _Storage) else None


def pack_pt(content: object, *, data: bytes = bytes(64), compression: int = zipfile.ZIP_STORED) -> bytes:
    """A ``.pt`` of any content, with ``data`` as its one storage."""
    text, archive = io.BytesIO(), io.BytesIO()
    _Pickler(text, protocol=2).dump(content)
    with zipfile.ZipFile(archive, "w", compression) as target:
        entries = {"data.pkl": text.getvalue(), "byteorder": b"little", "data/0": data, "version": b"3\n"}
        for name, value in entries.items():
            target.writestr(f"archive/{name}", value)
    return archive.getvalue()


def forge_pt(rng: random.Random) -> tuple[bytes, str]:
    """A dump's file with claims, and perhaps with other bytes; says what it is."""
    numel = rng.choice([16, 16, 4, 2**20, 2**40])
    size = rng.choice([(16,), (4, 4), (2**40,), (1, 2**40), (2**20, 2**20), (0, 2**62), ()])
    stride = tuple(rng.choice([0, 1, 4, 2**20, -1]) for _ in size)
    claim = claim_tensor(numel=numel, size=size, stride=stride, offset=rng.choice([0, 0, 1, 2**40]))
    content: dict[str, Any] = {"step": 0, "sample_ids": ["a", "b"], "trajectories": [{"tokens": [1]}]}
    said = str(mutate_json(content, rng)) if rng.random() < 0.5 else ""
    content["tensor"] = claim
    compression = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    data = pack_pt(content, data=bytes(rng.choice([64, 64, 0, 10**6])), compression=compression)
    said += f"{numel} {size} {stride} {compression}"
    return (mutate_bytes(data, rng), f"{said} bytes") if rng.random() < 0.4 else (data, said)


def forge_jsonl(rng: random.Random) -> tuple[bytes, str]:
    tensor = {"dtype": "float32", "shape": [2], "values": [0.5, "NaN"]}
    content: dict[str, Any] = {"step": 0, "x": tensor, "trajectories": [{"tokens": [1, 2], "reward": 0.5}]}
    said = str(mutate_json(content, rng))
    data = (json.dumps(content) + "\n").encode()
    return (mutate_bytes(data, rng), f"{said} bytes") if rng.random() < 0.3 else (data, said)


def attack(sources: Path, work: Path, kind: str, rng: random.Random) -> list[str]:
    """Reads a forged file; gives what went wrong."""
    del sources
    work.mkdir(exist_ok=True)
    path = work / f"step_000000.{kind}"
    data, said = forge_pt(rng) if kind == "pt" else forge_jsonl(rng)
    path.write_bytes(data)
    try:
        with limits(), warnings.catch_warnings():
            warnings.simplefilter("error")
            content = load_content(path)
        tensors = [value for value in content.values() if isinstance(value, torch.Tensor)]
        if any(tensor.numel() * tensor.element_size() > 2 * len(data) + 64 for tensor in tensors):
            return [f"{said}: a file of {len(data)} bytes gave {[tensor.shape for tensor in tensors]}"]
    except TraceError as error:
        return [] if str(error).startswith(str(path)) else [f"{said}: {error}"]
    return []


def forge_content(content: dict[str, Any], rng: random.Random) -> str:
    """Changes some values of a micro-batch to ones of another type, dtype or shape."""
    said = []
    for _ in range(rng.choice([1, 1, 2, 4])):
        name = rng.choice(list(content))
        old = content[name]
        if isinstance(old, torch.Tensor) and not old.is_complex() and rng.random() < 0.6:
            dtypes = (torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint16)
            values = (old.long() + 2**62, old.long() - 5, old.double().mul(1e300), old.double() * float("nan"))
            shapes = (old.reshape(-1)[:0], old.reshape(-1), old[None], old.double().sum())
            content[name] = rng.choice([*map(old.to, dtypes), *values, *shapes])
        elif rng.random() < 0.2:
            del content[name]
        else:
            content[name] = rng.choice([value for value in VALUES if plain(value)])
        said.append(f"{name}: {str(content.get(name))[:50]}")
    return "; ".join(said)


def plain(value: object) -> bool:
    """Whether a dump may hold it: no pickle that torch reads has an integer of so many bytes."""
    return not isinstance(value, int) or abs(value) < 2**1000


def attack_comparison(work: Path, rng: random.Random) -> list[str]:
    """Compares a forged dump with a sound one, both ways; gives what went wrong."""
    shutil.rmtree(work, ignore_errors=True)
    sound, forged = (write(work / name) for name in ("sound", "forged"))
    kind: DumpKind = rng.choice(("forward_data", "loss", "is_loss_debug"))
    content = micro_batch(("s0", "s1"))
    said = forge_content(content, rng)
    put(forged, kind, content)
    problems = []
    for first, second in ((sound, forged), (forged, sound)):
        out = io.StringIO()
        with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code = main(["--self_hosted_dir", str(first), "--weaver_dir", str(second), "--step", "0"])
            except Exception:  # noqa: BLE001 - any error that is not a clear one is a finding
                problems.append(f"{kind} {said}: {traceback.format_exc()}")
                continue
        if code not in range(6):
            problems.append(f"{kind} {said} ended with {code}")
    return problems


@pytest.mark.all
def test_a_forged_dump_is_compared_or_refused(tmp_path: Path) -> None:
    @fuzz(300)
    def check(rng: random.Random) -> None:
        assert attack_comparison(tmp_path / "work", rng) == []

    check()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.mark.parametrize("kind", ["pt", "jsonl"])
def test_a_few_forged_dumps(sources: Path, tmp_path: Path, kind: str) -> None:
    for seed in range(60):
        assert attack(sources, tmp_path, kind, random.Random(seed)) == []


@pytest.mark.all
@pytest.mark.parametrize("kind", ["pt", "jsonl"])
def test_a_forged_dump_is_read_or_refused(sources: Path, tmp_path: Path, kind: str) -> None:
    @fuzz(2000)
    def check(rng: random.Random) -> None:
        assert attack(sources, tmp_path, kind, rng) == []

    check()
