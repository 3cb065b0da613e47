"""Attaches the instruments to SkyRL's Megatron worker: the class that its driver makes actors of.

    from skyrl.backends.skyrl_train.workers.megatron import megatron_worker
    megatron_worker.PolicyWorker = ray.remote(num_gpus=1)(traced_worker(megatron_worker.MegatronPolicyWorkerBase))

SkyRL reduces gradients once, in ``optim_step``, after all its calls of ``forward_backward``.
"""

from __future__ import annotations

from mock_scheduler.adapters.engines import Engine, EngineParts, with_trace

PARTS = EngineParts(trains="forward_backward", chunks="actor_module", optimizer="optimizer")


def traced_worker(worker: Engine) -> Engine:
    """Return a class of this worker (``MegatronPolicyWorkerBase``) that is attached to before it first trains."""
    return with_trace(worker, PARTS)
