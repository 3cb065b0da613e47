"""Lists the cases to compare with one process: layouts, computation options, and layouts known to be wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.layouts.options import (
    OPTIONS,
    PLAIN,
    SEPARATOR,
    keeps_bits,
    merge_changes,
    split_options,
    values_options,
)
from mock_scheduler.config.layout import ParallelConfig, parse_layout
from mock_scheduler.layouts.rules.known_wrong import find_known_wrong, installed_megatron, layout_values
from pipelines.config.schema import PipelineConfig
from pipelines.config.training import LOSS_VALUES

PRECISIONS = ("float32", "float64")
SEED = 42
LONGEST_ROW = 56
NUM_GROUPS, GROUP_SIZE = 4, 4
NUM_STEPS = 2
ONE_PROCESS = "tp1"

_DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 96,
    "qk_layernorm": True,
    "rotary_base": 100,
    "init_method_std": 0.08,
    "vocab_size": 62,
}
_MOE: dict[str, Any] = {
    **_DENSE,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 32,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.01,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**_DENSE, "untie_embeddings_and_output_weights": False},
    "moe": _MOE,
    # Balances each row's own tokens: with other micro-batches it is still the same function.
    "moe-by-row": {**_MOE, "moe_router_load_balancing_type": "seq_aux_loss"},
}
"""The models, small, with every kind of layer and parameter that a layout splits in its own way."""

#: The part of a layout name for an optimizer that is not distributed.
_PLAIN_OPTIMIZER = "plain"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One training. ``layout``: as ``tp2-sp-pp2``, with ``plain`` for the optimizer that is not distributed.

    ``option``: names of ``OPTIONS`` with ``+`` between them. ``precision``: as in the configuration.
    """

    model: str
    precision: str
    layout: str = ONE_PROCESS
    option: str = PLAIN

    @classmethod
    def parse(cls, name: str) -> Case:
        """Make the case of a name."""
        model, precision, layout, option = name.split("/")
        return cls(model=model, precision=precision, layout=layout, option=option)

    @property
    def name(self) -> str:
        """``model/precision/layout/option``, also the folder of its results."""
        return "/".join((self.model, self.precision, self.layout, self.option))

    @property
    def label(self) -> str:
        """Layout and options in one phrase, without plain parts."""
        if self.option == PLAIN:
            return self.layout
        option = " ".join(split_options(self.option))
        return option if self.layout == ONE_PROCESS else f"{self.layout} {option}"

    @property
    def world_size(self) -> int:
        """The number of its processes."""
        return ParallelConfig.model_validate(parallel_of(self.layout)).world_size

    @property
    def reference(self) -> Case:
        """The case of one process with the same function, computed in the plainest way."""
        return replace(self, layout=ONE_PROCESS, option=values_options(self.option))

    @property
    def is_exact(self) -> bool:
        """Whether it must equal the reference to the last bit."""
        return self.layout == ONE_PROCESS and keeps_bits(self.option)


LAYOUTS: dict[str, tuple[str, ...]] = {
    "dense": (
        *("tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2", "dp2", "dp2-plain"),
        *("tp4-sp", "pp4", "cp4", "dp4", "tp2-pp2", "tp2-sp-pp2-vpp2", "tp2-sp-cp2", "tp2-dp2", "pp2-cp2", "pp2-dp2"),
        *("cp2-dp2", "pp2-vpp2-dp2-plain"),
        *("tp2-sp-pp2-dp2", "tp2-sp-pp2-cp2", "tp2-sp-cp2-dp2", "pp2-vpp2-cp2-dp2", "tp4-sp-pp2"),
    ),
    "moe": (
        *("pp2", "pp2-vpp2", "cp2", "dp2", "dp2-ep2", "dp2-ep2-plain", "cp2-ep2", "tp2-sp-ep2"),
        *("dp4-ep4", "dp4-ep2", "pp2-dp2-ep2", "tp2-sp-dp2-ep2", "tp2-sp-dp2-ep4", "tp2-sp-cp2-ep2"),
        *("pp2-vpp2-dp2-ep2", "cp2-dp2-ep4", "tp2-sp-pp2-ep2"),
        *("tp2-sp-pp2-dp2-ep2", "tp2-sp-pp2-vpp2-dp2-ep4", "tp2-sp-pp2-cp2-ep2", "pp2-cp2-dp2-ep4"),
    ),
}

