"""A second program, of which the library knows nothing: a command with arguments for its layout, as others have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.base import ConfigSection, Decides, KeyEffects, PositiveInt, effects_of
from mock_scheduler.config.instruments import GraftConfig, OrderConfig, PerturbationConfig, TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.config.loading import ConfigForm, ConfigSource, build_loader
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import AlignmentError
from mock_scheduler.layouts.order_plan import OrderPlan
from mock_scheduler.program import ClipRule, ConfigLoader, Plain, Program, Reductions, RunConfig


class OtherConfig(ConfigSection):
    """The sections of the library, and one key of its own."""

    decides: ClassVar = Decides.NOTHING

    program: Annotated[str, Decides.TRAINING]
    exp_name: Annotated[str, Decides.LABEL] = "other"
    output_dir: Annotated[str, Decides.LABEL] = "out"
    max_steps: Annotated[PositiveInt, Decides.TRAINING] = 3
    precision: Annotated[Literal["float32", "bfloat16", "float64"], Decides.BITS] = "float32"
    resume_from_checkpoint: str | None = None
    system_envs: dict[str, str] = Field(default={})
    parallel: ParallelConfig = ParallelConfig()
    rollout_mock: RolloutMockConfig = RolloutMockConfig()
    trace: TraceConfig = TraceConfig()
    align: AlignConfig = AlignConfig()
    order: OrderConfig = OrderConfig()
    perturbation: PerturbationConfig = PerturbationConfig()
    graft: GraftConfig = GraftConfig()
    sequence_length: Annotated[PositiveInt, Decides.TRAINING] = 4096


FORM = ConfigForm(schema=OtherConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProgram:
    """What cannot be offered is left out: nothing that becomes smaller, no order of sums, no clip."""

    schema: type[ConfigSection] = OtherConfig
    entry: str = "tests.other_program"
    preload: tuple[str, ...] = ()
    replay_entry: str | None = None
    export_entry: str | None = None
    packages: tuple[str, ...] = ()
    initial_state_key: str | None = None
    quiet_keys: Mapping[str, Plain] = field(default_factory=dict)
    folder_keys: Mapping[str, Plain] = field(default_factory=dict)
    reductions: Reductions | None = None

    def build_loader(self, config_name: str, config_path: str | Path) -> ConfigLoader:
        return build_loader(FORM, config_name, config_path)

    def arguments(self, entry: str, source: ConfigSource) -> tuple[str, ...]:
        config = self.build_loader(source.config_name, source.config_path)(source.overrides)
        return ("-m", entry, "--tp", str(config.parallel.tensor_model_parallel_size), "--out", config.output_dir)

    def num_processes(self, config: RunConfig) -> int:
        return config.parallel.world_size

    def effects(self, config: RunConfig) -> KeyEffects:
        return effects_of(OtherConfig)

    def list_sources(self, config: RunConfig) -> Sequence[Path]:
        return ()

    def first_step(self, config: RunConfig) -> int:
        return 0

    def end_after(self, config: RunConfig, last_step: int | None) -> list[str]:
        return [] if last_step is None else [f"max_steps={last_step + 1}"]

    def count_elements(self, config: RunConfig, *, vocabulary: int) -> int:
        return vocabulary

    def order_limits(self, config: RunConfig) -> tuple[str, ...]:
        return ("nothing is known of its model",)

    def plan_order(self, config: RunConfig) -> OrderPlan:
        raise ValueError("nothing is known of its model")

    def load_clip_rule(self, config_path: Path) -> ClipRule:
        raise AlignmentError(f"{config_path} does not say how the loss clips")


PROGRAM: Program = OtherProgram()
NO_PROGRAM = partial(OtherConfig)
