"""Attaches the instruments to NeMo-RL's Megatron policy worker, by its own arguments:

    from mock_scheduler.adapters.nemo_rl.trace import traced_policy
    setup(config, tokenizer, dataset, val_dataset, policy_factory=traced_policy)

NeMo-RL imports its worker by name, in the environment of the policy's workers; this library must be installed there.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from mock_scheduler.adapters.engines import EngineParts, find_traced

_MODULE = "nemo_rl.models.policy.workers.megatron_policy_worker"
_WORKER = "MegatronPolicyWorker"
_TRACED = f"Traced{_WORKER}"
PARTS = EngineParts(trains="train", chunks="model", optimizer="optimizer")


def traced_policy(**arguments: Any) -> Any:  # noqa: ANN401 - NeMo-RL's
    """Make NeMo-RL's ``Policy`` with a worker that is attached to before it first trains.

    Args:
        arguments: as ``setup`` gives them to a ``policy_factory``.
    """
    registry = import_module("nemo_rl.distributed.ray_actor_environment_registry").ACTOR_ENVIRONMENT_REGISTRY
    name = f"{__name__}.{_TRACED}"
    registry[name] = registry[f"{_MODULE}.{_WORKER}"]
    policy: Any = import_module("nemo_rl.models.policy.lm_policy").Policy
    return policy(**arguments, worker_extension_cls_fqn=name)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class of NeMo-RL
    # An actor's class cannot be derived from: NeMo-RL has the worker itself under another name.
    if name != _TRACED:
        return find_traced(__name__, name, _MODULE, PARTS)
    workers, ray = import_module(_MODULE), import_module("ray")
    worker = find_traced(__name__, f"{_TRACED}Impl", _MODULE, PARTS)
    environment = workers.get_runtime_env_for_policy_worker("megatron_policy_worker")
    actor = ray.remote(runtime_env=environment)(worker)
    setattr(sys.modules[__name__], name, actor)
    return actor
