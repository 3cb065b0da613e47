"""The configuration of a run as pydantic models; unknown keys are refused.

Contract: importing this module imports no torch. Top-level keys are spelled as ROLL spells them (``roll/configs``,
v0.2). A configuration is refused here wherever its fault can be known before a process starts. Its sections are in the
modules beside this one and in ``mock_scheduler.config``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from mock_scheduler.adapters.nexrl.config import DebugConfig, RolloutWorkerConfig, rollout_worker_problem
from mock_scheduler.config.align import (
    AlignConfig,
)
from mock_scheduler.config.base import (
    ConfigSection,
    Decides,
    FileName,
    Fraction,
    Mode,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from mock_scheduler.config.instruments import GraftConfig, OrderConfig, PerturbationConfig, TraceConfig
from mock_scheduler.config.layout import ParallelConfig
from mock_scheduler.config.problems import raise_keyed
from mock_scheduler.config.rollout_mock import RolloutMockConfig
from mock_scheduler.correction.config.algorithm import AlgorithmConfig, combination_problems
from mock_scheduler.layouts.layout import Workload, describe_layout_problems, emulation_limits, layout_problems
from mock_scheduler.layouts.rules.known_wrong import check_known_wrong, installed_megatron, layout_values
from mock_scheduler.support.text import bullet_list
from pipelines.config.algorithm import (
    AdvantageEstimator,
    CriticConfig,
    KlEstimator,
    KlInRewardConfig,
    LossAggMode,
    RewardNormalizationConfig,
    check_critic,
    denominator_problems,
    policy_loss_problems,
)
from pipelines.config.engine import (
    ActorInferConfig,
    GeneratingArgs,
    engine_problems,
    routing_problems,
    weights_precision_problem,
)
from pipelines.config.environments import (
    ANSWERING_TYPES,
    CustomEnvConfig,
    EnvManagerConfig,
    EnvWorkersConfig,
    check_held_out,
    env_workers_problems,
)
from pipelines.config.model import ModelConfig
from pipelines.config.text import TextConfig, text_problems
from pipelines.config.training import (
    LOSS_VALUES,
    CheckpointConfig,
    SftConfig,
    TrainingConfig,
    TrainingServiceConfig,
    check_batch_sizes,
)

# The played rollouts, their batches, and the counters of a resumed run.
_BATCHES = Decides.ROLLOUTS | Decides.TRAINING | Decides.STATE

# Of a request to a training service: a token with its values takes 33 bytes, a row's identity, tag and prompt digest
# about 100, and the head at most 8 MiB. The rest is room for columns of the batch's own.
_HEAD_BYTES, _ROW_BYTES, _TOKEN_BYTES = 16 * 2**20, 4096, 64


class PipelineConfig(ConfigSection):
    """Holds one run of the agentic pipeline; each key, or its section, states its consequences."""

    exp_name: Annotated[FileName, Decides.LABEL]
    """The run's name: the last folder of ``output_dir`` in ``configs/base.yaml``."""
    seed: Annotated[NonNegativeInt, _BATCHES] = 42
    """Of weights, environments and samples."""
    output_dir: Annotated[str, Decides.LABEL] = "./output"
    """The folder of everything that the run writes."""
    track_with: Annotated[Literal["tensorboard", "none"], Decides.NOTHING] = "tensorboard"
    """``tensorboard`` writes the metrics for TensorBoard too; ``metrics.jsonl`` is always written."""
    max_steps: Annotated[PositiveInt, Decides.TRAINING] = 40
    """Training steps, counted from 0."""
    save_steps: Annotated[NonNegativeInt, Decides.NOTHING] = 0
    """A checkpoint every so many steps; 0: none."""
    eval_steps: Annotated[NonNegativeInt, Decides.EXECUTION] = 0
    """A validation every so many steps; 0: none."""
    resume_from_checkpoint: Annotated[str | None, Decides.EXECUTION | Decides.LABEL] = None
    """The folder of the checkpoint to go on from."""
    checkpoint_config: CheckpointConfig = CheckpointConfig()

    rollout_batch_size: Annotated[PositiveInt, _BATCHES] = 128
    """Trajectories that are played for one step, in whole groups."""
    val_batch_size: Annotated[PositiveInt, Decides.ROLLOUTS | Decides.VALIDATION] = 128
    """Trajectories of one validation."""
    sequence_length: Annotated[PositiveInt, Decides.ROLLOUTS | Decides.TRAINING] = 256
    """Most tokens of a row."""
    rollout_form: Annotated[Literal["trajectory", "step"], _BATCHES] = "trajectory"
    """``trajectory``: a row for each episode; ``step``: a row for each turn, the history before it as its prompt."""
    precision: Annotated[Literal["float32", "bfloat16", "float64"], Decides.BITS | Decides.STATE] = "float32"
    """Of parameters and activations; ``float64`` covers the whole step."""

    adv_estimator: Annotated[AdvantageEstimator, Decides.TRAINING] = "grpo"
    """How advantages are made of rewards; ``gae`` has a critic."""
    reward_normalization: Annotated[RewardNormalizationConfig, Decides.TRAINING] = RewardNormalizationConfig()
    reward_clip: Annotated[float | None, Decides.TRAINING] = Field(default=None, gt=0.0)
    """Rewards are cut to ± this; ``null``: not cut."""
    advantage_clip: Annotated[float | None, Decides.TRAINING] = Field(default=None, gt=0.0)
    """Advantages are cut to ± this; ``null``: not cut."""
    whiten_advantages: Annotated[bool, Decides.TRAINING] = False
    """Advantages of a batch get mean 0 and deviation 1."""
    gamma: Annotated[Fraction, Decides.TRAINING] = 1.0
    """Discount: of turns, or of tokens with ``gae`` and ``reinforce_plus_plus``."""
    lambd: Annotated[Fraction, Decides.TRAINING] = 0.95
    """Of ``gae``: weight of later errors of the critic."""
    kl_in_reward: Annotated[KlInRewardConfig, Decides.TRAINING] = KlInRewardConfig()
    critic: Annotated[CriticConfig, Decides.TRAINING] = CriticConfig()
    ppo_epochs: Annotated[PositiveInt, Decides.TRAINING] = 1
    """Passes over the batch of a step."""
    pg_clip: Annotated[float, Decides.TRAINING] = Field(default=0.2, gt=0.0)
    """The ratio of new to old policy is cut to 1 ± this."""
    pg_clip_high: Annotated[float | None, Decides.TRAINING] = Field(default=None, gt=0.0)
    """The upper cut, where it differs from ``pg_clip``."""
    dual_clip: Annotated[float | None, Decides.TRAINING] = Field(default=None, gt=1.0)
    """With a negative advantage the loss is cut at this many times its size; ``null``: not cut."""
    policy_loss: Annotated[Literal["ppo", "gmpo"], Decides.TRAINING] = "ppo"
    """``ppo``: the ratio of each token; ``gmpo``: the geometric mean of a sequence's."""
    loss_agg_mode: Annotated[LossAggMode, Decides.TRAINING] = "token-mean"
    """The mean that the loss is: over tokens, over sequences of their tokens' sums, or of their means."""
    entropy_loss_coef: Annotated[NonNegativeFloat, Decides.TRAINING] = 0.0
    """Weight of the entropy, which is taken off the loss."""
    entropy_loss_coef_final: Annotated[NonNegativeFloat | None, Decides.TRAINING] = None
    """The weight moves linearly to this one, over the updates of the learning rate's decay; ``null``: it stays."""
    use_kl_loss: Annotated[bool, Decides.TRAINING] = False
    """Adds the estimated KL to the reference policy to the loss."""
    kl_loss_coef: Annotated[NonNegativeFloat, Decides.TRAINING] = 0.001
    """Weight of that KL."""
    kl_loss_estimator: Annotated[KlEstimator, Decides.TRAINING] = "k3"
    """Estimate of that KL (joschu.net/blog/kl-approx)."""
    algorithm: Annotated[AlgorithmConfig, Decides.TRAINING] = AlgorithmConfig()

    rollout_mock: RolloutMockConfig = RolloutMockConfig()
    system_envs: Annotated[dict[str, str], Decides.OUTSIDE] = Field(default={})
    """Variables of every process, set before Python starts; the launchers export them."""
    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig = TrainingConfig()
    sft: SftConfig = SftConfig()
    actor_infer: ActorInferConfig = ActorInferConfig()
    train_env_manager: EnvManagerConfig = EnvManagerConfig()
    val_env_manager: Annotated[EnvManagerConfig, Decides.VALIDATION] = EnvManagerConfig()
    env_workers: EnvWorkersConfig = EnvWorkersConfig()
    custom_envs: Annotated[dict[str, CustomEnvConfig], Decides.ROLLOUTS] = Field(
        default={"FrozenLake": CustomEnvConfig()}
    )
    """Environments by a tag of your choice."""
    trace: TraceConfig = TraceConfig()
    debug: DebugConfig = DebugConfig()
    rollout_worker: RolloutWorkerConfig = RolloutWorkerConfig()
    training_service: TrainingServiceConfig = TrainingServiceConfig()
    align: AlignConfig = AlignConfig()
    order: OrderConfig = OrderConfig()
    perturbation: PerturbationConfig = PerturbationConfig()
    graft: GraftConfig = GraftConfig()

    @property
    def samples(self) -> bool:
        """Whether a step may be played here, in environments with the policy: else all are read or replayed."""
        replays = self.rollout_mock.modes_in_use == {"mock"}
        return not replays and not self.rollout_worker.reads_dump and self.training_service.url is None

    @property
    def engine_dtype(self) -> Literal["float32", "bfloat16"]:
        """The type that an engine of rollouts computes in: the one that its weights are rounded to, else training's."""
        return "bfloat16" if "bfloat16" in (self.actor_infer.weights_precision, self.precision) else "float32"

    @property
    def tags_in_use(self) -> list[str]:
        """Returns the tags of training and validation, each once, sorted."""
        return sorted({*self.train_env_manager.tags, *self.val_env_manager.tags})

    def env_manager(self, mode: Mode) -> EnvManagerConfig:
        """Returns the environments of training or of validation."""
        return self.train_env_manager if mode == "train" else self.val_env_manager

    def batch_size(self, mode: Mode) -> int:
        """Returns trajectories of one batch of training or of validation."""
        return self.rollout_batch_size if mode == "train" else self.val_batch_size

    def sampling(self, mode: Mode) -> GeneratingArgs:
        """How actions are sampled: the manager's own arguments, or else the engine's."""
        return self.env_manager(mode).generating_args or self.actor_infer.generating_args

    @property
    def max_request_bytes(self) -> int:
        """Returns the longest body that a training service of this configuration reads."""
        own = self.training_service.max_request_bytes
        turns = max(env.max_steps for env in self.custom_envs.values()) if self.rollout_form == "step" else 1
        # Routed experts may come with each token, in int32 at most.
        experts = 4 * sum(self.model.moe_layers) * self.model.moe_router_topk
        row_bytes = _ROW_BYTES + (_TOKEN_BYTES + experts) * self.sequence_length
        return own or _HEAD_BYTES + self.rollout_batch_size * turns * row_bytes

    @property
    def updates_per_step(self) -> int:
        """Counts optimizer updates of one rollout step."""
        return self.ppo_epochs * (self.rollout_batch_size // self.training.global_batch_size)

    @property
    def first_policy_step(self) -> int:
        """The first step with training of the policy: before it the critic is trained alone."""
        return self.critic.warmup_steps if self.adv_estimator == "gae" else 0

    def lr_decay_updates(self, *, first_step: int = 0) -> int:
        """Updates until a model's rate has decayed; unset, all updates of the model from ``first_step`` on.

        Those of the supervised start have a rate of their own, and do not count.
        """
        num_steps = self.max_steps - self.sft.steps - first_step
        # A replay may end within the supervised start.
        return self.training.lr_decay_iters or max(num_steps, 1) * self.updates_per_step

    def sft_rate(self, update: int) -> float:
        """Returns the learning rate of an update of the supervised start, from 0."""
        num_updates = self.sft.steps * (self.rollout_batch_size // self.training.global_batch_size)
        return self.sft.lr + (self.training.lr - self.sft.lr) * update / num_updates

    @field_validator("resume_from_checkpoint")
    @classmethod
    def _check_resume_folder(cls, folder: str | None) -> str | None:
        if folder is not None and not folder.strip():
            raise ValueError(
                "is empty; give a folder such as {output_dir}/checkpoints/step_000010, or null for a new run"
            )
        return folder

    @model_validator(mode="after")
    def _check_retention(self) -> PipelineConfig:
        mock = self.rollout_mock
        records = bool(mock.modes_in_use & {"dump", "cache"})
        if records and mock.retention.keep_last is not None and self.save_steps == 0:
            origin = f" ({mock.origin})" if mock.origin else ""
            raise ValueError(
                f"rollout_mock.retention.keep_last {mock.retention.keep_last} needs save_steps > 0{origin}: recorded "
                "steps are removed only where a saved checkpoint lets a replay start after them, and without one none "
                "ever would be. Set save_steps, or leave keep_last out"
            )
        return self

    @model_validator(mode="after")
    def _check_rollout_worker(self) -> PipelineConfig:
        problem = rollout_worker_problem(self.rollout_worker, self.rollout_mock.modes_in_use)
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_weights_precision(self) -> PipelineConfig:
        problem = weights_precision_problem(
            self.actor_infer,
            precision=self.precision,
            worker_type=self.rollout_worker.type,
            modes_in_use=self.rollout_mock.modes_in_use,
        )
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _check_engine(self) -> PipelineConfig:
        problems = engine_problems(self.actor_infer) if self.samples else []
        problems += routing_problems(self.actor_infer, self.model) if self.samples else []
        if problems:
            raise ValueError(f"the rollout engine:{bullet_list(problems, limit=None)}")
        return self

    @model_validator(mode="after")
    def _check_env_workers(self) -> PipelineConfig:
        managers = {"train_env_manager": self.train_env_manager}
        if self.eval_steps:
            managers["val_env_manager"] = self.val_env_manager
        problems = env_workers_problems(self.env_workers, managers) if self.samples else []
        if problems:
            raise ValueError(f"the workers of environments:{bullet_list(problems, limit=None)}")
        return self

    @model_validator(mode="after")
    def _check_training_service(self) -> PipelineConfig:
        if self.training_service.url is None:
            return self
        problems = service_client_problems(self)
        if problems:
            raise ValueError(
                "training_service.url: this run's model is in the service, which trains and traces it there:"
                f"{bullet_list(problems, limit=None)}"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> PipelineConfig:
        problems = sampling_problems(self)
        if problems:
            raise ValueError(
                "training must sample from the policy that is trained, softmax(logits / "
                f"actor_infer.generating_args.temperature):{bullet_list(problems, limit=None)}"
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> PipelineConfig:
        training = self.training
        if training.min_lr > training.lr:
            raise ValueError(f"training.min_lr {training.min_lr} is larger than training.lr {training.lr}")
        if training.lr_decay_style != "constant" and training.lr_warmup_iters >= self.lr_decay_updates():
            raise ValueError(
                f"training.lr_warmup_iters {training.lr_warmup_iters} leaves no update to decay in: the decay ends "
                f"with update {self.lr_decay_updates()} (training.lr_decay_iters, or all updates of the run)"
            )
        check_critic(self.critic, estimator=self.adv_estimator, min_lr=training.min_lr, max_steps=self.max_steps)
        return self

    @model_validator(mode="after")
    def _check_policy_loss(self) -> PipelineConfig:
        correction = self.algorithm.rollout_correction
        problems = policy_loss_problems(
            self.policy_loss,
            self.loss_agg_mode,
            is_per_token=self.training.calculate_per_token_loss,
            shares_sequences=self.parallel.context_parallel_size > 1,
            packs_sequences=self.training.sequence_packing,
            has_rows_of_turns=self.rollout_form == "step",
            has_dual_clip=self.dual_clip is not None,
            is_bypass=correction is not None and correction.spec.bypass,
        )
        routers = self.model.moe_aux_loss_coeff > 0 or self.model.moe_z_loss_coeff > 0
        if correction is not None and correction.rs_denominator == "kept" and routers:
            problems.append(
                "algorithm.rollout_correction.rs_denominator kept: the routers' losses (model.moe_aux_loss_coeff, "
                "moe_z_loss_coeff) are means over all response tokens; use original"
            )
        if correction is not None:
            problems += denominator_problems(correction.spec, self.loss_agg_mode)
        if problems:
            raise ValueError(f"the loss cannot be computed so:{bullet_list(problems, limit=None)}")
        return self

    @model_validator(mode="after")
    def _check_rollout_correction(self) -> PipelineConfig:
        problems = combination_problems(
            self.algorithm,
            adv_estimator=self.adv_estimator,
            reward_normalization=self.reward_normalization.method,
            dual_clip=self.dual_clip,
            pg_clip_high=self.pg_clip_high,
        )
        if problems:
            raise_keyed(type(self).__name__, problems, dict(self))
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
        check_held_out(self.custom_envs, train_tags=self.train_env_manager.tags, val_tags=self.val_env_manager.tags)
        check_batch_sizes(
            self.training, rollout_batch_size=self.rollout_batch_size, sequence_length=self.sequence_length
        )
        return self

    @model_validator(mode="after")
    def _check_sft(self) -> PipelineConfig:
        problems = sft_problems(self)
        if problems:
            raise ValueError(f"the supervised start:{bullet_list(problems, limit=None)}")
        return self

    @model_validator(mode="after")
    def _check_text(self) -> PipelineConfig:
        problems = text_problems(self.text, self.model, self.actor_infer, self.custom_envs, tags=self.tags_in_use)
        if problems:
            raise ValueError(f"rollouts of text:{bullet_list(problems, limit=None)}")
        return self

    @model_validator(mode="after")
    def _check_transformer_engine(self) -> PipelineConfig:
        if self.model.transformer_impl == "local":
            return self
        impl = f"model.transformer_impl {self.model.transformer_impl}"
        if self.precision == "float64":
            raise ValueError(
                f"{impl} with precision float64: TransformerEngine has no kernels for it; set "
                "model.transformer_impl=local, or another precision"
            )
        if self.actor_infer.use_kv_cache and self.rollout_mock.modes_in_use != {"mock"}:
            raise ValueError(
                f"{impl} with actor_infer.use_kv_cache true: the engine keeps keys and values of local layers alone; "
                "set actor_infer.use_kv_cache=false, or model.transformer_impl=local"
            )
        return self

    def _workload(self) -> Workload:
        """Returns the facts for a layout's rules."""
        training = self.training
        together = training.recompute_num_layers if training.recompute_granularity == "full" else None
        is_uniform = training.recompute_method == "uniform"
        return Workload(
            model=self.model,
            num_micro_batches=None if self.rollout_form == "step" else training.num_micro_batches,
            sequence_multiple_of=training.sequence_multiple_of,
            averages_micro_batches=not training.calculate_per_token_loss,
            layers_per_recomputation=together if together and is_uniform else 1,
            layers_of_block_recomputation=together if together and not is_uniform else 0,
        )

    @model_validator(mode="after")
    def _check_layout(self) -> PipelineConfig:
        problems = layout_problems(self.parallel, self._workload())
        if problems:
            raise ValueError(describe_layout_problems(self.parallel, problems))
        values = layout_values(self.parallel, self.model, self.training, loss_values=LOSS_VALUES)
        check_known_wrong(self.parallel, values, version=installed_megatron())
        return self

    @model_validator(mode="after")
    def _check_emulated_order(self) -> PipelineConfig:
        emulated = self.order.emulate
        if emulated is None:
            return self
        problems = list(emulation_limits(emulated, self.model, self.training))
        if self.parallel.world_size > 1:
            problems.append(
                f"parallel {self.parallel.describe()}: one process follows the order of several; set it to 1"
            )
        if problems:
            raise ValueError(
                f"order.emulate {emulated.describe()} cannot be followed by one process:"
                f"{bullet_list(problems, limit=None)}"
            )
        problems = layout_problems(emulated, self._workload())
        if problems:
            raise ValueError(f"order.emulate: {describe_layout_problems(emulated, problems)}")
        return self


def service_client_problems(config: PipelineConfig) -> list[str]:
    """Lists keys by which a client would do the work of its training service."""
    asked = {
        "save_steps": (config.save_steps, 0),
        "eval_steps": (config.eval_steps, 0) if config.rollout_mock.modes_in_use != {"mock"} else (0, 0),
        "resume_from_checkpoint": (config.resume_from_checkpoint, None),
        "sft.steps": (config.sft.steps, 0),
        "trace.level": (config.trace.level, "off"),
        "trace.operations": (config.trace.operations, False),
        "order.emulate": (config.order.emulate and config.order.emulate.describe(), None),
        "order.ordered_reductions": (config.order.ordered_reductions, False),
        "perturbation.seed": (config.perturbation.seed, None),
        "graft.trace_dir": (config.graft.trace_dir, None),
        "parallel": (config.parallel.describe(), ParallelConfig().describe()),
    }
    problems = [f"{key} is {value}; set it to {only}" for key, (value, only) in asked.items() if value != only]
    if config.rollout_mock.modes_in_use != {"mock"} and config.rollout_worker.type != "mock":
        problems.append(
            "its rollouts must be recorded ones: set rollout_mock.enable=true and rollout_mock.mode=mock, or "
            "rollout_worker.type=mock"
        )
    return problems


def sft_problems(config: PipelineConfig) -> list[str]:
    """Lists obstacles to a supervised start."""
    sft = config.sft
    if sft.steps == 0:
        return []
    problems = []
    silent = [tag for tag in config.train_env_manager.tags if config.custom_envs[tag].env_type not in ANSWERING_TYPES]
    if silent:
        problems.append(
            f"train_env_manager.tags {', '.join(silent)}: environments of type "
            f"{' and '.join(sorted(ANSWERING_TYPES))} alone know answers to train on; set sft.steps to 0"
        )
    # Its values are the frozen weights of the run's beginning, which no rollout is sampled from here.
    if config.use_kl_loss or config.kl_in_reward.coef > 0:
        problems.append(
            "use_kl_loss and kl_in_reward pull towards the weights from before it; leave them out, or make the start "
            "a run of its own, export its checkpoint with `mock-scheduler export-hf`, and begin from that"
        )
    if config.model.moe_router_replay == "replay":
        problems.append("model.moe_router_replay replay: given answers have no routed experts; set off or record")
    if config.adv_estimator == "gae":
        problems.append("adv_estimator gae: a critic has none; choose another estimator, or set sft.steps to 0")
    return problems


def sampling_problems(config: PipelineConfig) -> list[str]:
    """Lists keys by which training would sample from another policy than the one it trains."""
    # With one, the recorded log-probabilities and the trainer's own would belong to two distributions, and the ratio of
    # new to old policy would not start from the sampling policy.
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
