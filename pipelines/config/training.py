"""Has the sections ``training`` (Megatron's names), ``checkpoint_config``, ``training_service``; imports no torch."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeFloat, NonNegativeInt, PositiveInt

#: The policy's loss function returns a sum, its number of tokens and metrics (``pipelines.megatron.trainer``).
LOSS_VALUES = 3


class TrainingConfig(ConfigSection):
    """Holds batching, computation options, optimizer and schedule; batch sizes count trajectories.

    ``lr_warmup_iters``, ``lr_decay_iters``: optimizer updates; an unset decay ends with the run's last one.
    ``on_no_signal``: of an update whose every gradient is exactly 0, or whose every token is rejected. ``skip`` leaves
    weights, moments and step counts alone; ``update`` lets moments and weight decay move the weights.
    """

    decides: ClassVar = Decides.TRAINING

    micro_batch_size: Annotated[PositiveInt, Decides.BITS] = 32
    """Rows of a micro-batch; fewer accumulate gradients over more of them."""
    global_batch_size: PositiveInt = 128
    """Trajectories of one optimizer update."""
    sequence_multiple_of: Annotated[PositiveInt, Decides.BITS] = 8
    """Lines are padded to a multiple of this; ``sequence_length`` must be one too."""
    batching: Annotated[Literal["fixed", "dynamic"], Decides.BITS] = "fixed"
    """``dynamic``: rows sorted by length within an update, as many as ``max_tokens_per_micro_batch`` has room for with
    their padding.
    """
    sequence_packing: Annotated[bool, Decides.BITS] = False
    """Rows stand one after another in lines of ``max_tokens_per_micro_batch`` tokens; a row attends to itself alone,
    its positions start at 0, and one line is a micro-batch.
    """
    max_tokens_per_micro_batch: Annotated[PositiveInt | None, Decides.BITS] = None
    """The room of a micro-batch with ``dynamic`` or packing; at least ``sequence_length``."""
    calculate_per_token_loss: bool = True
    """The loss is divided by the update's tokens; ``false``: Megatron's other form, the mean over micro-batches of each
    one's mean. Logged metrics are means over tokens with either.
    """
    recompute_granularity: Annotated[Literal["none", "selective", "full"], Decides.EXECUTION] = "none"
    """Activations are computed anew in the backward pass: none, those of attention, or whole layers."""
    recompute_method: Annotated[Literal["uniform", "block"], Decides.EXECUTION] = "uniform"
    """With ``full``: every layer in chunks, or the first layers alone."""
    recompute_num_layers: Annotated[PositiveInt, Decides.EXECUTION] = 1
    """Layers of a chunk, or how many first layers."""
    accumulate_allreduce_grads_in_fp32: Annotated[bool, Decides.BITS] = True
    """Main gradients of bfloat16 parameters in float32."""
    overlap_grad_reduce: Annotated[bool, Decides.EXECUTION] = False
    """Gradients are reduced beside the backward pass; needs CUDA."""
    overlap_param_gather: Annotated[bool, Decides.EXECUTION] = False
    """Parameters are gathered beside the forward pass; needs CUDA."""
    use_distributed_optimizer: Annotated[bool, Decides.ORDER] = True
    """Optimizer state split over dp."""
    lr: float = Field(default=1e-3, gt=0.0)
    """Learning rate."""
    min_lr: NonNegativeFloat = 0.0
    """The schedule's last one."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Form of the schedule."""
    lr_warmup_iters: NonNegativeInt = 0
    lr_decay_iters: PositiveInt | None = None
    weight_decay: NonNegativeFloat = 0.0
    """Adam's, decoupled."""
    adam_beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Gradients are cut to this norm; 0: not cut."""
    on_no_signal: Literal["skip", "update"] = "skip"

    @property
    def has_token_budget(self) -> bool:
        """Says whether micro-batches are made by number of tokens, and so follow from the data."""
        return self.batching == "dynamic" or self.sequence_packing

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches of one update, over all data-parallel ranks; ``None`` where they follow from the data."""
        return None if self.has_token_budget else self.global_batch_size // self.micro_batch_size

    @model_validator(mode="after")
    def _check_batching(self) -> TrainingConfig:
        if self.sequence_packing and self.batching == "dynamic":
            raise ValueError(
                "sequence_packing packs by max_tokens_per_micro_batch itself; leave batching at fixed with it"
            )
        if self.has_token_budget and self.max_tokens_per_micro_batch is None:
            key = "sequence_packing" if self.sequence_packing else "batching dynamic"
            raise ValueError(f"{key} needs max_tokens_per_micro_batch, at least sequence_length")
        if not self.has_token_budget and self.max_tokens_per_micro_batch is not None:
            raise ValueError(
                "max_tokens_per_micro_batch has no effect with batching fixed; set batching=dynamic or "
                "sequence_packing=true, or leave it out"
            )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce")
        return self

    @model_validator(mode="after")
    def _check_recomputation(self) -> TrainingConfig:
        values = {
            "recompute_method": (self.recompute_method, "uniform"),
            "recompute_num_layers": (self.recompute_num_layers, 1),
        }
        changed = ", ".join(f"{name} {value}" for name, (value, default) in values.items() if value != default)
        if changed and self.recompute_granularity != "full":
            raise ValueError(
                f"recompute_granularity {self.recompute_granularity} leaves these keys without effect: {changed}; set "
                "recompute_granularity=full, which alone takes whole layers, or leave them out"
            )
        return self


