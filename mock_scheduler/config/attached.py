"""The file that ``MOCK_SCHEDULER_RUN`` names: what ``megatron.attach`` is to do in one run; importing this imports no
torch.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt

from mock_scheduler.config.base import ConfigSection, Decides
from mock_scheduler.config.instruments import GraftConfig, OrderConfig, PerturbationConfig, TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.config.rollout_mock import RolloutMockConfig

RUN_FILE_VARIABLE = "MOCK_SCHEDULER_RUN"


class AttachedRun(ConfigSection):
    """One run of a training that the instruments are attached to.

    ``output_dir``: where its files go. ``parallel``: the layout that was asked for; attach refuses another one.
    ``None``: whatever it finds. ``first_step``, ``last_step``: steps to observe, from 0, the last one included; behind
    it the run ends itself. ``None``: it ends by itself. ``initial_state``: a trace of level ``full`` whose initial
    parameters and optimizer state are put in their place. ``vocab_size``: without padding; ``None`` is the model's own.
    ``pad_token_id``: cut from the ends of rows before they are told apart. ``rollout_mock``: how the training's proxy
    records or replays rollouts; ``None`` for a training without one.
    """

    decides: ClassVar = Decides.LABEL

    format: Literal[1] = 1
    exp_name: str = "attached"
    output_dir: str
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    parallel: ParallelConfig | None = None
    system_envs: dict[str, str] = Field(default={})
    first_step: NonNegativeInt = 0
    last_step: NonNegativeInt | None = None
    trace: TraceConfig = TraceConfig()
    perturbation: PerturbationConfig = PerturbationConfig()
    graft: GraftConfig = GraftConfig()
    order: OrderConfig = OrderConfig()
    initial_state: Annotated[str | None, Decides.BITS | Decides.LABEL] = None
    vocab_size: int | None = None
    pad_token_id: int | None = None
    rollout_mock: Annotated[RolloutMockConfig | None, Decides.NOTHING] = None

    def observes(self, step: int) -> bool:
        """Says whether a step is among the observed ones."""
        return step >= self.first_step and (self.last_step is None or step <= self.last_step)
