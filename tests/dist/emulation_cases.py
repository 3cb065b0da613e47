"""What order emulation is shown on: models, precisions and layouts, each named ``model/precision/layout``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.layouts.cases import MODELS, SEED, parallel_of
from benchmarks.layouts.options import merge_changes
from benchmarks.layouts.cases import GROUP_SIZE
from benchmarks.layouts.cases import NUM_GROUPS
from mock_scheduler.config.layout import ParallelConfig
from pipelines.config.schema import PipelineConfig

PLAIN_OPTIMIZER = "plain"
ONE_PROCESS = "tp1"

#: ``qwen``: RMSNorm, gated, grouped queries and norms of queries and keys, tied. ``gpt``: LayerNorm, biases, learned
#: positions, an MLP without gate, as many groups as heads. ``moe``: 4 experts, of which biased sigmoids choose 2, one
#: more for all tokens, gated, losses of routers over a micro-batch; the first layer is dense. ``moe-by-row``: a softmax
#: chooses 1, none is for all tokens, no gates, losses by row, tied. Widths leave remainders behind vectors of 8 or 16.
_QWEN: dict[str, Any] = {**MODELS["dense"], "ffn_hidden_size": 88}
_GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "ffn_hidden_size": 136,
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "position_embedding_type": "learned_absolute",
    "init_method_std": 0.08,
    "vocab_size": 62,
}
_EXPERTS: dict[str, Any] = {**MODELS["moe"], "ffn_hidden_size": 88, "moe_ffn_hidden_size": 40}
EMULATED_MODELS: dict[str, dict[str, Any]] = {
    "qwen": _QWEN,
    "qwen-untied": {**_QWEN, "untie_embeddings_and_output_weights": True, "qk_layernorm": False},
    "qwen-bias": {**_QWEN, "add_bias_linear": True, "normalization": "LayerNorm"},
    "gpt": _GPT,
    "gpt-tied": {
        **_GPT,
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
    },
    "moe": _EXPERTS,
    "moe-by-row": {
        **_EXPERTS,
        "untie_embeddings_and_output_weights": False,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_router_enable_expert_bias": False,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_score_function": "softmax",
        "moe_shared_expert_intermediate_size": None,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "swiglu": False,
    },
}
_CRITIC: dict[str, Any] = {
    "adv_estimator": "gae",
    "kl_in_reward": {"coef": 0.1, "target": 0.05, "horizon": 64},
    "reward_normalization": {"method": "none"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "critic": _CRITIC,
    "packing": {"training": {"sequence_packing": True, "max_tokens_per_micro_batch": 128}},
    "recompute": {"training": {"recompute_granularity": "full", "recompute_num_layers": 1}},
    "selective": {"training": {"recompute_granularity": "selective"}},
    "means": {"training": {"calculate_per_token_loss": False}},
    "rows2": {"training": {"micro_batch_size": 2}},
    "narrow": {"training": {"accumulate_allreduce_grads_in_fp32": False}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationCase:
    """A model with options behind ``+``, a precision and a layout with ``plain`` for an undistributed optimizer."""

    model: str
    precision: str
    layout: str

    @classmethod
    def parse(cls, name: str) -> EmulationCase:
        """The case of a name."""
        model, precision, layout = name.split("/")
        return cls(model=model, precision=precision, layout=layout)

    @property
    def name(self) -> str:
        """Also the folder of its results."""
        return "/".join((self.model, self.precision, self.layout))

    @property
    def world_size(self) -> int:
        """Processes of the run that has the layout."""
        return ParallelConfig.model_validate(parallel_of(self.layout)).world_size

    def config(self, *, emulates: bool) -> PipelineConfig:
        """Two steps of two updates whose gradients are clipped; ``emulates``: in one process, in the layout's order."""
        model, *options = self.model.split("+")
        parallel = parallel_of(self.layout)
        groups = {"num_env_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
        emulated = None if self.layout.split("-")[0] == ONE_PROCESS else parallel
        values: dict[str, Any] = {
            "exp_name": "emulation",
            "seed": SEED,
            "max_steps": 2,
            "rollout_batch_size": NUM_GROUPS * GROUP_SIZE,
            "val_batch_size": NUM_GROUPS * GROUP_SIZE,
            "sequence_length": 64,
            "precision": self.precision,
            "use_kl_loss": True,
            "entropy_loss_coef": 0.01,
            "model": EMULATED_MODELS[model],
            "parallel": {} if emulates else parallel,
            "order": {"emulate": emulated} if emulates else {"ordered_reductions": self.world_size > 2},
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": 8,
                "lr": 1e-3,
                "weight_decay": 0.1,
                "clip_grad": 0.3,
                "use_distributed_optimizer": PLAIN_OPTIMIZER not in self.layout.split("-"),
            },
            "actor_infer": {"only_action_tokens": True},
            "train_env_manager": groups,
            "val_env_manager": groups,
        }
        return PipelineConfig.model_validate(merge_changes(values, [OPTIONS[option] for option in options]))
