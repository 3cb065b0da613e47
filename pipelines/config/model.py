"""Has the ``model`` section: the policy, as fields of Megatron's ``TransformerConfig`` and ``GPTModel``; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from mock_scheduler.adapters.huggingface.config import read_model
from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeFloat, PositiveInt, is_same_value
from mock_scheduler.config.problems import raise_keyed
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list

PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


def _as_integer(value: object) -> object:
    """Writes a whole number one way: recordings and checkpoints compare 10000 with 10000, and not with 10000.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Base = Annotated[PositiveInt | PositiveFloat, BeforeValidator(_as_integer)]


class RopeScalingConfig(ConfigSection):
    """Llama 3's longer waves: those beyond ``original_max_position_embeddings`` / ``low_freq_factor`` are ``factor``
    times as long, those below it / ``high_freq_factor`` stay, and between the two it goes over smoothly.
    """

    factor: Base = 8
    """Of the longest waves."""
    low_freq_factor: Base = 1
    """Bounds the longest waves."""
    high_freq_factor: Base = 4
    """Bounds the waves that stay."""
    original_max_position_embeddings: PositiveInt = 8192
    """Positions that the checkpoint was first trained on."""

    @model_validator(mode="after")
    def _check_factors(self) -> RopeScalingConfig:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must be larger than low_freq_factor {self.low_freq_factor}"
            )
        return self


