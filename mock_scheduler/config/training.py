"""The ``training`` section: micro-batches, computation options, optimizer and schedule, as Megatron names them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mock_scheduler.config.base import ConfigSection, NonNegativeFloat, NonNegativeInt, PositiveInt


class TrainingConfig(ConfigSection):
    """Batching, computation options, optimizer and schedule; batch sizes count trajectories.

    ``batching``: ``fixed`` makes micro-batches of ``micro_batch_size`` rows; ``dynamic`` of as many rows as fit into
    ``max_tokens_per_micro_batch``, padding included. ``sequence_packing`` puts rows one after another into lines of
    that many tokens, which attend within themselves and count positions from 0; one line is a micro-batch.
    ``calculate_per_token_loss``: the loss is divided by the update's tokens; false is Megatron's other form, the mean
    over micro-batches of each one's mean.
    ``lr_warmup_iters``, ``lr_decay_iters``: optimizer updates; a decay that is not given ends with the run's last one.
    """

    micro_batch_size: PositiveInt = 32
    global_batch_size: PositiveInt = 128
    sequence_multiple_of: PositiveInt = 8
    batching: Literal["fixed", "dynamic"] = "fixed"
    sequence_packing: bool = False
    max_tokens_per_micro_batch: PositiveInt | None = None
    calculate_per_token_loss: bool = True
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: PositiveInt = 1
    accumulate_allreduce_grads_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
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
    def has_token_budget(self) -> bool:
        """Whether micro-batches are made by number of tokens, and so follow from the data."""
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
