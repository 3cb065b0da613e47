"""The sections of a run's configuration besides ``rollout_mock``: model, layout, training, rollout, tracing, alignment.

Contract: importing this module imports no torch. Model, parallel and training fields are spelled as Megatron-core
spells them (``TransformerConfig``, ``megatron/training/arguments.py``), environment managers as ROLL does (v0.2).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mock_scheduler.config.base import ConfigSection, Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt


class ModelConfig(ConfigSection):
    """The policy, as fields of Megatron's ``TransformerConfig`` and ``GPTModel``."""

    num_layers: PositiveInt = 2
    hidden_size: PositiveInt = 64
    num_attention_heads: PositiveInt = 4
    num_query_groups: PositiveInt | None = None
    ffn_hidden_size: PositiveInt | None = None
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_epsilon: float = 1e-5
    swiglu: bool = True
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    rotary_base: PositiveInt = 10000
    untie_embeddings_and_output_weights: bool = True
    init_method_std: float = Field(default=0.02, gt=0.0)
    vocab_size: PositiveInt | None = None
    make_vocab_size_divisible_by: PositiveInt = 1
    transformer_impl: Literal["local", "transformer_engine"] = "local"

    @property
    def query_groups(self) -> int:
        """Number of key/value groups; the number of heads where none was set."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP: four times the hidden size where none was set."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.query_groups}"
            )
        return self


class ParallelConfig(ConfigSection):
    """The layout: tp × pp × dp, with sequence parallelism over tp."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of processes that this layout needs."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size

    def describe(self) -> str:
        """One phrase with every degree, for logs and messages: ``tp2 pp1 dp1 sp``."""
        layout = (
            f"tp{self.tensor_model_parallel_size} pp{self.pipeline_model_parallel_size} dp{self.data_parallel_size}"
        )
        return f"{layout} sp" if self.sequence_parallel else layout


class TrainingConfig(ConfigSection):
    """Batching, optimizer and schedule, as Megatron names them; batch sizes count trajectories.

    ``lr_warmup_iters``, ``lr_decay_iters``: optimizer updates; a decay that is not given ends with the run's last one.
    """

    micro_batch_size: PositiveInt = 32
    global_batch_size: PositiveInt = 128
    sequence_multiple_of: PositiveInt = 8
    use_distributed_optimizer: bool = True
    lr: float = Field(default=1e-3, gt=0.0)
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_iters: NonNegativeInt = 0
    lr_decay_iters: PositiveInt | None = None
    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    adam_eps: float = Field(default=1e-8, gt=0.0)
    clip_grad: NonNegativeFloat = 1.0

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one update, over all data-parallel ranks."""
        return self.global_batch_size // self.micro_batch_size


class GeneratingArgs(ConfigSection):
    """How actions are sampled: softmax(logits / temperature), then top-k, then top-p; 0 and 1.0 switch them off."""

    temperature: float = Field(default=1.0, gt=0.0)
    top_k: NonNegativeInt = 0
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)


class ActorInferConfig(ConfigSection):
    """The rollout engine; ``generating_args`` are those of training, and of validation where that has none of its own.

    ``only_action_tokens``: the policy chooses among the environment's action tokens alone; its log-probabilities, in
    sampling and in training, are those of the softmax over them.
    """

    only_action_tokens: bool = False
    generating_args: GeneratingArgs = GeneratingArgs()


class EnvManagerConfig(ConfigSection):
    """Which environments play: ``num_env_groups`` groups of ``group_size`` that share their seeds."""

    num_env_groups: PositiveInt = 16
    group_size: PositiveInt = 8
    tags: list[str] = Field(default=["FrozenLake"], min_length=1)
    generating_args: GeneratingArgs | None = None


class FrozenLakeEnvConfig(ConfigSection):
    """Gymnasium's FrozenLake: a fixed map by name, or random maps of ``size`` with frozen fraction ``p``."""

    map_name: Literal["4x4"] | None = "4x4"
    size: Annotated[int, Field(ge=2, le=8)] = 4
    p: Fraction = 0.8
    is_slippery: bool = False
    format_penalty: float = -0.01


class CustomEnvConfig(ConfigSection):
    """One tag of ``custom_envs``: the environment's type, its turn limit and its own settings."""

    env_type: Literal["frozen_lake"] = "frozen_lake"
    max_steps: PositiveInt = 10
    env_config: FrozenLakeEnvConfig = FrozenLakeEnvConfig()


class RewardNormalizationConfig(ConfigSection):
    """How rewards become advantages: within groups, by mean, or by mean and standard deviation."""

    grouping: Literal["traj_group_id"] = "traj_group_id"
    method: Literal["mean", "mean_std"] = "mean_std"


class TraceConfig(ConfigSection):
    """Which training internals are written.

    ``full``: of every step the parameters before its first update, and of every update main gradients, parameters in
    the precision in which they are updated and, where the model holds narrower ones, these as well.
    ``operations``: write digests of every torch operation of a step, for ``mock-scheduler doctor``.
    """

    level: Literal["off", "full"] = "off"
    operations: bool = False


class ToleranceConfig(ConfigSection):
    """How far a candidate may be from the baseline and still be called ``rounding``; the defaults are for float32.

    ``metric``: largest |a - b| / max(|a|, |b|, metric_floor) of a logged metric.
    ``gradient``: largest ||a - b|| / ||a|| of a main gradient.
    ``update``: largest ||d_a - d_b|| / ||d_a|| of the change d that one update made to a parameter, beyond rounding.
    """

    metric: NonNegativeFloat = 1e-4
    metric_floor: NonNegativeFloat = 1e-3
    gradient: NonNegativeFloat = 1e-4
    update: NonNegativeFloat = 5e-3


class CandidateConfig(ConfigSection):
    """One candidate of an alignment run: what makes it differ from the baseline.

    ``overrides``: configuration overrides. ``entry``: the Python module that runs it in the pipeline's place, for a
    change that is code: one that puts another kernel in, say, and then calls ``pipelines.agentic.main``.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    overrides: list[str] = Field(default=[])
    entry: str = "pipelines.agentic"


class AlignConfig(ConfigSection):
    """``mock-scheduler align``: what the baseline and each candidate override, and the stated tolerance.

    ``tolerance``: ``None`` is ``ToleranceConfig``'s own for float32; bfloat16 has no default, so it must be stated.
    """

    output_dir: str | None = None
    baseline: list[str] = Field(default=[])
    candidates: list[CandidateConfig] = Field(default=[])
    tolerance: ToleranceConfig | None = None


class CheckpointConfig(ConfigSection):
    """Where checkpoints go; ``None`` is ``{output_dir}/checkpoints``."""

    output_dir: str | None = None
