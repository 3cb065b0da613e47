"""Forges checkpoints and seals them anew: ``python -m tests.fuzz.checkpoint_worker FOLDER NUM SEED``.

A process of its own, since it builds a model. Prints what was wrong with the end of a load as JSON: anything but a load
that succeeds, or a ``ConfigError`` that ends the resume.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import seal
from mock_scheduler.support.files import encode_json
from pipelines.megatron.checkpoint import load_checkpoint, save_checkpoint
from pipelines.megatron.file_seals import seal_pieces
from pipelines.megatron.learner import Learner
from pipelines.megatron.run_state import RunState, check_contents, check_files, read_run_state
from tests.fuzz.mutations import limits, mutate_bytes, mutate_json
from tests.pipelines.megatron.ranks import one_rank
from tests.pipelines.workers.saving_worker import build_learner

_SLOW_S = 20.0
_MODEL, _RANDOM = "policy/rank_00000.safetensors", "random_states/rank_00000.safetensors"
_DTYPES = (
    "F64",
    "F32",
    "BF16",
    "F16",
    "U8",
    "F4",
    "F8_E8M0",
    "F8_E4M3",
    "C64",
    "BOOL",
    "I64",
    "F6_E2M3",
    "f32",
    "",
    None,
    7,
)
_SHAPES: tuple[object, ...] = ([0], [], [2**62], [2**62, 4, 0], [-1], [1e9], "x", [[1]], [1, 1, 1])
_ORIGINS = ("", "0", "9" * 5000, "0,0,0", "1,0", "-1,0", "\N{SUPERSCRIPT TWO},0", "0," + "9" * 18, "1_0,0", " 0,0")
_OFFSETS: tuple[Any, ...] = ([0, 0], [0, 2**63], [5, 3], [-4, 4], [0, 8], [0.0, 8.0])
_NUMBERS = (0, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**20, 10**308, 10**400, 1.5, "1", None)
_NAMES = ("policy/\ud800", "policy/" + "a" * 300, "policy", "../x", "/etc/passwd", "policy/../" + _MODEL, "a\0b", "")


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _write(path: Path, header: object, body: bytes) -> None:
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def _forge_header(header: dict[str, Any], rng: random.Random) -> str:
    """Changes a tensor's dtype, shape, place, name, or which bytes it has."""
    names = [name for name in header if name != "__metadata__"]
    name, other, action = rng.choice(names), rng.choice(names), rng.randrange(9)
    entry = header[name]
    if action == 0:
        entry["dtype"] = rng.choice(_DTYPES)
    elif action == 1:
        entry["shape"] = rng.choice([*_SHAPES, entry["shape"][::-1], [*entry["shape"], 1]])
    elif action == 2:
        entry["data_offsets"] = rng.choice([*_OFFSETS, entry["data_offsets"][::-1]])
    elif action == 3:
        header[f"{name.rpartition('@')[0]}@{rng.choice(_ORIGINS)}"] = header.pop(name)
    elif action == 4:
        header[name], header[other] = header[other], header[name]
    elif action == 5:
        header[f"{name} "] = dict(entry)
    elif action == 6:
        header["__metadata__"] = rng.choice([{"layout": "x"}, {"a": "b" * 10**6}, {"a": 1}, [], None])
    elif action == 7:
        header[name] = dict(header[other])
    else:
        return str(mutate_json(header, rng))
    return f"{action} of {name[:60]}: {str(entry)[:80]}"


def _forge_state(document: dict[str, Any], rng: random.Random) -> str:
    action, number = rng.randrange(5), rng.choice(_NUMBERS)
    if action == 0:
        document["counters"]["policy"][rng.choice(["num_updates", "lr_steps"])] = number
    elif action == 1:
        document["next_step"] = number
    elif action == 2:
        document["files"][rng.choice(_NAMES)] = {"size_bytes": 1, "crc32": "00000000"}
    elif action == 3:
        document["learner"] = {"kl_in_reward": {"coef": number}, str(number)[:9]: number}
    else:
        return str(mutate_json(document, rng))
    return f"{action} with {str(number)[:40]}"


def forge(folder: Path, rng: random.Random) -> str:
    """Changes one thing of a checkpoint and seals all of it anew; says what."""
    document = json.loads((folder / "run_state.json").read_bytes())
    del document["digest"]
    kind = rng.choice(["state", "state", "header", "header", "header", "bytes", "random"])
    path = folder / (_RANDOM if kind == "random" else _MODEL)
    header, body = _read(path)
    if kind == "state":
        said = _forge_state(document, rng)
    elif kind == "bytes" or (kind == "random" and rng.random() < 0.5):
        _write(path, header, mutate_bytes(body, rng))
        said = f"bytes of {path.name}"
    else:
        said = _forge_header(header, rng)
        _write(path, header, body)
    files = document.get("files")
    for name, stored in files.items() if isinstance(files, dict) else ():
        if name in (_MODEL, _RANDOM) and isinstance(stored, dict):
            found = seal_pieces([(folder / name).read_bytes()])
            stored.update(size_bytes=found.size_bytes, crc32=found.crc32)
    (folder / "run_state.json").write_bytes(encode_json(seal(document)))
    return f"{kind}: {said}"


def _load(folder: Path, learner: Learner) -> None:
    state = read_run_state(folder)
    check_files(folder, state)
    check_contents(folder, state, one_rank())
    load_checkpoint(folder, learner, state)


def run(root: Path, num: int, seed: int) -> dict[str, Any]:
    """Forges so many checkpoints and loads each; returns the ends by kind, and the wrong ones."""
    learner = build_learner()
    state = RunState(
        next_step=1, mode="real", fixed={"seed": 1}, scheduler={"a": 1}, learner=dict(learner.values.state_dict())
    )
    save_checkpoint(root / "sound", learner, state)
    rng, ends, problems = random.Random(seed), Counter[str](), []
    while ends.total() < num:
        folder = Path(shutil.copytree(root / "sound", root / "forged"))
        said, started, end = "", time.monotonic(), "loaded"
        try:
            said = forge(folder, rng)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # not what JSON can say
            shutil.rmtree(folder)
            continue
        try:
            with limits():
                _load(folder, learner)
        except ConfigError:
            end = "refused"
        except Exception:  # noqa: BLE001 - what is looked for
            end = "wrong"
            problems.append(f"{said}: {traceback.format_exc()[-1500:]}")
        if time.monotonic() - started > _SLOW_S:
            problems.append(f"{said}: took {time.monotonic() - started:.0f} s")
        ends[end] += 1
        shutil.rmtree(folder)
    _load(root / "sound", learner)
    return {"ends": dict(ends), "problems": problems}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
