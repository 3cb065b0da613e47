"""Makes the two changed copies of a recording that ``docs/recordings.md`` shows: ``python -m … DIR``.

``DIR/v2``: ``DIR/v1`` without step 3, with two log-probabilities of step 1 changed by a few units in the last place.
``DIR/v3``: with a flipped bit in step 2, and step 0 in the place of step 3.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from mock_scheduler.batch.rollout_batch import RolloutBatch
from mock_scheduler.recording.step.step_file import decode_step, encode_step

_ROW = 21  # of the second step, in the order of identities


def main(folder: Path) -> None:
    """Makes both copies in ``folder``, anew."""
    for name in ("v2", "v3"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(folder / "v1", folder / name)
    steps = folder / "v2" / "train"
    (steps / "step_000003.safetensors").unlink()
    _change_logprob(steps / "step_000001.safetensors")
    steps = folder / "v3" / "train"
    data = bytearray((steps / "step_000002.safetensors").read_bytes())
    data[-1] ^= 1
    (steps / "step_000002.safetensors").write_bytes(data)
    shutil.copy(steps / "step_000000.safetensors", steps / "step_000003.safetensors")


def _change_logprob(path: Path) -> None:
    batch, info = decode_step(path.read_bytes())
    rows = batch.rows()
    row = rows[_ROW]
    assert row.rollout_logprobs is not None
    changed = row.rollout_logprobs.clone()
    changed[:2] += 2.0**-20
    rows[_ROW] = replace(row, rollout_logprobs=changed)
    copy = RolloutBatch.from_trajectories(rows, sampling=batch.sampling, group_size=batch.group_size, meta=batch.meta)
    path.write_bytes(encode_step(copy, info).to_bytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
