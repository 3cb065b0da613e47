"""The proxy at NeMo-RL's seam: the rollout functions that its ``grpo_train`` and ``validate`` call.

    from mock_scheduler.adapters.nemo_rl.rollouts import with_rollouts
    setup, grpo_train = with_rollouts(setup, grpo_train)    # behind the imports of the script

NeMo-RL has no official seam: while the two run, names of their module stand for functions of this adapter.

Contract: live, NeMo-RL's own answer is returned. A replay gives every field of it again, bit for bit, starts no engine,
sends no weights and asks no environment; prompts are drawn from NeMo-RL's own data loader. A step is one rollout: its
number is NeMo-RL's step, counted from 1, times the rollouts that a step may take, and those of it before this one.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any, TypeAlias

from mock_scheduler.adapters.call_numbers import CallNumbers
from mock_scheduler.adapters.nemo_rl.codec import NemoRlCodec, PlayedRollout
from mock_scheduler.adapters.nemo_rl.prompts import read_prompts
from mock_scheduler.adapters.nemo_rl.settings import (
    NemoRlSettings,
    check_supported,
    describe_run,
    group_sizes,
    read_sampling,
    rollouts_per_step,
)
from mock_scheduler.adapters.nemo_rl.suppress import (
    check_suppressed,
    names_of_setup,
    quiet_policy,
    suppressed_environment,
)
from mock_scheduler.adapters.nemo_rl.values import make_gym_result
from mock_scheduler.adapters.rebinding import standing_for
from mock_scheduler.adapters.settings import GivenSettings, load_settings
from mock_scheduler.config.base import Mode
from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest

#: A function of NeMo-RL's.
Function: TypeAlias = Callable[..., Any]

_PLAYING, _GYM = ("run_multi_turn_rollout", "run_async_multi_turn_rollout"), "run_nemo_gym_rollout_sync"
#: Called with the number of the step as it begins.
_BEGINNING, _VALIDATING, _SENDING = "maybe_gpu_profile_step", "validate", "refit_policy_generation"
_NEEDED = (*_PLAYING, _GYM, _BEGINNING, _VALIDATING, _SENDING, "Policy")
_DATA, _MAKING = "nemo_rl.data.utils", "create_env"
_OF = "nemo_rl.algorithms.grpo"


class Rollouts:
    """Records what NeMo-RL's rollout functions return, or replays it.

    Args:
        config: NeMo-RL's ``MasterConfig``.
        tokenizer: as ``setup`` gets it.
        settings: None: of the file that ``MOCK_SCHEDULER_NEMO_RL`` names.
    """

    def __init__(
        self,
        config: Any,  # noqa: ANN401 - NeMo-RL's
        tokenizer: Any,  # noqa: ANN401 - transformers'
        settings: GivenSettings = None,
        ledger: Ledger | None = None,
    ) -> None:
        read = load_settings(NemoRlSettings, settings)
        mock = read.mock_config()
        self.ledger = Ledger() if ledger is None else ledger
        self.replays = mock.modes_in_use == {"mock"}
        check_supported(config, replays=self.replays)
        self._numbers, self._group_sizes = CallNumbers(rollouts_per_step(config)), group_sizes(config)
        self._now: tuple[Mode, int] | None = None
        self._live = _Live()
        self._scheduler: ProxyScheduler = build_scheduler(
            mock,
            lambda: self._live,
            {**describe_run(config, tokenizer), **read.contract},
            codec=NemoRlCodec(sampling=read_sampling(config)),
            ledger=self.ledger,
            resume=read.resume,
            provenance={"framework": "nemo_rl"},
        )

    def names(self, module: ModuleType) -> dict[str, object]:
        """Return what stands for names of NeMo-RL's module while it trains."""
        found: dict[str, object] = {name: self._asked(getattr(module, name)) for name in _PLAYING}
        found[_GYM] = self._asked(getattr(module, _GYM), is_gym=True)
        found[_BEGINNING] = self._begin(getattr(module, _BEGINNING))
        found[_VALIDATING] = self._validate(getattr(module, _VALIDATING))
        if self.replays:
            found[_SENDING] = self._refuse_weights
        return found

    def close(self) -> None:
        """Write the rest, and raise any error of writing."""
        self._scheduler.close()

    def _begin(self, function: Function) -> Function:
        @functools.wraps(function)
        def begin(policy: Any, step: int) -> Any:  # noqa: ANN401 - NeMo-RL's
            self._now = "train", int(step)
            return function(policy, step)

        return begin

    def _validate(self, function: Function) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def validate(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - NeMo-RL's
            before = self._now
            self._now = "val", int(signature.bind(*arguments, **options).arguments["step"])
            try:
                return function(*arguments, **options)
            finally:
                self._now = before

        return validate

    def _refuse_weights(self, *_arguments: object, **_options: object) -> dict[str, float]:
        self.ledger.count("suppressed", _SENDING)
        return {}

    def _asked(self, function: Function, *, is_gym: bool = False) -> Function:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def asked(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - NeMo-RL's
            given = signature.bind(*arguments, **options)
            self._live.begin(lambda: function(*given.args, **given.kwargs), is_gym=is_gym)
            rollout: PlayedRollout = self._scheduler.get_batch(self._request(given.arguments["input_batch"]))
            # NeMo-RL may save a checkpoint next, which must not claim more than what is on disk.
            self._scheduler.state_dict()
            if self._live.answer is not None:
                return self._live.answer
            if (rollout.gym is not None) != is_gym:
                raise SchedulerError(
                    f"{function.__name__} was asked, and the recorded rollout is of {'another' if is_gym else _GYM}: "
                    "set env.should_use_nemo_gym as in the recording"
                )
            if rollout.gym is None:
                return rollout.batch, dict(rollout.metrics)
            return make_gym_result(final_batch=rollout.batch, rollout_metrics=dict(rollout.metrics), **rollout.gym)

        return asked

    def _request(self, batch: Any) -> RolloutRequest:  # noqa: ANN401 - NeMo-RL's
        if self._now is None:
            raise SchedulerError("NeMo-RL asked for a rollout outside of a step of training and of a validation")
        mode, step = self._now
        size = self._group_sizes[mode]
        return RolloutRequest(
            global_step=self._numbers.next(mode, step),
            batch_size=batch.size,
            mode=mode,
            # NeMo-RL counts training steps from 1, and validates after the step that it names.
            policy_version=max(step - (mode == "train"), 0),
            group_size=size,
            prompts=read_prompts(batch),
        )


class _Live:
    """The rollout function that was asked as a rollout scheduler."""

    def __init__(self) -> None:
        self.answer: Any = None
        self._play: Function | None = None
        self._is_gym = False

    def begin(self, play: Function, *, is_gym: bool) -> None:
        """Note what NeMo-RL asks."""
        self._play, self._is_gym, self.answer = play, is_gym, None

    def get_batch(self, request: RolloutRequest) -> PlayedRollout:
        """Play as NeMo-RL asked."""
        del request
        assert self._play is not None  # a function was asked
        self.answer = self._play()
        if not self._is_gym:
            batch, metrics = self.answer
            return PlayedRollout(batch=batch, metrics=metrics)
        gym = {
            name: value for name, value in vars(self.answer).items() if name not in ("final_batch", "rollout_metrics")
        }
        return PlayedRollout(batch=self.answer.final_batch, metrics=self.answer.rollout_metrics, gym=gym)


def with_rollouts(
    setup: Function, grpo_train: Function, settings: GivenSettings = None, ledger: Ledger | None = None
) -> tuple[Function, Function]:
    """Return both functions of ``nemo_rl.algorithms.grpo`` such that rollouts are recorded, or replayed.

    Args:
        setup: makes the run; a replay makes it without engines.
        grpo_train: trains.
        settings: None: of the file that ``MOCK_SCHEDULER_NEMO_RL`` names.
        ledger: counts what is suppressed.

    Raises:
        ConfigError: the functions are of another module or release, or the settings have problems.
    """
    module = _find_module(setup, grpo_train)
    read = load_settings(NemoRlSettings, settings)
    counts = Ledger() if ledger is None else ledger
    replays = read.mock_config().modes_in_use == {"mock"}
    environments = _without_environments(counts) if replays else ExitStack()
    running: list[Rollouts] = []

    @functools.wraps(setup)
    def recorded_setup(master_config: Any, tokenizer: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        environments.close()
        # Before anything is made: what is wrong with the settings or the recording ends the run here.
        rollouts = Rollouts(master_config, tokenizer, read, counts)
        running[:] = [rollouts]
        if not replays:
            return setup(master_config, tokenizer, *arguments, **options)
        given = inspect.signature(setup).bind(master_config, tokenizer, *arguments, **options)
        make = given.arguments.get("policy_factory") or module.Policy
        given.arguments["policy_factory"] = quiet_policy(make, counts)
        with standing_for(module, names_of_setup(module, counts)):
            made = setup(*given.args, **given.kwargs)
        check_suppressed(made[1])
        return made

    @functools.wraps(grpo_train)
    def recorded_train(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        if not running:
            raise ConfigError("grpo_train was called before the setup that with_rollouts returned beside it")
        rollouts = running.pop()
        try:
            if rollouts.replays:
                check_suppressed(
                    inspect.signature(grpo_train).bind(*arguments, **options).arguments["policy_generation"]
                )
            with standing_for(module, rollouts.names(module)):
                return grpo_train(*arguments, **options)
        finally:
            rollouts.close()

    return recorded_setup, recorded_train


def _find_module(setup: Function, grpo_train: Function) -> ModuleType:
    module = sys.modules[grpo_train.__module__]
    if setup.__module__ != grpo_train.__module__:
        raise ConfigError(
            f"setup is of {setup.__module__}, and grpo_train of {grpo_train.__module__}: give both of {_OF}"
        )
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise ConfigError(
            f"{module.__name__} has no {', '.join(missing)}: it is another algorithm than GRPO, or a release that "
            f"cannot be recorded. Give setup and grpo_train of {_OF}; the adapter was written for the revision that "
            "mock-scheduler frameworks lists"
        )
    return module


def _without_environments(ledger: Ledger) -> ExitStack:
    """Keep NeMo-RL's data from making actors of environments until the stack is closed: a script makes them before its
    ``setup``."""
    stack = ExitStack()
    data = sys.modules.get(_DATA)
    if data is not None and hasattr(data, _MAKING):
        stack.enter_context(standing_for(data, {_MAKING: suppressed_environment(ledger)}))
    return stack
