"""A session in which rank 1 alone fails in the second step of every run: ``python -m tests.pipelines.lone_failure``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pipelines.session import main

if TYPE_CHECKING:
    from mock_scheduler.batch import RolloutBatch
    from pipelines.training import OwnTraining


def fail_on_one_rank() -> None:
    """Put the failure in, after the environment was applied."""
    # As the pipeline itself, only now.
    from pipelines.training import OwnTraining

    train_step = OwnTraining.train_step

    def failing(training: OwnTraining, batch: RolloutBatch, *, step: int) -> dict[str, float]:
        if step == 1 and training._runtime.global_rank == 1:
            raise RuntimeError("only rank 1 fails")
        return train_step(training, batch, step=step)

    OwnTraining.train_step = failing  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.exit(main(prepare=fail_on_one_rank))
