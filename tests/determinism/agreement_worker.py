"""One of two ranks that agree, and then differ: ``python -m`` this module with the folder of the test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mock_scheduler.determinism.agreement import TorchRankGroup, check_agreement
from mock_scheduler.determinism.agreement_rounds import Op, Reduction
from mock_scheduler.errors import RankDisagreementError


def check_on_rank(global_rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=global_rank, world_size=2)
    group = TorchRankGroup(torch.device("cpu"))
    check_agreement({"NCCL_ALGO": "Ring"}, group)
    # -1 and the extremes of int64 are where a maximum by negation would overflow.
    extremes = [-1, -(2**63), 2**63 - 1]
    assert group.reduce(Reduction(op=Op.MIN, words=[~word for word in extremes])) == [0, 2**63 - 1, -(2**63)]
    one_differs = ~(-(2**63) if global_rank else 2**63 - 1)
    assert group.reduce(Reduction(op=Op.MIN, words=[one_differs])) == [-(2**63)]
    # Neither length nor content is taken for granted: none at all, and bytes that look like the padding.
    assert group.gather(b"\x00\xff\x00" if global_rank else b"") == [b"", b"\x00\xff\x00"]
    assert group.gather(b"") == [b"", b""]
    values = {"NCCL_ALGO": "Träe", "NCCL_PROTO": "LL"} if global_rank else {"NCCL_ALGO": "Ring"}
    try:
        check_agreement({**values, "same": "1"}, group)
    except RankDisagreementError as error:
        Path(folder, f"rank{global_rank}").write_text(str(error), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    check_on_rank(int(os.environ["RANK"]), sys.argv[1])
