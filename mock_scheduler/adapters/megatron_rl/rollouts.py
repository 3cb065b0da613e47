"""Puts the proxy at the seam of megatron/rl, ``megatron.rl.rl_utils.get_environment_rollouts``.

    from mock_scheduler.adapters import megatron_rl

    megatron_rl.attach_rollouts({"enable": True, "mode": "dump", "dump_dir": "dumps/v1"})  # before pretrain

Contract: Megatron-LM asks on every rank, and every rank gets the same groups. Rank 0 writes the recording; in a replay
each rank reads it, and nothing else happens: no inference server, no inference mode, no weights for it. A step has the
number of its iteration, with a gap wherever rollouts are trained on for several. There is no official place: functions
of ``rl_utils`` are rebound, and put back by ``restore``.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeAlias

import torch.distributed as dist

from mock_scheduler.adapters.megatron_rl.codec import GroupedRolloutsCodec
from mock_scheduler.adapters.settings import describe_keys
from mock_scheduler.batch import SamplingParams
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.errors import ConfigError, SchedulerError
from mock_scheduler.ledger import Ledger
from mock_scheduler.proxy.build import build_scheduler, read_config
from mock_scheduler.proxy.sync_scheduler import ProxyScheduler
from mock_scheduler.scheduler import RolloutRequest
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.foreign_files import read_bytes

MODULE = "megatron.rl.rl_utils"
_SEAM, _EVALUATION, _SHUTDOWN = (
    "get_environment_rollouts",
    "evaluate_and_print_results_rl",
    "rl_inference_interface_shutdown",
)
_NEEDED = ("model", "n_prompts", "samples_per_group")
#: Arguments of Megatron-LM that a replay must share.
_CONTRACT = (
    *("grpo_prompts_per_step", "grpo_group_size", "grpo_filter_groups_with_same_reward", "seq_length"),
    *("inference_max_seq_length", "rl_default_temperature", "rl_default_top_p", "rl_default_top_k"),
    *("rl_partial_rollouts", "rl_generation_lag", "rl_skip_bos_token", "tokenizer_type", "tokenizer_model"),
)

#: An object of Megatron-LM, whose attributes are read by name: it is not imported here.
Foreign: TypeAlias = Any


def attach_rollouts(
    config: RolloutMockConfig | Mapping[str, object],
    *,
    contract: Mapping[str, JSON] | None = None,
    resume: bool = False,
    ledger: Ledger | None = None,
) -> Rollouts:
    """Puts the proxy before Megatron-LM's rollouts. Called on every rank before ``pretrain``; it does not communicate.

    Args:
        config: the section ``rollout_mock``.
        contract: further names and values that a replay must match, such as weights.
        resume: a dump goes on in the folder of its earlier part.
        ledger: counts every call; by default a new one.

    Raises:
        ConfigError: the installed Megatron-LM has no megatron/rl, or another form of it, or it is attached to already.
    """
    try:
        module: Foreign = import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            f"{MODULE} cannot be imported: {error}. megatron/rl is in Megatron-LM's sources, and in no wheel of "
            "megatron-core"
        ) from error
    rollouts = Rollouts(module, config, contract=contract, resume=resume, ledger=ledger)
    rollouts.install()
    return rollouts


class Rollouts:
    """Answers ``get_environment_rollouts``; ``module``: of that function."""

    def __init__(
        self,
        module: Foreign,
        config: RolloutMockConfig | Mapping[str, object],
        *,
        contract: Mapping[str, JSON] | None = None,
        resume: bool = False,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._module = module
        self._config = config if isinstance(config, RolloutMockConfig) else read_config(config)
        self._contract = contract or {}
        self._resume = resume
        self._originals: dict[str, Callable[..., Foreign]] = {}
        self._scheduler: ProxyScheduler | None = None
        self._given: inspect.BoundArguments | None = None

    def install(self) -> None:
        """Rebinds the functions; raises ``ConfigError`` where they are not what is expected."""
        found = getattr(self._module, _SEAM, None)
        if getattr(found, "__self__", None).__class__ is Rollouts:
            raise ConfigError("attach_rollouts was called twice: call it once, before pretrain")
        lacking = (
            _NEEDED if found is None else [name for name in _NEEDED if name not in inspect.signature(found).parameters]
        )
        if lacking:
            raise ConfigError(
                f"{MODULE}.{_SEAM} {'is not there' if found is None else f'has no {lacking}'}: this release of "
                "Megatron-LM collects its rollouts elsewhere; docs/frameworks/megatron_rl.md names what was tried"
            )
        replacements = {_SEAM: self.collect, _EVALUATION: self._evaluate, _SHUTDOWN: self._shut_down}
        for name, replacement in replacements.items():
            if hasattr(self._module, name):
                self._originals[name] = getattr(self._module, name)
                setattr(self._module, name, replacement)

    def restore(self) -> None:
        """Puts Megatron-LM's own functions back; a second call does nothing."""
        for name, original in self._originals.items():
            setattr(self._module, name, original)

    def close(self) -> None:
        """Writes the rest; raises any error of writing."""
        if self._scheduler is not None:
            self._scheduler.close()

    def collect(self, *arguments: Foreign, **options: Foreign) -> Foreign:
        """Answers as ``get_environment_rollouts``."""
        bound = inspect.signature(self._originals[_SEAM]).bind(*arguments, **options)
        num_prompts, group_size = (int(bound.arguments[name]) for name in _NEEDED[1:])
        iteration = int(self._module.get_args().curr_iteration)
        scheduler = self._open()
        self._given = bound
        if self._is_replayed(iteration, "train") and bound.arguments.get("inference_model") is not None:
            self.ledger.count("suppressed", "weight_updates")
        answer = scheduler.get_batch(
            RolloutRequest(
                global_step=iteration,
                batch_size=num_prompts * group_size,
                policy_version=iteration,
                group_size=group_size,
            )
        )
        scheduler.state_dict()  # returns when the step is on disk: a checkpoint may be written next
        return answer

    def play(self) -> Foreign:
        """Calls Megatron-LM's own function as it has called this one."""
        assert self._given is not None  # asked within collect
        return self._originals[_SEAM](*self._given.args, **self._given.kwargs)

    def _evaluate(self, *arguments: Foreign, **options: Foreign) -> Foreign:
        """Evaluates where training is live, with an inference server of its own; a replay has none."""
        if not self._is_replayed(int(self._module.get_args().curr_iteration), "val"):
            return self._originals[_EVALUATION](*arguments, **options)
        self.ledger.count("suppressed", "evaluation")
        return None

    def _shut_down(self, *arguments: Foreign, **options: Foreign) -> Foreign:
        """Closes the recording; Megatron-LM leaves by ``os._exit`` here, so that nothing of Python's end follows."""
        self.close()
        return self._originals[_SHUTDOWN](*arguments, **options)

    def _is_replayed(self, step: int, kind: str) -> bool:
        config = self._config
        if not config.enable:
            return False
        found: str = config.mode_of(step=step, kind="val" if kind == "val" else "train", scheduler_id="default")
        return found == "mock"

    def _open(self) -> ProxyScheduler:
        if self._scheduler is None:
            args = self._module.get_args()
            is_joined = dist.is_available() and dist.is_initialized()
            is_writer = not is_joined or dist.get_rank() == 0
            # Only rank 0 plays with the generators whose states are recorded; the others' must not follow them.
            config = self._config if is_writer else self._config.model_copy(update={"random_states": "none"})
            self._scheduler = build_scheduler(
                config,
                lambda: _Live(self),
                {**describe_arguments(args), **self._contract},
                codec=GroupedRolloutsCodec(
                    sampling=read_sampling(args), find_class=lambda name: getattr(self._module, name, None)
                ),
                ledger=self.ledger,
                resume=self._resume,
                is_writer=is_writer,
                provenance={"framework": "megatron/rl"},
            )
            if is_joined:
                dist.barrier()  # a cache is listed by all before one adds to it
        return self._scheduler


