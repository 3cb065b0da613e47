"""Two ranks of DDP and of FSDP2 leave traces of one training: whole in one, in uneven shards in the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mock_scheduler.api.compare import check_replicas, compare
from mock_scheduler.api.reading import open_trace
from mock_scheduler.verdict.verdict import VerdictKind

ROOT = Path(__file__).parents[2]


@pytest.mark.all
def test_ddp_and_fsdp2_compare_to_the_bit(tmp_path: Path) -> None:
    for kind in ("ddp", "fsdp"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run(
            [*command, str(Path(__file__).with_name("two_ranks.py")), kind, str(tmp_path / kind)],
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
        )
    verdict = compare(tmp_path / "ddp", tmp_path / "fsdp")
    assert verdict.kind is VerdictKind.IDENTICAL
    assert len(open_trace(tmp_path / "fsdp").keys(1, "optimizer")) == 8
    replicas = check_replicas(tmp_path / "ddp")
    assert replicas.num_copies == {"dp": 40}
    assert not replicas.conflicts