_IN_ONE_PROCESS = (
    *("repeat", "micro-batch-2", "micro-batch-4", "micro-batch-8", "dynamic", "packing"),
    *("recompute-selective", "recompute-full", "recompute-uniform-2", "recompute-block-1", "recompute-block-3"),
    *("packing+recompute-full", "turns+micro-batch-8", "turns+dynamic", "turns+packing"),
)
_IN_SEVERAL = (
    *(("pp2", "dynamic"), ("pp2", "packing"), ("pp2-vpp2", "dynamic"), ("pp2-vpp2", "packing")),
    *(("cp2", "dynamic"), ("cp2", "packing"), ("dp2", "dynamic"), ("dp2", "turns+packing"), ("dp2", "turns")),
    *(("pp2-vpp2", "critic+turns+dynamic"), ("cp2", "critic"), ("dp2", "critic+packing")),
)
OPTION_CASES: dict[str, tuple[tuple[str, str], ...]] = {
    "dense": (
        *((ONE_PROCESS, option) for option in _IN_ONE_PROCESS),
        *_IN_SEVERAL,
        *(("tp2-sp", "dynamic"), ("tp2-sp", "packing"), ("tp2-sp", "packing+recompute-full"), ("tp2-sp", "critic")),
    ),
    "moe-by-row": (
        *((ONE_PROCESS, option) for option in _IN_ONE_PROCESS),
        *_IN_SEVERAL,
        *(("tp2-sp-ep2", "dynamic"), ("tp2-sp-ep2", "packing"), ("tp2-sp-ep2", "packing+recompute-full")),
        ("tp2-sp-ep2", "critic"),
    ),
}
"""Layout and options, by model."""

KNOWN_WRONG_CASES: dict[str, Case] = {
    "pipeline-crossing": Case(model="dense", precision="float64", layout="pp2-vpp2", option="batched-p2p"),
    "experts-under-tp": Case(model="moe", precision="float64", layout="tp2-sp"),
    "aux-loss-per-token": Case(model="moe", precision="float64", layout="tp2-sp-ep2", option="megatron-router"),
    "loss-tuple-under-cp": Case(model="dense", precision="float64", layout="cp2", option="micro-batch-means"),
    "expert-bias-under-tp": Case(model="moe", precision="float64", layout="tp2-sp-ep2", option="biases"),
}
"""A case refused by each rule of ``KNOWN_WRONG``, by the rule's name, but for those of ``RULES_OF_OTHER_MODELS``."""

RULES_OF_OTHER_MODELS = ("latent-keys-under-tp", "latent-norm-under-tp")
"""Of models that the pipeline does not build; ``tests/megatron/test_discovery.py`` shows what they are about."""


def allowing(case: Case, rule: str) -> Case:
    """Return the case with a rule's ``parallel.allow_known_wrong``."""
    allow = f"allow-{rule}"
    return replace(case, option=allow if case.option == PLAIN else case.option + SEPARATOR + allow)


def refused_cases(model: str) -> Iterator[tuple[str, Case]]:
    """Yield rule and case of each layout that the installed megatron-core computes wrongly."""
    for rule, case in KNOWN_WRONG_CASES.items():
        config = build_config(allowing(case, rule))
        values = layout_values(config.parallel, config.model, config.training, loss_values=LOSS_VALUES)
        found = find_known_wrong(values, version=installed_megatron())
        if case.model == model and rule in (conflict.rule.name for conflict in found):
            yield rule, case


def layout_cases(models: Sequence[str], precisions: Sequence[str]) -> list[Case]:
    """List every layout of these models."""
    return [
        Case(model=model, precision=precision, layout=layout)
        for model in models
        for layout in LAYOUTS[model]
        for precision in precisions
    ]


def option_cases(models: Sequence[str], precisions: Sequence[str]) -> list[Case]:
    """List every computation option of these models."""
    return [
        Case(model=model, precision=precision, layout=layout, option=option)
        for model in models
        for layout, option in OPTION_CASES[model]
        for precision in precisions
    ]


def parallel_of(layout: str) -> dict[str, Any]:
    """Make the ``parallel`` section of ``tp2-sp-pp2`` or ``dp2-plain``."""
    return parse_layout("-".join(part for part in layout.split("-") if part != _PLAIN_OPTIMIZER))


def build_config(case: Case) -> PipelineConfig:
    """Configure a run of two updates per step on 16 trajectories.

    Raises:
        ValueError: the layout cannot be run, or is known to be wrong and not allowed; or an option is unknown.
    """
    groups = {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    values: dict[str, Any] = {
        "exp_name": "layouts",
        "seed": SEED,
        "max_steps": NUM_STEPS,
        "rollout_batch_size": NUM_GROUPS * GROUP_SIZE,
        "val_batch_size": NUM_GROUPS * GROUP_SIZE,
        "sequence_length": 64,
        "precision": case.precision,
        "use_kl_loss": True,
        "entropy_loss_coef": 0.01,
        "model": MODELS[case.model],
        "parallel": parallel_of(case.layout),
        "training": {
            "micro_batch_size": 1,
            "global_batch_size": 8,
            "lr": 1e-3,
            "clip_grad": 0.3,
            "use_distributed_optimizer": _PLAIN_OPTIMIZER not in case.layout.split("-"),
        },
        "actor_infer": {"only_action_tokens": True},
        "train_env_manager": groups,
        "val_env_manager": groups,
    }
    changes = [OPTIONS[name].changes for name in split_options(case.option)]
    return PipelineConfig.model_validate(merge_changes(values, changes))