class _Live:
    """Serves as rollout scheduler with Megatron-LM's own function."""

    def __init__(self, owner: Rollouts) -> None:
        self._owner = owner

    def get_batch(self, request: RolloutRequest) -> Foreign:
        """Collects."""
        found = self._owner.play()
        if not found or not (found[0] if isinstance(found, tuple) else found):
            raise SchedulerError(f"train step {request.global_step}: {_SEAM} collected nothing")
        return found


def read_sampling(args: Foreign) -> SamplingParams:
    """Reads how tokens are sampled; a ``rl_default_top_k`` below 1 and a ``rl_default_top_p`` of 0 mean all tokens.

    Megatron-LM's engine states log-probabilities of the logits as they are, unless it is asked otherwise.
    """
    stated = str(getattr(args, "inference_dynamic_batching_logprobs_mode", "raw_logprobs"))
    return SamplingParams(
        temperature=float(args.rl_default_temperature),
        top_p=float(args.rl_default_top_p) or 1.0,
        top_k=max(int(args.rl_default_top_k or 0), 0),
        logprobs_mode="processed" if stated.startswith("processed") else "raw",
    )


def describe_arguments(args: Foreign) -> dict[str, JSON]:
    """Describes what a replay must share with its recording; of the environments, the content of their file."""
    found = describe_keys(args, _CONTRACT, "megatron_rl")
    environments = getattr(args, "langrl_env_config", None)
    if environments:
        content = read_bytes(environments, what="the environments")
        found["megatron_rl.environments"] = hashlib.sha256(content).hexdigest()
    return found
