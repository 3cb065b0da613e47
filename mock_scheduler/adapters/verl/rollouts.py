"""verl's agent loop manager (trainer V0), before the real one: it records, replays, or lets live rollouts through.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=mock_scheduler.adapters.verl.AgentLoopManager

Contract: live, the real manager's own batch is returned. A replay builds and calls nothing, and gives the recorded
batch with its rows in their order, for the prompts that were drawn for it. Step N is verl's global step N; rollouts of
evaluations are numbered one after another, in their own folder. A step is on disk before its batch is trained on.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mock_scheduler.adapters.verl.codec import Drawn, Proto, VerlCodec, restore_prompts
from mock_scheduler.adapters.verl.description import VerlObject, describe_run, group_sizes, read_sampling
from mock_scheduler.adapters.verl.settings import VARIABLE, VerlSettings, load_settings
from mock_scheduler.adapters.verl.suppress import check_process, show_lines, tell_suppressed, this_process
from mock_scheduler.errors import ConfigError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest


class AgentLoopManager:
    """One agent loop manager of a run, which verl makes by ``create`` with the arguments of its own.

    ``config``: verl's whole configuration; ``arguments``: for the real manager. ``codec``: None: that of verl's own
    batches.
    """

    @classmethod
    def create(cls, config: VerlObject, *arguments: VerlObject, **options: VerlObject) -> AgentLoopManager:
        """Make the manager; no worker of an agent loop is started before it plays."""
        return cls(config, *arguments, **options)

    def __init__(
        self,
        config: VerlObject,
        *arguments: VerlObject,
        settings: VerlSettings | None = None,
        codec: VerlCodec | None = None,
        **options: VerlObject,
    ) -> None:
        self.settings = load_settings() if settings is None else settings
        check_process(self.settings)
        _check_rewards(config)
        show_lines()
        state = this_process()
        state.has_proxy = True
        self.ledger: Ledger = state.ledger
        self._config, self._arguments, self._options = config, arguments, options
        self._num_evaluated = 0
        self._is_live = self._is_told = False
        checked = self.settings.mock_config()
        if checked.random_states is None:
            # The trainer waits for its rollout, so what moves meanwhile was moved by it.
            checked = checked.model_copy(update={"random_states": "moved"})
        self._scheduler: ProxyScheduler = build_scheduler(
            checked,
            lambda: _Live(self),
            {**describe_run(config), **self.settings.contract},
            ledger=self.ledger,
            codec=VerlCodec(sampling=read_sampling(config), group_sizes=group_sizes(config))
            if codec is None
            else codec,
            resume=self.settings.resume,
            provenance={"framework": "verl"},
        )

    def generate_sequences(self, prompts: Proto) -> Proto:
        """Answer the trainer, which asks with each prompt repeated for every rollout of it."""
        if not hasattr(prompts, "non_tensor_batch"):
            raise ConfigError(
                f"the trainer asked with a {type(prompts).__name__}; expected a DataProto. This class is for trainer "
                "V0: set trainer.use_v1=False. docs/frameworks/verl.md says how V1 is recorded"
            )
        drawn = Drawn.of(prompts)
        request = self._next_request(drawn)
        self._is_live = False
        batch: Proto = self._scheduler.get_batch(request)
        if self._is_live:
            self._scheduler.state_dict()  # returns when the step is on disk: verl tells nobody that the run ends
        else:
            restore_prompts(batch, drawn)
            if not self._is_told:
                tell_suppressed()
            self._is_told = True
        return batch

    def play(self, prompts: Drawn, real: VerlObject) -> Proto:
        """Ask the real manager."""
        self._is_live = True
        return real.generate_sequences(prompts.proto)

    def make_real(self) -> VerlObject:
        """Make the real manager, with its workers."""
        module, _, name = self.settings.real.rpartition(".")
        try:
            kind = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(f"real: {self.settings.real} of {VARIABLE} cannot be imported: {error}") from error
        return kind.create(self._config, *self._arguments, **self._options)

    def close(self) -> None:
        """Write the rest."""
        self._scheduler.close()

    def _next_request(self, drawn: Drawn) -> RolloutRequest:
        meta = drawn.proto.meta_info
        is_evaluation = bool(meta.get("validate", False))
        step = int(meta["global_steps"])
        if is_evaluation:
            number, version, group_size = self._num_evaluated, step, None
            self._num_evaluated += 1
        else:
            number, version, group_size = step, max(step - 1, 0), group_sizes(self._config)["train"]
            group_size += int(drawn.num_sampled < len(drawn.digests))
        return RolloutRequest(
            global_step=number,
            batch_size=len(drawn.digests),
            mode="val" if is_evaluation else "train",
            policy_version=version,
            group_size=group_size,
            prompts=drawn,
        )


class _Live:
    """The real manager as a rollout scheduler: it is made for the first live rollout, and has nothing to close."""

    def __init__(self, owner: AgentLoopManager) -> None:
        self._owner = owner
        self._real = owner.make_real()

    def get_batch(self, request: RolloutRequest) -> Proto:
        """Play the prompts of a request."""
        return self._owner.play(request.prompts, self._real)


def _check_rewards(config: VerlObject) -> None:
    """Refuse rewards that are made behind the seam: they would be neither recorded nor replayed."""
    model: Any = config.reward.reward_model
    if model.enable and not model.enable_resource_pool:
        raise ConfigError(
            "reward.reward_model.enable=True scores rollouts after they were recorded, on the GPUs of the training: "
            "set reward.reward_model.enable_resource_pool=True, with which the agent loop has the scores in its batch"
        )
