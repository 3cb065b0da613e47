"""Agreement across ranks: every rank learns who differs, in real processes and by hand-made groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mock_scheduler.determinism.agreement import TorchRankGroup, check_agreement
from mock_scheduler.errors import RankDisagreementError

DIFFERENCE = (
    "the 2 ranks of this run differ:\n"
    "  - NCCL_ALGO: rank 0 'Ring'; rank 1 'Träe'\n"
    "  - NCCL_PROTO: rank 0 absent; rank 1 'LL'\n"
    "Start all ranks through launch/train.sh or launch/multi_node.sh with one configuration."
)


class GatheredRanks:
    """A group whose ranks' values are known beforehand."""

    def __init__(self, values: Sequence[str]) -> None:
        self._values = list(values)
        self.world_size = len(values)

    def all_equal(self, digest: bytes) -> bool:
        return len(set(self._values)) == 1

    def gather(self, payload: bytes) -> list[bytes]:
        return [value.encode() for value in self._values]


def _check_on_rank(global_rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=global_rank, world_size=2)
    group = TorchRankGroup(torch.device("cpu"))
    check_agreement({"NCCL_ALGO": "Ring"}, group)
    # -1 and the extremes of int64 are where a maximum by negation would overflow.
    assert group.all_equal(b"\xff" * 8 + b"\x00" * 7 + b"\x80")
    assert not group.all_equal(b"\x00" * 7 + (b"\x80" if global_rank else b"\x7f"))
    # Neither length nor content is taken for granted: none at all, and bytes that look like the padding.
    assert group.gather(b"\x00\xff\x00" if global_rank else b"") == [b"", b"\x00\xff\x00"]
    assert group.gather(b"") == [b"", b""]
    values = {"NCCL_ALGO": "Träe", "NCCL_PROTO": "LL"} if global_rank else {"NCCL_ALGO": "Ring"}
    try:
        check_agreement({**values, "same": "1"}, group)
    except RankDisagreementError as error:
        Path(folder, f"rank{global_rank}").write_text(str(error), encoding="utf-8")
    dist.destroy_process_group()


def test_two_processes_agree_or_both_name_the_difference(tmp_path: Path) -> None:
    mp.spawn(_check_on_rank, args=(str(tmp_path),), nprocs=2)
    assert [(tmp_path / f"rank{rank}").read_text(encoding="utf-8") for rank in range(2)] == [DIFFERENCE] * 2


def test_ranks_are_named_as_ranges() -> None:
    ring, tree = '{"NCCL_ALGO": "Ring"}', '{"NCCL_ALGO": "Tree"}'
    with pytest.raises(RankDisagreementError) as caught:
        check_agreement({"NCCL_ALGO": "Ring"}, GatheredRanks([ring, ring, ring, tree, ring, tree]))
    assert str(caught.value).splitlines()[1] == "  - NCCL_ALGO: ranks 0-2,4 'Ring'; ranks 3,5 'Tree'"


def test_one_process_agrees_with_itself() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = TorchRankGroup(torch.device("cpu"))
        check_agreement({"NCCL_ALGO": "Ring"}, group)
        assert group.gather(b"x\x00") == [b"x\x00"]
    finally:
        dist.destroy_process_group()
