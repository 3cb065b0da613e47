"""What a run writes of the inside of its training steps: a trace, a debug dump, both or neither."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.run_files import TRACE_FOLDER
from pipelines.clock import Clock
from pipelines.debug_dump.build import DebugDump
from pipelines.debug_dump.composite import combine
from pipelines.megatron.probing.interface import TrainingProbe
from pipelines.megatron.probing.selection import check_patterns
from pipelines.megatron.probing.step_probe import StepProbe
from pipelines.megatron.runtime import Runtime


class StepObservation:
    """Makes the probe of each step. Every rank has one and must use it for every step, since files are agreed on."""

    def __init__(
        self, config: PipelineConfig, runtime: Runtime, ranks: RankGroup, *, dump: DebugDump, clock: Clock
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._ranks = ranks
        self._dump = dump
        self._clock = clock
        self._trace_dir = Path(config.output_dir) / TRACE_FOLDER
        self._are_patterns_checked = False

    @contextmanager
    def step(self, step: int) -> Iterator[TrainingProbe]:
        """The probe of the block, which trains one step; its files are whole when the block has succeeded.

        Raises:
            TraceError, RecordingError: a file cannot be written, or a pattern selects nothing.
        """
        dump = self._dump.probe(self._runtime, self._ranks, step=step)
        if self._config.trace.is_due(step):
            with self._traced(step) as trace:
                yield combine(trace, dump)
        else:
            yield combine(dump)
        if dump is not None:
            with self._clock.measure("debug_dump"):
                dump.save()

    @contextmanager
    def _traced(self, step: int) -> Iterator[StepProbe]:
        config = self._config
        with StepProbe(self._runtime, self._trace_dir, step=step, config=config.trace, clock=self._clock) as probe:
            yield probe
            probe.end_step()
            if not self._are_patterns_checked and self._has_all_names(step):
                check_patterns(probe.selection, self._ranks)
                self._are_patterns_checked = True

    def _has_all_names(self, step: int) -> bool:
        """Whether no later trace has more names: before the first step that trains the policy, some are absent."""
        config = self._config
        first = config.first_policy_step
        return step >= first or not any(config.trace.is_due(later) for later in range(first, config.max_steps))
