"""The configuration of a run as pydantic models; unknown keys are refused.

Contract: importing this module imports no torch. Top-level keys, ``rollout_mock``, ``system_envs`` and the
environment managers are spelled as ROLL spells them (``roll/configs``, v0.2); model, parallel and training
fields as Megatron-core spells them (``TransformerConfig``, ``megatron/training/arguments.py``).
Everything that can be known to be wrong before a process starts is refused here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from mock_scheduler.config.steps import StepRanges

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Mode = Literal["train", "val"]
RolloutMode = Literal["real", "dump", "mock", "cache", "verify"]
Steps = Annotated[StepRanges, BeforeValidator(StepRanges.parse), PlainSerializer(str, return_type=str)]


class ConfigSection(BaseModel):
    """Base of all sections: unknown keys are errors, values are immutable once loaded."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), arbitrary_types_allowed=True)


class ScheduleEntry(ConfigSection):
    """Another mode for some steps: those in ``steps`` (``"0-19, 40, 100-"``), of these kinds and schedulers.

    ``kinds`` and ``schedulers`` None: all.
    """

    mode: RolloutMode
    steps: Steps = StepRanges.parse("0-")
    kinds: list[Mode] | None = None
    schedulers: list[str] | None = None

    def applies_to(self, *, step: int, kind: Mode, scheduler_id: str) -> bool:
        """Whether this entry decides the mode of a request."""
        return (
            step in self.steps
            and (self.kinds is None or kind in self.kinds)
            and (self.schedulers is None or scheduler_id in self.schedulers)
        )


class RetentionConfig(ConfigSection):
    """Which recorded steps stay. ``keep_last`` None: all. Steps in ``pin_steps`` are never removed.

    Removed is only what lies before a saved checkpoint from which all that stays can be replayed: so at least
    ``keep_last`` steps stay, and more where no checkpoint allows the cut.
    """

    keep_last: PositiveInt | None = None
    pin_steps: Steps | None = None


