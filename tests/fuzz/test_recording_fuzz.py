"""Recordings with forged steps, manifests, commits and bytes: each command on one ends with a verdict or an error."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mock_scheduler.errors import RecordingError
from mock_scheduler.recording.step.step_file import decode_step
from mock_scheduler.recording.step.stored_tensors import count_stored_bytes
from mock_scheduler.support.tensor_bytes import DTYPES
from tests.fuzz.corpus import Tensors, copy_tree, make_recording, pack_step, unpack_step
from tests.fuzz.mutations import fuzz, limits, mutate_bytes, mutate_json, run_command, sealed_file
from tests.recording.step_bytes import fixed_step

_SMALL_FILES = ("recording.json", "train/step_000005/commit.json", "retention.json")
_STEPS = ("train/step_000000.safetensors", "train/step_000003.safetensors")
_ALL_DTYPES = [str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recording(tmp_path_factory.mktemp("recordings") / "recording")


def forge_tensor(tensors: Tensors, rng: random.Random) -> str:
    """Changes dtype, shape, name or bytes of a tensor; each digest will fit."""
    name, action = rng.choice(list(tensors)), rng.randrange(7)
    dtype, shape, data = tensors[name]
    if action == 0:
        del tensors[name]
    elif action == 1:
        shape = rng.choice([[], [0], [len(data)], [1] * 5, shape[::-1], [*shape, 1], [0, *shape], [2**40], [0, 2**62]])
    elif action == 2:
        dtype = rng.choice(_ALL_DTYPES)
    elif action == 3:
        new = rng.choice(["x", "extras/evil", "extras/", "extras/a#offsets", "tokens#bits", "__metadata__"])
        tensors[new] = copy.deepcopy(tensors[name])
    elif action == 4:
        data, shape = data * 2, [2 * (shape[0] if shape else 1), *shape[1:]]
    elif action == 5:
        other = rng.choice(list(tensors))
        tensors[name], tensors[other] = tensors[other], tensors[name]
        return f"swapped {name} and {other}"
    else:
        width = DTYPES[dtype].itemsize if dtype in DTYPES else 1
        values = [b"\xff" * width, bytes(width), b"\x7f" * width, b"\xff" * (width - 1) + b"\x7f"]
        data = (rng.choice(values) * (len(data) // width + 1))[: len(data)]
    if name in tensors:
        if dtype in DTYPES:
            needed = count_stored_bytes(dtype, tuple(shape))
            data = (data + bytes(min(needed, 10**6)))[:needed] if needed < 10**6 else data
        tensors[name] = [dtype, shape, data]
    return f"tensor {name}, way {action}"


def forge_step(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Gives another step file, and says how it differs."""
    action = rng.randrange(5)
    if action == 0:
        return mutate_bytes(data, rng), "bytes"
    content, tensors = unpack_step(data)
    said = str(mutate_json(content, rng)) if action < 3 else ""
    if action > 1:
        said += forge_tensor(tensors, rng)
    return pack_step(content, tensors), said


def forge_small_file(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    if rng.random() < 0.2:
        return mutate_bytes(data, rng), "bytes"
    document: dict[str, Any] = json.loads(data)
    document.pop("digest")
    said = str(mutate_json(document, rng))
    return sealed_file(document), said


def attack(sources: Path, work: Path, kind: str, rng: random.Random) -> list[str]:
    """Mutates one file of a recording, and runs the commands that read it; gives what went wrong."""
    recording = copy_tree(sources, work / "recording")
    if kind == "step":
        path = recording / rng.choice(_STEPS)
        data, said = forge_step(path.read_bytes(), rng)
    elif kind == "zstd":
        path = recording / "train/step_000004.safetensors.zst"
        data, said = mutate_bytes(path.read_bytes(), rng), "bytes"
    else:
        path = recording / rng.choice(_SMALL_FILES)
        data, said = forge_small_file(path.read_bytes(), rng)
    path.write_bytes(data)
    step = rng.choice(["0", "3", "4", "5"]) if kind == "small" else str(int(path.name[5:11]))
    commands = [
        ("inspect", recording),
        ("verify", recording),
        ("show", recording, "--step", step, "--row", rng.choice(["0", "-1", "best"])),
        rng.choice([("diff", sources, recording), ("correction", recording), ("compare", sources, recording)]),
    ]
    return [f"{path.name} {said}: {problem}" for command in commands if (problem := run_command(*command))]


@pytest.mark.all
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["step", "zstd", "small"])
def test_a_mutated_recording_ends_with_a_verdict_or_an_error(sources: Path, tmp_path: Path, kind: str) -> None:
    @fuzz(200)
    def check(rng: random.Random) -> None:
        assert attack(sources, tmp_path, kind, rng) == []

    check()


@pytest.mark.parametrize("kind", ["step", "zstd", "small"])
def test_a_few_mutated_recordings(sources: Path, tmp_path: Path, kind: str) -> None:
    """The first ones of the sweep, in the gate."""
    for seed in range(3):
        assert attack(sources, tmp_path, kind, random.Random(seed)) == []


def decode_forged(rng: random.Random) -> None:
    data, said = forge_step(fixed_step(), rng)
    problem = "here: "
    with limits():
        try:
            batch, _ = decode_step(data, source="here")
            batch.digest()
        except RecordingError as error:
            problem = str(error)
    assert problem.startswith("here: "), said


@fuzz(100)
def test_a_forged_step_is_decoded_or_refused(rng: random.Random) -> None:
    """As a training service reads it out of a request."""
    decode_forged(rng)


@pytest.mark.all
@fuzz(3000)
def test_any_forged_step_is_decoded_or_refused(rng: random.Random) -> None:
    decode_forged(rng)
