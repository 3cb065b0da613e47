"""Observes a run's training steps: a trace, a debug dump, an operation log, any of them or none; and puts a graft in.

A graft (``GraftConfig``) is put in before anything is traced, so the trace shows it. Unmatched globs of a
trace's selection are refused after the first step with all names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mock_scheduler.batch import RolloutBatch
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.determinism.guard import read_back
from mock_scheduler.determinism.operations import OperationLogHeader, recorder
from mock_scheduler.errors import ConfigError
from mock_scheduler.megatron.probe.graft import GraftProbe
from mock_scheduler.megatron.probe.graft_source import GraftSource
from mock_scheduler.megatron.probe.interface import TrainingProbe, combine
from mock_scheduler.megatron.probe.step_probe import StepProbe
from mock_scheduler.support.run_files import TRACE_FOLDER
from mock_scheduler.support.run_output import Clock
from mock_scheduler.trace.selection import check_patterns
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.build import DebugDump
from pipelines.megatron.learner import Learner
from pipelines.megatron.process_of_rank import Runtime


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
    def step(self, step: int, batch: RolloutBatch) -> Iterator[TrainingProbe]:
        """Gives the probe of the block, in which one step is trained on a batch; its files are whole behind the block.

        Raises:
            TraceError, RecordingError: a file cannot be written, a pattern selects nothing, or a graft was not put in.
        """
        dump = self._dump.probe(self._runtime, self._ranks, batch, step=step)
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
        is_last = step == config.max_steps - 1
        with StepProbe(
            self._runtime, self._trace_dir, step=step, config=config.trace, clock=self._clock, is_last=is_last
        ) as probe:
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
        """Says whether no later trace has more names: some are absent before the first step of rollouts with a policy
        in training.
        """
        config = self._config
        first = max(config.first_policy_step, config.sft.steps)
        return step >= first or not any(config.trace.is_due(later) for later in range(first, config.max_steps))


def _open_graft(config: PipelineConfig) -> GraftSource | None:
    """Opens the tensors that the run is to be given; ``None`` where the configuration names no trace."""
    graft = config.graft
    if graft.trace_dir is None:
        return None
    if graft.step >= config.max_steps or graft.update >= config.updates_per_step:
        raise ConfigError(
            f"graft.step {graft.step}, graft.update {graft.update}: the run has steps 0 to {config.max_steps - 1}, of "
            f"{config.updates_per_step} updates each, so nothing would be put in"
        )
    return GraftSource(graft)


@contextmanager
def record_operations(config: PipelineConfig, output_dir: Path, learner: Learner, *, step: int) -> Iterator[None]:
    """Writes the operations of this rank in the block to ``{output_dir}/operations``, where ``trace.operations`` is
    set.

    Every rank writes its own and communicates nothing. Raises ``OSError`` where the file cannot be written.
    """
    if not config.trace.operations:
        yield
        return
    header = OperationLogHeader(
        step=step,
        global_rank=learner.runtime.global_rank,
        world_size=learner.runtime.world_size,
        settings=read_back(os.environ),
    )
    chunks = {name: model.chunks for name, model in learner.models.items()}
    if learner.policy.reference is not None:
        chunks["reference"] = learner.policy.reference
    modules = {
        name if len(of_model) == 1 else f"{name}.chunk{index}": chunk
        for name, of_model in chunks.items()
        for index, chunk in enumerate(of_model)
    }
    with recorder.record_operations(output_dir, header, modules=modules):
        yield
