"""Builds, from a run's configuration and environment, the probe that dumps a step, where one is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.adapters.nexrl.config import PARAMETER_OPTIONS, TrainerDump, read_trainer_dump
from mock_scheduler.adapters.nexrl.names import DUMP_KINDS, find_files_in, remove_steps_from
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError, StepExistsError
from pipelines.config.schema import PipelineConfig
from pipelines.debug_dump.content import ParameterDump, build_parameter_dump
from pipelines.debug_dump.probe import DebugProbe, DumpTarget
from pipelines.megatron.process_of_rank import Runtime


@dataclass(frozen=True, kw_only=True, slots=True)
class DebugDump:
    """Holds the dumps of a run: by ``debug``, by the variables of NexRL's trainer mode, by both or by neither."""

    config: PipelineConfig
    trainer: TrainerDump | None
    parameters: ParameterDump | None

    def probe(self, runtime: Runtime, ranks: RankGroup, batch: RolloutBatch, *, step: int) -> DebugProbe | None:
        """The probe of a step; None where nothing is dumped of it. Every rank must ask, and save it."""
        targets = self.targets(step)
        if not targets:
            return None
        correction = self.config.algorithm.rollout_correction
        return DebugProbe(
            runtime,
            batch,
            step=step,
            targets=targets,
            parameters=self.parameters,
            ranks=ranks,
            divides_by_kept=correction is not None and correction.spec.rs_denominator == "kept",
        )

    def remove_steps_from(self, step: int) -> None:
        """Removes an earlier run's dump of this step and later ones, before a resumed run dumps them anew.

        Only for one rank, before any dumps.
        """
        for target in self.targets():
            remove_steps_from(target.folder, step, target.kinds)

    def targets(self, step: int | None = None) -> list[DumpTarget]:
        """Lists the folders that a step is dumped to; without a step, all that the run dumps to."""
        debug, targets = self.config.debug, []
        options = debug.enabled_options()
        if options:
            targets.append(
                DumpTarget(
                    folder=Path(debug.dump_dir),
                    dump_format=debug.dump_format,
                    kinds=frozenset(options),
                    is_due=debug.is_due,
                )
            )
        trainer = self.trainer
        if trainer is not None:
            kinds = frozenset(trainer.options)
            targets.append(
                DumpTarget(folder=Path(trainer.folder), dump_format="pt", kinds=kinds, is_due=trainer.is_due)
            )
        return [target for target in targets if step is None or target.is_due(step)]


def build_debug_dump(
    config: PipelineConfig,
    environ: Mapping[str, str],
    *,
    vocab_size: int,
    is_resumed: bool = False,
    trains_remotely: bool = False,
) -> DebugDump:
    """Builds the dump of a run, checked before a model is built; the same on every rank.

    Args:
        is_resumed: the folders may hold the dump of the resumed run; ``remove_steps_from`` makes way.
        trains_remotely: the run sends its batches to a service, which computes all that ``dump_options`` name.

    Raises:
        ConfigError: an option has no effect in this run, a variable cannot be used, or a pattern matches nothing.
        StepExistsError: a folder holds another run's dump.
    """
    _check_options(config, trains_remotely=trains_remotely)
    trainer = read_trainer_dump(environ, target_param_pattern=config.debug.target_param_pattern)
    if trains_remotely and trainer is not None:
        raise ConfigError(
            "WEAVER_DEBUG_DUMP_ENABLED has no effect: this run trains on a service, which computes what the trainer "
            "mode writes; set the variables for the service, and leave them out here"
        )
    is_same_folder = trainer is not None and Path(trainer.folder).resolve() == Path(config.debug.dump_dir).resolve()
    if is_same_folder and config.debug.enabled_options():
        raise ConfigError(
            f"debug.dump_dir and WEAVER_DEBUG_DUMP_DIR are both {config.debug.dump_dir}: their files have the same "
            "names; give each a folder of its own"
        )
    options = {*config.debug.enabled_options(), *(() if trainer is None else trainer.options)}
    parameters = build_parameter_dump(config, vocab_size=vocab_size) if options & {*PARAMETER_OPTIONS} else None
    dump = DebugDump(config=config, trainer=trainer, parameters=parameters)
    if not is_resumed:
        _check_folders(dump)
    return dump


def _check_options(config: PipelineConfig, *, trains_remotely: bool) -> None:
    debug = config.debug
    if trains_remotely and debug.enabled_options():
        raise ConfigError(
            f"debug.dump_options.{debug.enabled_options()[0]} has no effect: this run trains on a service, which "
            "computes that; set it there, or use debug.remote_api_dump_options"
        )
    if not trains_remotely and debug.enabled_remote_options():
        raise ConfigError(
            f"debug.remote_api_dump_options.{debug.enabled_remote_options()[0]} has no effect: this run trains by "
            "itself and sends nothing to a service; use debug.dump_options"
        )


def _check_folders(dump: DebugDump) -> None:
    """Refuses an old dump now; else it would be found only after the first rollout."""
    debug = dump.config.debug
    written: list[tuple[Path, str, Callable[[int], bool]]] = [
        (target.folder, kind, target.is_due) for target in dump.targets() for kind in DUMP_KINDS if kind in target.kinds
    ]
    written += [(Path(debug.dump_dir), kind, debug.is_due) for kind in debug.enabled_remote_options()]
    for folder, kind, is_due in written:
        for key, path in find_files_in(folder / kind).items():
            if is_due(key.step) and key.step < dump.config.max_steps:
                raise StepExistsError(
                    f"{path} is there already, from another run: give debug.dump_dir (or WEAVER_DEBUG_DUMP_DIR) a "
                    "folder of its own, or remove the old dump"
                )