class RolloutMockConfig(ConfigSection):
    """``rollout_mock``: record rollouts, or replay them instead of running an engine.

    ``mode``: ``real``; ``dump``: real, and recorded; ``mock``: replayed; ``cache``: replayed where recorded, else
    real and recorded; ``verify``: real, and compared with the recording. ``schedule``: the first entry that applies to
    a request decides its mode, else ``mode`` does. ``steps``, ``every``: of what is played in dump and cache, record
    the steps in ``steps`` (None: all) that ``every`` divides. ``dump_dir``: a folder, or an fsspec URL such as
    ``s3://bucket/path``. ``missing_step``: what mock does for a step that is not recorded: refuse, or ``repeat`` the
    nearest earlier (else later) one, or the last one. ``origin``: the foreign section this was made from, if any.
    """

    enable: bool = False
    mode: RolloutMode = "dump"
    dump_dir: Annotated[str, Field(min_length=1)] = "./rollout_mock_dumps"
    schedule: list[ScheduleEntry] = []
    steps: Steps | None = None
    every: PositiveInt = 1
    missing_step: Literal["error", "repeat", "repeat_last"] = "error"
    on_mismatch: Literal["error", "warn"] = "error"
    on_difference: Literal["error", "warn"] = "error"
    on_duplicate_rows: Literal["report", "error", "ignore"] = "report"
    on_partial_groups: Literal["error", "report"] = "error"
    on_low_disk: Literal["error", "warn"] = "error"
    retention: RetentionConfig = RetentionConfig()
    compression: Literal["none", "zstd"] = "none"
    background: bool = True
    allow_nondeterministic: bool = False
    origin: str = ""

    @property
    def effective_mode(self) -> RolloutMode:
        """The mode where no entry of the schedule applies; ``real`` where the section is not enabled."""
        return self.mode if self.enable else "real"

    @property
    def modes_in_use(self) -> frozenset[RolloutMode]:
        """Every mode that a request may be answered in."""
        return frozenset({self.effective_mode, *(entry.mode for entry in self.schedule if self.enable)})

    def mode_of(self, *, step: int, kind: Mode, scheduler_id: str) -> RolloutMode:
        """The mode of one request."""
        entries = self.schedule if self.enable else []
        applying = (e.mode for e in entries if e.applies_to(step=step, kind=kind, scheduler_id=scheduler_id))
        return next(applying, self.effective_mode)

    def records_step(self, step: int) -> bool:
        """Whether a step that dump or cache plays is written."""
        return step % self.every == 0 and (self.steps is None or step in self.steps)


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
    """

    level: Literal["off", "full"] = "off"


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
    overrides: list[str] = []
    entry: str = "pipelines.agentic"


class AlignConfig(ConfigSection):
    """``mock-scheduler align``: what the baseline and each candidate override, and the stated tolerance.

    ``tolerance``: ``None`` is ``ToleranceConfig``'s own for float32; bfloat16 has no default, so it must be stated.
    """

    output_dir: str | None = None
    baseline: list[str] = []
    candidates: list[CandidateConfig] = []
    tolerance: ToleranceConfig | None = None


class CheckpointConfig(ConfigSection):
    """Where checkpoints go; ``None`` is ``{output_dir}/checkpoints``."""

    output_dir: str | None = None


class PipelineConfig(ConfigSection):
    """One run of the agentic pipeline."""

    exp_name: str
    seed: NonNegativeInt = 42
    output_dir: str = "./output"
    track_with: Literal["tensorboard", "none"] = "tensorboard"
    max_steps: PositiveInt = 40
    save_steps: NonNegativeInt = 0
    eval_steps: NonNegativeInt = 0
    resume_from_checkpoint: str | None = None
    checkpoint_config: CheckpointConfig = CheckpointConfig()

    rollout_batch_size: PositiveInt = 128
    val_batch_size: PositiveInt = 128
    sequence_length: PositiveInt = 256
    precision: Literal["float32", "bfloat16"] = "float32"

    adv_estimator: Literal["grpo"] = "grpo"
    reward_normalization: RewardNormalizationConfig = RewardNormalizationConfig()
    ppo_epochs: PositiveInt = 1
    pg_clip: float = Field(default=0.2, gt=0.0)
    loss_agg_mode: Literal["token-mean"] = "token-mean"
    entropy_loss_coef: NonNegativeFloat = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: NonNegativeFloat = 0.001

    rollout_mock: RolloutMockConfig = RolloutMockConfig()
    system_envs: dict[str, str] = {}
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    actor_infer: ActorInferConfig = ActorInferConfig()
    train_env_manager: EnvManagerConfig = EnvManagerConfig()
    val_env_manager: EnvManagerConfig = EnvManagerConfig()
    custom_envs: dict[str, CustomEnvConfig] = {"FrozenLake": CustomEnvConfig()}
    trace: TraceConfig = TraceConfig()
    align: AlignConfig = AlignConfig()

    @property
    def tags_in_use(self) -> list[str]:
        """The tags of training and validation, each once, sorted."""
        return sorted({*self.train_env_manager.tags, *self.val_env_manager.tags})

    def env_manager(self, mode: Mode) -> EnvManagerConfig:
        """The environments of training or of validation."""
        return self.train_env_manager if mode == "train" else self.val_env_manager

    def batch_size(self, mode: Mode) -> int:
        """Trajectories of one batch of training or of validation."""
        return self.rollout_batch_size if mode == "train" else self.val_batch_size

    def sampling(self, mode: Mode) -> GeneratingArgs:
        """How actions are sampled: the manager's own arguments, or else the engine's."""
        return self.env_manager(mode).generating_args or self.actor_infer.generating_args

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates that one rollout step makes."""
        return self.ppo_epochs * (self.rollout_batch_size // self.training.global_batch_size)

    @property
    def lr_decay_updates(self) -> int:
        """Optimizer updates until the learning rate has decayed; all of the run where no number was set."""
        return self.training.lr_decay_iters or self.max_steps * self.updates_per_step

    @field_validator("resume_from_checkpoint")
    @classmethod
    def _check_resume_folder(cls, folder: str | None) -> str | None:
        if folder is not None and not folder.strip():
            raise ValueError(
                "is empty; give a folder such as {output_dir}/checkpoints/step_000010, or null for a new run"
            )
        return folder

    @model_validator(mode="after")
    def _check_sampling(self) -> PipelineConfig:
        problems = sampling_problems(self)
        if problems:
            rules = "".join(f"\n  - {problem}" for problem in problems)
            raise ValueError(
                "training must sample from the policy that is trained, softmax(logits / "
                f"actor_infer.generating_args.temperature):{rules}"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> PipelineConfig:
        training = self.training
        if training.min_lr > training.lr:
            raise ValueError(f"training.min_lr {training.min_lr} is larger than training.lr {training.lr}")
        if training.lr_decay_style != "constant" and training.lr_warmup_iters >= self.lr_decay_updates:
            raise ValueError(
                f"training.lr_warmup_iters {training.lr_warmup_iters} leaves no update to decay in: the decay ends "
                f"with update {self.lr_decay_updates} (training.lr_decay_iters, or all updates of the run)"
            )
        return self

    @model_validator(mode="after")
    def _check_batches(self) -> PipelineConfig:
        for batch_key, batch_size, manager_key, manager in (
            ("rollout_batch_size", self.rollout_batch_size, "train_env_manager", self.train_env_manager),
            ("val_batch_size", self.val_batch_size, "val_env_manager", self.val_env_manager),
        ):
            envs = manager.num_env_groups * manager.group_size
            if batch_size % envs:
                raise ValueError(
                    f"{batch_key} {batch_size} is not a multiple of {manager_key}.num_env_groups "
                    f"{manager.num_env_groups} × group_size {manager.group_size} = {envs}: groups would be cut"
                )
            unknown = [tag for tag in manager.tags if tag not in self.custom_envs]
            if unknown:
                raise ValueError(f"{manager_key}.tags {unknown} are not in custom_envs {sorted(self.custom_envs)}")
        global_batch, micro_batch = self.training.global_batch_size, self.training.micro_batch_size
        if self.rollout_batch_size % global_batch:
            raise ValueError(
                f"rollout_batch_size {self.rollout_batch_size} is not a multiple of "
                f"training.global_batch_size {global_batch}"
            )
        if global_batch % micro_batch:
            raise ValueError(
                f"training.global_batch_size {global_batch} is not a multiple of "
                f"training.micro_batch_size {micro_batch}"
            )
        if self.sequence_length % self.training.sequence_multiple_of:
            raise ValueError(
                f"sequence_length {self.sequence_length} is not a multiple of training.sequence_multiple_of "
                f"{self.training.sequence_multiple_of}: the longest rows would be padded beyond it"
            )
        return self

    @model_validator(mode="after")
    def _check_layout(self) -> PipelineConfig:
        problems = layout_problems(self)
        if problems:
            rules = "".join(f"\n  - {problem}" for problem in problems)
            raise ValueError(
                f"layout {self.parallel.describe()} ({self.parallel.world_size} processes) cannot be run:{rules}"
            )
        return self


def sampling_problems(config: PipelineConfig) -> list[str]:
    """Every key by which training would sample from another policy than the one it trains; empty where none does.

    With one, the recorded log-probabilities and the trainer's own would be those of two distributions, and the ratio
    of new to old policy would not be that of the policy which sampled.
    """
    common, own = config.actor_infer.generating_args, config.train_env_manager.generating_args
    problems = []
    if own is not None and own != common:
        theirs, ours = own.model_dump(), common.model_dump()
        values = ", ".join(f"{key} {theirs[key]} instead of {ours[key]}" for key in theirs if theirs[key] != ours[key])
        problems.append(
            f"train_env_manager.generating_args differs from actor_infer.generating_args ({values}): the trainer "
            "computes with the latter; leave it out and set actor_infer.generating_args"
        )
    cuts = {"top_k": (common.top_k, 0), "top_p": (common.top_p, 1.0)}
    problems += [
        f"actor_infer.generating_args.{name} {value} cuts tokens off: the trainer's log-probabilities are those of the "
        f"softmax at `temperature`, and a truncated one would be another policy; set {off}, and {name} only in "
        "val_env_manager.generating_args"
        for name, (value, off) in cuts.items()
        if value != off
    ]
    return problems


def layout_problems(config: PipelineConfig) -> list[str]:
    """Every rule of Megatron-core that the layout breaks for this model and batch; empty where it can run."""
    model, parallel, training = config.model, config.parallel, config.training
    tp, pp, dp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
    )
    divisions = (
        ("model.num_attention_heads", model.num_attention_heads, "tensor_model_parallel_size", tp),
        ("model.num_query_groups", model.query_groups, "tensor_model_parallel_size", tp),
        ("model.ffn_hidden_size", model.ffn_size, "tensor_model_parallel_size", tp),
        ("model.num_layers", model.num_layers, "pipeline_model_parallel_size", pp),
        ("micro-batches per update", training.num_micro_batches, "data_parallel_size", dp),
    )
    problems = [
        f"{name} {value} is not a multiple of {axis} {size}" for name, value, axis, size in divisions if value % size
    ]
    if parallel.sequence_parallel and tp == 1:
        problems.append("sequence_parallel needs tensor_model_parallel_size > 1")
    if parallel.sequence_parallel and training.sequence_multiple_of % tp:
        problems.append(
            f"training.sequence_multiple_of {training.sequence_multiple_of} is not a multiple of "
            f"tensor_model_parallel_size {tp}, as sequence_parallel needs"
        )
    return problems
