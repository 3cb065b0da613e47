"""Says what draws random numbers while a model trains.

Megatron's random states follow the rank, and their draws the micro-batches, so another layout draws other numbers: its
activations differ, and nothing is wrong.
"""

from __future__ import annotations

from torch.nn.modules.dropout import _DropoutNd

from mock_scheduler.megatron.observed_model import ObservedModel


def find_draws(model: ObservedModel) -> tuple[str, ...]:
    """Lists what draws in this rank's part of a training model, as ``hidden_dropout``; empty where nothing does.

    Keys of Megatron's configuration first; then dropout of a module with a rate of its own, as of an adapter, by the
    last name of its path.
    """
    config = model.config
    rates = {
        "hidden_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
        "moe_input_jitter_eps": config.moe_input_jitter_eps or 0.0,
    }
    own: dict[str, None] = {}
    for gpt in model.gpts():
        for path, module in gpt.named_modules():
            if isinstance(module, _DropoutNd) and module.p > 0.0 and module.p not in rates.values():
                own[path.rpartition(".")[2]] = None
    return (*(name for name, rate in rates.items() if rate), *own)
