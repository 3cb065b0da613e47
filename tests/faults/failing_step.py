"""A planted fault: step 1 can be played but not recorded, and then its training fails.

What the pipeline closes is printed.
"""

from __future__ import annotations

from typing import Any

from tests.faults.harness import Fired, run_with_fault


def plant(fired: Fired) -> None:
    """Refuse to store step 1, fail at its training, and say when the real scheduler is closed."""
    from mock_scheduler.errors import RecordingError
    from mock_scheduler.recording.storage.local import LocalStorage
    from pipelines.megatron.learner import Learner
    from pipelines.rollout.scheduler import AgenticRolloutScheduler

    publish, train_step, close = LocalStorage.publish, Learner.train_step, AgenticRolloutScheduler.close

    def refuse_step_1(storage: LocalStorage, name: str, *arguments: Any) -> int:
        if "step_000001" in name:
            raise RecordingError(f"{name}: no space left on device")
        return publish(storage, name, *arguments)

    def fail_at_step_1(learner: Learner, *arguments: Any, **named: Any) -> dict[str, float]:
        fired.count += 1
        if fired.count == 2:
            raise RuntimeError("the step failed")
        return train_step(learner, *arguments, **named)

    def close_and_say(scheduler: AgenticRolloutScheduler) -> None:
        close(scheduler)
        print("the real scheduler was closed")

    LocalStorage.publish = refuse_step_1
    Learner.train_step = fail_at_step_1
    AgenticRolloutScheduler.close = close_and_say


if __name__ == "__main__":
    run_with_fault(plant)
