"""What a run writes of the inside of its training steps, a trace, a debug dump, both or neither; and what it is given.

A graft (``GraftConfig``) is put in before anything is traced, so that a trace shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.run_files import TRACE_FOLDER
from pipelines.clock import Clock
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import DebugDump
from pipelines.debug_dump.composite import combine
from pipelines.megatron.probing.graft import GraftProbe, GraftSource
from pipelines.megatron.probing.interface import TrainingProbe
from pipelines.megatron.probing.selection import check_patterns
from pipelines.megatron.probing.step_probe import StepProbe
from pipelines.megatron.process.runtime import Runtime


class StepObservation:
    """Makes the probe of each step. Every rank has one and must use it for every step, since files are agreed on.

    Raises ``ConfigError`` where a graft is for a step or update that the run does not have, and ``TraceError`` where
    its trace lacks a tensor.
    """

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
        self._graft = _open_graft(config)

    @contextmanager
    def step(self, step: int) -> Iterator[TrainingProbe]:
        """The probe of the block, which trains one step; its files are whole when the block has succeeded.

        Raises:
            TraceError, RecordingError: a file cannot be written, a pattern selects nothing, or a graft was not put in.
        """
        dump = self._dump.probe(self._runtime, self._ranks, step=step)
        graft = None
        if self._graft is not None and self._graft.config.step == step:
            graft = GraftProbe(self._runtime, self._graft)
        if self._config.trace.is_due(step):
            with self._traced(step, graft) as trace:
                yield combine(graft, trace, dump)
        else:
            yield combine(graft, dump)
            self._check_fired(graft)
        if dump is not None:
            with self._clock.measure("debug_dump"):
                dump.save()

    @contextmanager
    def _traced(self, step: int, graft: GraftProbe | None) -> Iterator[StepProbe]:
        config = self._config
        with StepProbe(self._runtime, self._trace_dir, step=step, config=config.trace, clock=self._clock) as probe:
            yield probe
            probe.end_step()
            self._check_fired(graft)
            if not self._are_patterns_checked and self._has_all_names(step):
                check_patterns(probe.selection, self._ranks)
                self._are_patterns_checked = True

    def _check_fired(self, graft: GraftProbe | None) -> None:
        if graft is not None:
            graft.check_fired(self._ranks)

    def _has_all_names(self, step: int) -> bool:
        """Whether no later trace has more names: before the first step that trains the policy, some are absent."""
        config = self._config
        first = config.first_policy_step
        return step >= first or not any(config.trace.is_due(later) for later in range(first, config.max_steps))


def _open_graft(config: PipelineConfig) -> GraftSource | None:
    """What the run is to be given; ``None`` where that is nothing."""
    graft = config.graft
    if graft.trace_dir is None:
        return None
    if graft.step >= config.max_steps or graft.update >= config.updates_per_step:
        raise ConfigError(
            f"graft.step {graft.step}, graft.update {graft.update}: the run has steps 0 to {config.max_steps - 1}, of "
            f"{config.updates_per_step} updates each, so nothing would be put in"
        )
    return GraftSource(graft)
