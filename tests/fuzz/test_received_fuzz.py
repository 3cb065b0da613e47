"""Received folders in which names lead elsewhere: a command ends with a verdict or an error, and tells no secret."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.fuzz.folders import build, command, commands_of
from tests.fuzz.mutations import fuzz, limits
from tests.fuzz.swapping import CANARY, swap_one

#: A folder to change -> which commands read it.
PLACES = {"rec": "rec/", "align": "align/", "tp2": "tp2/metrics", "base": "", ".": ""}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("received"))


def attack(folders: Path, work: Path, rng: random.Random) -> list[str]:
    """Changes what lies under some names; gives what went wrong."""
    shutil.rmtree(work, ignore_errors=True)
    root = Path(shutil.copytree(folders, work / "received"))
    place = rng.choice(sorted(PLACES))
    said = swap_one(root / place, rng)
    problems = []
    for arguments in commands_of(root, PLACES[place]):
        with limits():
            printed = command(*arguments)
        text = printed.out + printed.err
        if printed.code not in range(6) or CANARY in text.replace("\n", "").replace(" ", ""):
            problems.append(f"{said}: {arguments} ended with {printed.code}: {text[-2000:]}")
    copied = [path for path in (root / "out").rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()]
    return [*problems, *(f"{said}: {path} has a secret" for path in copied)]


def test_a_few_names_that_lead_elsewhere(folders: Path, tmp_path: Path) -> None:
    for seed in range(12):
        assert attack(folders, tmp_path / "work", random.Random(seed)) == []


@pytest.mark.all
@pytest.mark.timeout(3600)
def test_names_that_lead_elsewhere_end_with_a_verdict_or_an_error(folders: Path, tmp_path: Path) -> None:
    @fuzz(400)
    def check(rng: random.Random) -> None:
        assert attack(folders, tmp_path / "work", rng) == []

    check()