class SftConfig(ConfigSection):
    """Holds a supervised start: the first ``steps`` steps of the run train on the environments' own answers.

    The loss of a step is the mean of -log p over the tokens of its answers; its rows are ``rollout_batch_size`` other
    questions of ``train_env_manager.tags``, recorded and replayed as any rollout. ``lr``: of the first update; it moves
    linearly to ``training.lr``, whose schedule begins with the first step after it.
    """

    decides: ClassVar = Decides.TRAINING

    steps: Annotated[NonNegativeInt, Decides.ROLLOUTS | Decides.TRAINING | Decides.STATE] = 0
    """First steps of the run; 0: none."""
    lr: float = Field(default=1e-3, gt=0.0)

    def covers(self, step: int) -> bool:
        """Says whether a step is supervised."""
        return step < self.steps


class CheckpointConfig(ConfigSection):
    """Where checkpoints go; ``None`` is ``{output_dir}/checkpoints``."""

    decides: ClassVar = Decides.LABEL

    output_dir: str | None = None
    """``null``: ``{output_dir}/checkpoints``."""


def check_batch_sizes(training: TrainingConfig, *, rollout_batch_size: int, sequence_length: int) -> None:
    """Refuses batch sizes and lengths that do not divide each other, or a budget too small for a row.

    Raises:
        ValueError: names the keys with their values.
    """
    global_batch, micro_batch = training.global_batch_size, training.micro_batch_size
    budget, multiple = training.max_tokens_per_micro_batch, training.sequence_multiple_of
    if rollout_batch_size % global_batch:
        raise ValueError(
            f"rollout_batch_size {rollout_batch_size} is not a multiple of training.global_batch_size {global_batch}"
        )
    if not training.has_token_budget and global_batch % micro_batch:
        raise ValueError(
            f"training.global_batch_size {global_batch} is not a multiple of training.micro_batch_size {micro_batch}"
        )
    if budget is not None and budget < sequence_length:
        raise ValueError(
            f"training.max_tokens_per_micro_batch {budget} is smaller than sequence_length {sequence_length}: "
            "the longest rows would fit into no micro-batch"
        )
    if budget is not None and budget % multiple:
        raise ValueError(
            f"training.max_tokens_per_micro_batch {budget} is not a multiple of training.sequence_multiple_of "
            f"{multiple}"
        )
    if sequence_length % multiple:
        raise ValueError(
            f"sequence_length {sequence_length} is not a multiple of training.sequence_multiple_of {multiple}: the "
            "longest rows would be padded beyond it"
        )


class TrainingServiceConfig(ConfigSection):
    """Holds training in another process, behind HTTP.

    ``service_file``: of a client, the service's ``service.json``; ``null``: that in ``output_dir``.
    ``max_request_bytes``: of a service, the longest body that it reads; ``null``: as batch size and sequence length
    need, with room for small columns; set it for large columns of your own.
    ``timeout_s``: how long a client waits for one answer, so for a whole step, and a service for the client's next
    request, so for a whole rollout, before it ends.
    """

    decides: ClassVar = Decides.NOTHING

    # The service trains, in a layout of its own; client and service compare their contracts when they meet.
    url: Annotated[str | None, Decides.OUTSIDE] = None
    """Of a client: the address of a service, as ``http://127.0.0.1:8300``; ``null``: this run trains itself."""
    service_file: str | None = None
    token_variable: str | None = None
    """Of a client: the name of the variable with the service's token, in the place of ``service_file``."""
    host: str = "127.0.0.1"
    """The service listens there."""
    port: int = Field(default=0, ge=0, le=65535)
    """The service listens there; 0 takes a free one, to be found in ``{output_dir}/service.json``."""
    max_request_bytes: PositiveInt | None = None
    timeout_s: float = Field(default=600.0, gt=0.0)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and "@" in url:
            raise ValueError("has a user or a password in it; give http://HOST:PORT as the service prints it")
        if url is not None and not re.fullmatch(r"https?://[!-.0-~]+(/[!-~]*)?", url):
            raise ValueError(f"is {url!r}, expected http://HOST:PORT as the service prints it; null trains in this run")
        return None if url is None else url.rstrip("/")

    @field_validator("token_variable")
    @classmethod
    def _check_variable(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("is no name of a variable; it takes the name, and the variable has the token")
        return name

    @model_validator(mode="after")
    def _check_token(self) -> TrainingServiceConfig:
        named = {"service_file": self.service_file, "token_variable": self.token_variable}
        given = [key for key, value in named.items() if value is not None]
        if len(given) > 1:
            raise ValueError("service_file and token_variable are two places for one token; give one of them")
        if given and self.url is None:
            raise ValueError(f"{given[0]} has no effect without url, the address of the service")
        return self
