"""Options of a case, by name: ways to compute the same training, and changes of the training itself.

A change of the training is made on both sides of a comparison. A case names any number, as in
``packing+recompute-full``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mock_scheduler.layouts.rules.known_wrong import KNOWN_WRONG

PLAIN = "plain"
SEPARATOR = "+"
# Two rows of the longest kind, so that micro-batches and lines hold from one to many.
_BUDGET = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option. ``changes``: keys of the configuration, as nested mappings.

    ``changes_values``: it is another function or other rows, so the reference must have it too.
    ``keeps_bits``: in one process nothing may change, not even by rounding.
    """

    changes: Mapping[str, Any]
    changes_values: bool = False
    keeps_bits: bool = False


def _training(**keys: object) -> Option:
    return Option(changes={"training": keys})


def _recomputation(granularity: str, **keys: object) -> Option:
    return Option(changes={"training": {"recompute_granularity": granularity, **keys}}, keeps_bits=True)


OPTIONS: dict[str, Option] = {
    PLAIN: Option(changes={}, keeps_bits=True),
    "repeat": Option(changes={}, keeps_bits=True),
    **{f"micro-batch-{size}": _training(micro_batch_size=size) for size in (2, 4, 8)},
    "dynamic": _training(batching="dynamic", max_tokens_per_micro_batch=_BUDGET),
    "packing": _training(sequence_packing=True, max_tokens_per_micro_batch=_BUDGET),
    "recompute-selective": _recomputation("selective"),
    "recompute-full": _recomputation("full"),
    "recompute-uniform-2": _recomputation("full", recompute_num_layers=2),
    "recompute-block-1": _recomputation("full", recompute_method="block"),
    "recompute-block-3": _recomputation("full", recompute_method="block", recompute_num_layers=3),
    "narrow-accumulation": _training(accumulate_allreduce_grads_in_fp32=False),
    "batched-p2p": Option(changes={"parallel": {"overlap_p2p_comm": False}}),
    **{
        f"allow-{rule.name}": Option(changes={"parallel": {"allow_known_wrong": [rule.name]}}, keeps_bits=True)
        for rule in KNOWN_WRONG
    },
    # What the routers would choose by themselves, as long as no update comes between.
    "record": Option(changes={"model": {"moe_router_replay": "record"}}, keeps_bits=True),
    "replay": Option(
        changes={
            "model": {"moe_router_replay": "replay"},
            "actor_infer": {"only_action_tokens": True, "record_routed_experts": True},
        },
        changes_values=True,
    ),
    "turns": Option(changes={"rollout_form": "step"}, changes_values=True),
    "one-update": Option(changes={"max_steps": 1, "training": {"global_batch_size": 16}}, changes_values=True),
    "micro-batch-means": Option(changes={"training": {"calculate_per_token_loss": False}}, changes_values=True),
    "megatron-router": Option(changes={"model": {"moe_router_impl": "megatron"}}, changes_values=True),
    "critic": Option(
        changes={
            "adv_estimator": "gae",
            "kl_in_reward": {"coef": 0.1, "target": 0.05, "horizon": 64},
            "reward_normalization": {"method": "none"},
        },
        changes_values=True,
    ),
    "biases": Option(
        changes={"model": {"add_bias_linear": True, "moe_shared_expert_intermediate_size": None}}, changes_values=True
    ),
}


def split_options(text: str) -> tuple[str, ...]:
    """Split ``packing+recompute-full`` into names.

    Raises:
        ValueError: a name is unknown; lists the known ones.
    """
    names = tuple(text.split(SEPARATOR))
    unknown = [name for name in names if name not in OPTIONS]
    if unknown:
        raise ValueError(f"no option is named {', '.join(map(repr, unknown))}; known: {', '.join(OPTIONS)}")
    return names


def values_options(text: str) -> str:
    """Keep the options of the training itself, for the reference; ``plain`` where there are none."""
    return SEPARATOR.join(name for name in split_options(text) if OPTIONS[name].changes_values) or PLAIN


def keeps_bits(text: str) -> bool:
    """Whether one process computes the same bits with these options as with ``values_options`` alone."""
    return all(OPTIONS[name].keeps_bits or OPTIONS[name].changes_values for name in split_options(text))


def merge_changes(values: Mapping[str, Any], changes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay changes over configuration keys, sections key by key."""
    merged = dict(values)
    for change in changes:
        for key, value in change.items():
            is_section = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = {**merged[key], **value} if is_section else value
    return merged
