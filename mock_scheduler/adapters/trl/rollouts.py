"""The proxy at the seam of TRL's GRPOTrainer, ``rollout_func``.

    with Rollouts(rollout_mock, args=args, processing_class=tokenizer, reward_funcs=rewards) as rollouts:
        trainer = GRPOTrainer(model, reward_funcs=rollouts.reward_funcs, rollout_func=rollouts, args=args, ...)
        trainer.train()

Contract: a run that only replays starts no engine and calls neither generation nor reward function. A rollout whose
rewards were not asked of ``reward_funcs`` is an error, at the next one or at the end: TRL scored it live. A step is one
rollout: its number is the optimizer step that the weights had, times the number of rollouts that TRL plays for one
optimizer step. Rollouts of evaluations are numbered one after another, in their own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from mock_scheduler.adapters.trl.codec import Native, TrlCodec
from mock_scheduler.adapters.trl.description import (
    TrlObject,
    describe_arguments,
    describe_trainers_model,
    read_sampling,
    row_shard,
)
from mock_scheduler.adapters.trl.rewards import freeze, name_of, name_rewards
from mock_scheduler.adapters.trl.suppress import EngineSwitch
from mock_scheduler.batch.columns import RowValue
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError, SchedulerError, redact
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler, read_config
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.recording.contract import Contract, check_contract
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON


class Rollouts:
    """A ``rollout_func`` that records rollouts, or replays them.

    ``args``: the GRPOConfig; ``processing_class``: the tokenizer; ``reward_funcs``: as for GRPOTrainer; those of
    ``self.reward_funcs`` are to be given to it. ``rollout_func``: plays a rollout; None: TRL's own generation does.
    ``contract``: further facts that a replay must share, such as weights and data set; the model's size and kind are
    compared without it. ``options``: as ``build_scheduler`` has them, such as ``resume=True``; ``run_id`` is needed
    where several processes record.
    """

    def __init__(
        self,
        config: RolloutMockConfig | Mapping[str, object],
        *,
        args: TrlObject,
        processing_class: TrlObject,
        reward_funcs: TrlObject,
        rollout_func: Callable[[list[Any], Any], Native] | None = None,
        contract: Mapping[str, JSON] | None = None,
        ledger: Ledger | None = None,
        **options: TrlObject,
    ) -> None:
        checked = config if isinstance(config, RolloutMockConfig) else read_config(config)
        if checked.random_states is None:
            # All: TRL starts and feeds its engine outside the rollout, and both may move the generators.
            checked = checked.model_copy(update={"random_states": "all"})
        functions = (
            list(reward_funcs)
            if isinstance(reward_funcs, Sequence | list) and not isinstance(reward_funcs, str)
            else [reward_funcs]
        )
        names = name_rewards(functions)
        self.ledger = Ledger() if ledger is None else ledger
        self.reward_funcs = [
            freeze(function, names[index], self) if index in names else function
            for index, function in enumerate(functions)
        ]
        self._args = args
        self._rollout_func = generate if rollout_func is None else rollout_func
        self._trainer: TrlObject = None
        self._request: RolloutRequest | None = None
        self._num_evaluated = 0
        self._names = frozenset(names.values()) if checked.enable else frozenset[str]()
        self._unscored: set[str] = set()
        self._is_model_checked = False
        self._on_mismatch, self._dump_dir = checked.on_mismatch, checked.dump_dir
        tokenizer: TrlObject = getattr(processing_class, "tokenizer", processing_class)
        shard = row_shard()
        self._num_processes = 1 if shard is None else shard.count
        weights = getattr(args, "reward_weights", None) or [1.0] * len(functions)
        self._codec = TrlCodec(
            sampling=read_sampling(args),
            eos_token_ids={tokenizer.eos_token_id} - {None},
            shard=shard,
            # TRL refuses another number of weights than of functions itself.
            reward_weights={name: float(weights[index]) for index, name in names.items() if index < len(weights)},
        )
        self._scheduler: ProxyScheduler = build_scheduler(
            checked,
            lambda: _LiveRollouts(self._play),
            {**describe_arguments(args, processing_class, [name_of(f) for f in functions]), **(contract or {})},
            ledger=self.ledger,
            codec=self._codec,
            shard=shard,
            late_values=list(names.values()),
            **options,
        )
        self._switch = EngineSwitch(self.ledger) if checked.modes_in_use == {"mock"} else None

    def __call__(self, prompts: list[Any], trainer: TrlObject) -> Native:
        """Answer TRL, which asks with the prompts of this process, each repeated for every generation."""
        if getattr(trainer, "tools", None) or getattr(trainer, "environment_factories", None):
            raise ConfigError(
                "tools and environment_factory play after rollout_func, with the engine: they cannot be recorded at "
                "this seam. Play them in a rollout_func of your own, and give it to Rollouts"
            )
        self._refuse_unscored()
        self._trainer, self._request = trainer, self._next_request(prompts, trainer)
        self._codec.model = describe_trainers_model(trainer.model)
        answer: Native = self._scheduler.get_batch(self._request)
        self._check_model()
        self._unscored = set(self._names)
        return answer

    def _play(self, request: RolloutRequest) -> Native:
        return self._rollout_func(request.prompts, self._trainer)

    def late_values(self, name: str) -> list[RowValue] | None:
        """Return the recorded rewards of the current rollout; None where it was played."""
        values = self._scheduler.late_values(self._current(), name)
        if values is not None:
            self._unscored.discard(name)
        return values

    def add_late_values(self, name: str, values: Sequence[RowValue]) -> None:
        """Record rewards of the current rollout."""
        self._scheduler.add_late_values(self._current(), name, values)
        self._unscored.discard(name)

    def close(self) -> None:
        """Write the rest, and give TRL its engine back; raises any error of writing, and that of rewards not asked."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._scheduler.__exit__(kind, error, traceback)
        finally:
            if self._switch is not None:
                self._switch.restore()
        if kind is None:  # a training that ended by an error has that one to tell
            self._refuse_unscored()

    def _refuse_unscored(self) -> None:
        if self._unscored:
            assert self._request is not None  # a rollout was answered
            names = ", ".join(sorted(self._unscored))
            raise SchedulerError(
                f"{self._request.mode} step {self._request.global_step}: its rewards were not asked of Rollouts "
                f"({names}), so they are neither recorded nor replayed, and the trainer scored it by other functions: "
                "give the trainer reward_funcs=rollouts.reward_funcs"
            )

    def _check_model(self) -> None:
        """Compare the model with that of the recording, at the first replayed step that names one."""
        recorded = self._codec.recorded_model
        if recorded is None or self._is_model_checked:
            return
        self._is_model_checked = True
        check_contract(
            Contract.of(recorded), Contract.of(self._codec.model), self._on_mismatch, source=redact(self._dump_dir)
        )

    def _current(self) -> RolloutRequest:
        if self._request is None:
            raise SchedulerError(
                "a reward function was called before any rollout: give rollout_func=rollouts to the trainer"
            )
        return self._request

    def _next_request(self, prompts: list[Any], trainer: TrlObject) -> RolloutRequest:
        is_training = bool(trainer.model.training)
        step = int(trainer.state.global_step)
        number, group_size = self._num_evaluated, getattr(trainer, "num_generations_eval", None)
        if is_training:
            per_step = max(1, self._args.gradient_accumulation_steps // self._args.steps_per_generation)
            # TRL counts its micro-steps in ``_step``, also over a checkpoint's start.
            place = int(trainer._step) // self._args.steps_per_generation % per_step if per_step > 1 else 0
            number, group_size = step * per_step + place, trainer.num_generations
        else:
            self._num_evaluated += 1
        return RolloutRequest(
            global_step=number,
            batch_size=len(prompts) * self._num_processes,
            mode="train" if is_training else "val",
            policy_version=step,
            group_size=group_size or trainer.num_generations,
            prompts=prompts,
        )


class _LiveRollouts:
    """Plays rollouts: the proxy's real scheduler, of which there is nothing to close."""

    def __init__(self, play: Callable[[RolloutRequest], Native]) -> None:
        self.get_batch = play


def generate(prompts: list[Any], trainer: TrlObject) -> Native:
    """Play a rollout as GRPOTrainer does where it has no ``rollout_func``: by vLLM, or by transformers."""
    missing = [name for name in ("_tokenize_prompts", "_generate_single_turn") if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"this release of TRL generates in another way: GRPOTrainer has no {', '.join(missing)}. Give Rollouts a "
            "rollout_func of your own"
        )
    num_generations = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    prompt_ids, images, fields = trainer._tokenize_prompts(prompts)
    completion_ids, logprobs = trainer._generate_single_turn(prompt_ids, images, fields, num_generations)
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}
