"""Opens rollouts out of NexRL's debug dump in the place of played ones: ``rollout_worker.type: mock``."""

from __future__ import annotations

from collections.abc import Sequence

from mock_scheduler.adapters.nexrl.matching import PlannedTrajectory
from mock_scheduler.adapters.nexrl.rollouts import DumpedRollouts, RolloutLimits
from mock_scheduler.batch import SamplingParams
from mock_scheduler.config.base import Mode
from mock_scheduler.scheduler import RolloutRequest
from pipelines.config.schema import PipelineConfig
from pipelines.rollout.plan import plan_episodes


def open_dumped_rollouts(
    config: PipelineConfig, plan: Sequence[RolloutRequest], *, vocab_size: int
) -> DumpedRollouts | None:
    """Builds the scheduler that reads a dump, and checks every request for it; ``None`` where rollouts are played.

    Raises as ``DumpedRollouts.get_batch``.
    """
    if not config.rollout_worker.reads_dump:
        return None

    def planned(request: RolloutRequest) -> list[PlannedTrajectory]:
        return [PlannedTrajectory(identity=item.identity, tag=item.tag) for item in plan_episodes(config, request)]

    limits = RolloutLimits(
        sampling={mode: _sampling(config, mode) for mode in ("train", "val")},
        vocab_size=vocab_size,
        max_row_tokens=config.sequence_length,
    )
    scheduler = DumpedRollouts(config.rollout_worker, planned, limits)
    mock = config.rollout_mock
    scheduler.check(
        [
            request
            for request in plan
            if mock.mode_of(step=request.global_step, kind=request.mode, scheduler_id=request.scheduler_id) != "mock"
        ]
    )
    return scheduler


def _sampling(config: PipelineConfig, mode: Mode) -> SamplingParams:
    args = config.sampling(mode)
    return SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, logprobs_mode="processed")
