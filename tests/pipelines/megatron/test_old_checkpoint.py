"""Files of a checkpoint without seals that no list of sizes has looked at: refused, and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mock_scheduler.errors import ForeignFileError
from mock_scheduler.support.pickles.data import PickledDataError
from mock_scheduler.trace.geometry import Rectangle
from pipelines.megatron.old_checkpoint import _Chunk, _Index

WHOLE = torch.arange(8.0)
WANTED = ShardedTensor.from_rank_offsets("w", torch.zeros(8))


def index_of(folder: Path, *origins: int) -> _Index:
    """An index of boxes of four elements each, which begin at these places."""
    chunks = []
    for origin in origins:
        torch.save(WHOLE[origin : origin + 4].clone(), folder / f"{origin}.distcp")
        size = (folder / f"{origin}.distcp").stat().st_size
        box = Rectangle(origin=(origin,), sizes=(4,))
        chunks.append(_Chunk(box=box, file=f"{origin}.distcp", offset=0, length=size))
    return _Index(folder=folder, chunks={"w": chunks})


def test_boxes_that_fill_a_tensor_are_read(tmp_path: Path) -> None:
    assert torch.equal(index_of(tmp_path, 0, 4).read(WANTED), WHOLE)


@pytest.mark.parametrize("origins", [(0, 0), (0, 2), (4, 4), (0, 4, 4)])
def test_an_element_that_is_there_twice_stands_for_no_other(tmp_path: Path, origins: tuple[int, ...]) -> None:
    """Two halves that overlap are as many elements as the whole; the rest stayed 0."""
    with pytest.raises(PickledDataError, match="elements of w are there twice"):
        index_of(tmp_path, *origins).read(WANTED)


@pytest.mark.parametrize("kind", ["pipe", "link"])
@pytest.mark.parametrize("name", [".metadata", "4.distcp"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    index = index_of(folder, 0, 4)
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (tmp_path / "outside").write_bytes(b"x" * 2000)
        (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(ForeignFileError, match="is a pipe" if kind == "pipe" else "is a link to"):
        _Index.open(folder) if name == ".metadata" else index.read(WANTED)