class ModelConfig(ConfigSection):
    """The policy; the critic of ``adv_estimator: gae`` has the same layers and a value head.

    ``hf_checkpoint``: a folder of Hugging Face's that the model begins with; its ``config.json`` gives the shape
    (``docs/huggingface.md``). ``kv_channels``: elements of a head; unset, hidden size / heads.
    ``attention_backend``: the kernel of TransformerEngine's attention; the local layers have one of their own.
    ``num_moe_experts``: so many experts are in the MLP's place in the layers of ``moe_layer_freq`` (1: all, n: each
    n-th from the first, or one 0 or 1 per layer); the ``moe_*`` keys count only then.
    ``moe_router_load_balancing_type``: ``aux_loss`` balances the tokens of a micro-batch, and so depends on its choice
    of rows; ``seq_aux_loss`` balances each row's own, and does not.
    ``moe_router_replay``: ``record`` keeps the experts that the policy chooses for its old log-probabilities, and has
    them chosen again in the step's updates; ``replay`` has the batch's ``routed_experts`` chosen in every pass over it.
    ``moe_router_impl``: ``layout_invariant`` is Megatron's router with padding left out of losses and counters and
    with losses weighted by response tokens, in any layout; ``megatron`` is Megatron's own, faults included.
    """

    # The policy samples the rollouts, is trained, and its tensors are a checkpoint's.
    decides: ClassVar = Decides.ROLLOUTS | Decides.TRAINING | Decides.STATE

    # Only a place: what its files hold is a field of the contract, ``initial_weights``.
    hf_checkpoint: Annotated[str | None, Decides.LABEL] = None
    num_layers: PositiveInt = 2
    """Transformer layers."""
    hidden_size: PositiveInt = 64
    """Width of a layer's input."""
    num_attention_heads: PositiveInt = 4
    """Heads of attention."""
    num_query_groups: PositiveInt | None = None
    """Heads of keys and values; ``null``: as many as heads."""
    kv_channels: PositiveInt | None = None
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the MLP; ``null``: four times ``hidden_size``."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of norm."""
    layernorm_epsilon: float = 1e-5
    """Added to a norm's variance."""
    swiglu: bool = True
    """Gated SiLU in the MLP; false: GELU."""
    add_bias_linear: bool = False
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """Biases of queries, keys and values alone."""
    qk_layernorm: bool = False
    """Norms of queries and keys."""
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Rotary, or learned positions."""
    rotary_base: Base = 10000
    """Base of the rotary waves; may be a fraction."""
    rope_scaling: RopeScalingConfig | None = None
    """Longer waves are stretched; ``null``: none."""
    untie_embeddings_and_output_weights: bool = True
    """Output weights of their own."""
    init_method_std: float = Field(default=0.02, gt=0.0)
    """Deviation of initial weights."""
    vocab_size: PositiveInt | None = None
    """``null``: the environments' own."""
    make_vocab_size_divisible_by: Annotated[PositiveInt, Decides.BITS] = 1
    """Padding of the vocabulary, times tp."""
    # The two name a layer's parameters differently, and a checkpoint has the names.
    transformer_impl: Annotated[Literal["local", "transformer_engine"], Decides.BITS | Decides.STATE] = "local"
    """Whose layers compute."""
    attention_backend: Annotated[Literal["auto", "flash", "fused", "unfused"], Decides.BITS] = "auto"

    num_moe_experts: PositiveInt | None = None
    moe_layer_freq: PositiveInt | list[Literal[0, 1]] = 1
    """1: all layers have experts, n: each n-th from the first, or one 0 or 1 per layer."""
    moe_ffn_hidden_size: PositiveInt | None = None
    """Inner width of an expert; ``null``: the MLP's."""
    moe_shared_expert_intermediate_size: PositiveInt | None = None
    """Inner width of the expert that every token has; ``null``: none."""
    moe_shared_expert_gate: bool = False
    """That expert's output is weighed by a gate."""
    moe_router_topk: PositiveInt = 2
    """Experts of a token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Of the router's logits."""
    moe_router_pre_softmax: bool = False
    """Softmax before the choice, instead of over the chosen."""
    moe_router_topk_scaling_factor: float | None = Field(default=None, gt=0.0)
    """Factor of the chosen experts' weights."""
    # The router's losses and the rate of its biases are part of training alone: no sample follows from them.
    moe_router_load_balancing_type: Annotated[Literal["none", "aux_loss", "seq_aux_loss"], Decides.TRAINING] = "none"
    moe_aux_loss_coeff: Annotated[NonNegativeFloat, Decides.TRAINING] = 0.0
    """Weight of the balancing loss."""
    moe_z_loss_coeff: Annotated[NonNegativeFloat, Decides.TRAINING] = 0.0
    """Weight of the router's z-loss."""
    moe_router_enable_expert_bias: bool = False
    """A bias of each expert takes part in the choice, and follows the load."""
    moe_router_bias_update_rate: Annotated[NonNegativeFloat, Decides.TRAINING] = 1e-3
    """Step of these biases."""
    moe_router_replay: Annotated[Literal["off", "record", "replay"], Decides.TRAINING] = "off"
    moe_router_impl: Annotated[Literal["layout_invariant", "megatron"], Decides.BITS] = "layout_invariant"

    @property
    def query_groups(self) -> int:
        """Number of key/value groups; unset, the number of heads."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Returns elements of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        """Returns the inner width of the MLP; unset, four times the hidden size."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Returns the inner width of one expert; unset, the MLP's."""
        return self.moe_ffn_hidden_size or self.ffn_size

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """True for each layer that has experts."""
        if self.num_moe_experts is None:
            return (False,) * self.num_layers
        if isinstance(self.moe_layer_freq, int):
            return tuple(layer % self.moe_layer_freq == 0 for layer in range(self.num_layers))
        return tuple(bool(has_experts) for has_experts in self.moe_layer_freq)

    @model_validator(mode="before")
    @classmethod
    def _read_hf_checkpoint(cls, values: Any) -> Any:  # noqa: ANN401 - whatever stands at the key
        """Takes the shape from a Hugging Face checkpoint; refuses keys that contradict it."""
        folder = values.get("hf_checkpoint") if isinstance(values, Mapping) else None
        if not isinstance(folder, str):
            return values
        try:
            fields = read_model(Path(folder).expanduser()).fields
        except ConfigError as error:
            raise_keyed(cls.__name__, [("hf_checkpoint", str(error))], values)
        given = {name: value for name, value in values.items() if value is not None}
        problems = [
            (name, f"is {given[name]!r}, and {folder}/config.json has {value!r}; leave it out, or set the checkpoint's")
            for name, value in fields.items()
            if name in given and not is_same_value(given[name], value)
        ]
        if problems:
            raise_keyed(cls.__name__, problems, values)
        return {**values, **fields}

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; "
                "set kv_channels where a head has another size than their quotient"
            )
        if self.num_attention_heads % self.query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_query_groups {self.query_groups}"
            )
        if self.rope_scaling is not None and self.position_embedding_type != "rope":
            raise ValueError(f"rope_scaling has no effect with position_embedding_type {self.position_embedding_type}")
        if self.position_embedding_type == "rope" and self.kv_channels is not None and self.kv_channels % 2:
            raise ValueError(
                f"kv_channels {self.kv_channels} is odd, and position_embedding_type rope turns a head's elements in "
                "pairs"
            )
        head_size = self.head_size
        if self.position_embedding_type == "rope" and head_size % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} / num_attention_heads {self.num_attention_heads} is an odd head size, "
                f"{head_size}, and position_embedding_type rope turns a head's elements in pairs; choose sizes whose "
                "quotient is even, or set position_embedding_type=learned_absolute"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> ModelConfig:
        problems = self._expert_problems()
        if problems:
            raise ValueError(f"the experts cannot be built:{bullet_list(problems, limit=None)}")
        return self

    def _expert_problems(self) -> list[str]:
        num_experts = self.num_moe_experts
        if num_experts is None:
            given = sorted(name for name in self.model_fields_set if name.startswith("moe_") and self._is_changed(name))
            return [f"{name} is set, but num_moe_experts is not" for name in given]
        problems = []
        if self.moe_router_topk > num_experts:
            problems.append(f"moe_router_topk {self.moe_router_topk} is larger than num_moe_experts {num_experts}")
        if (
            self.moe_router_topk == 1
            and self.moe_router_score_function == "softmax"
            and not self.moe_router_pre_softmax
        ):
            problems.append(
                "moe_router_topk 1 with moe_router_score_function softmax needs moe_router_pre_softmax true: a softmax "
                "over the one score that was chosen has no gradient"
            )
        if isinstance(self.moe_layer_freq, list) and len(self.moe_layer_freq) != self.num_layers:
            problems.append(
                f"moe_layer_freq has {len(self.moe_layer_freq)} entries for num_layers {self.num_layers}; write one "
                "per layer, or a number"
            )
        if not any(self.moe_layers):
            problems.append(f"moe_layer_freq {self.moe_layer_freq} names no layer that has experts")
        if self.moe_aux_loss_coeff > 0 and self.moe_router_load_balancing_type == "none":
            problems.append(
                f"moe_aux_loss_coeff {self.moe_aux_loss_coeff} has no effect with moe_router_load_balancing_type none; "
                "set aux_loss or seq_aux_loss"
            )
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            problems.append("moe_router_enable_expert_bias needs moe_router_score_function sigmoid")
        if self._is_changed("moe_router_bias_update_rate") and not self.moe_router_enable_expert_bias:
            problems.append(
                f"moe_router_bias_update_rate {self.moe_router_bias_update_rate} has no effect without expert biases; "
                "set moe_router_enable_expert_bias=true, or leave the rate out"
            )
        if self.moe_router_replay != "off" and self.moe_router_impl == "megatron":
            problems.append(
                f"moe_router_replay {self.moe_router_replay} needs moe_router_impl layout_invariant: Megatron's own "
                "router is not told which token it routes"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            problems.append("moe_shared_expert_gate has no effect without moe_shared_expert_intermediate_size")
        if self.add_bias_linear and self.moe_shared_expert_intermediate_size is not None:
            problems.append("moe_shared_expert_intermediate_size needs add_bias_linear false")
        return problems

    def _is_changed(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)
