"""A model of two layers in plain torch that has Megatron's names, for tests that need no process group.

Every module gives ``[s, b, ...]``; what it computes is of no interest but for being differentiable.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from torch.utils.checkpoint import checkpoint

from mock_scheduler.megatron.observed_model import ObservedModel
from pipelines.batching.plan import MicroBatch
from pipelines.megatron.process_of_rank import Runtime

HIDDEN, HEADS, FFN, VOCAB = 8, 2, 6, 10


class Scale(torch.nn.Module):
    """A norm's stand-in: one factor for each channel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.float64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input times the factors."""
        return hidden * self.weight


class Linear(torch.nn.Linear):
    """Leaves its bias to whoever comes next, as Megatron's layers do."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Output and no bias."""
        return super().forward(hidden), None


class CoreAttention(torch.nn.Module):
    """Takes a third of its input for the context."""

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        """``[s, b, 3 · h]`` to ``[s, b, h]``."""
        return qkv[..., :HIDDEN].sin()


class Attention(torch.nn.Module):
    """The parts of self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = Linear(HIDDEN, 3 * HIDDEN)
        self.core_attention = CoreAttention()
        self.linear_proj = Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Output and no bias."""
        qkv, _ = self.linear_qkv(hidden)
        return self.linear_proj(self.core_attention(qkv))


class Mlp(torch.nn.Module):
    """Without a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = Linear(HIDDEN, FFN)
        self.linear_fc2 = Linear(FFN, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Output and no bias."""
        inner, _ = self.linear_fc1(hidden)
        return self.linear_fc2(inner.sigmoid())


class Layer(torch.nn.Module):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm: torch.nn.Module = Scale(HIDDEN)
        self.self_attention = Attention()
        self.pre_mlp_layernorm: torch.nn.Module = Scale(HIDDEN)
        self.mlp = Mlp()

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Hidden states and no context."""
        hidden = hidden + self.self_attention(self.input_layernorm(hidden))[0]
        return hidden + self.mlp(self.pre_mlp_layernorm(hidden))[0], None


class Decoder(torch.nn.Module):
    """Layers and the final norm; ``recomputes``: layers run again in the backward pass."""

    def __init__(self, num_layers: int, *, recomputes: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.final_layernorm = Scale(HIDDEN)
        self.recomputes = recomputes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the norm."""
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=True)[0] if self.recomputes else layer(hidden)[0]
        return self.final_layernorm(hidden)


class Embedding(torch.nn.Embedding):
    """``[b, s]`` to ``[s, b, h]``."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens' vectors."""
        return super().forward(tokens).transpose(0, 1).contiguous()


class TinyGpt(GPTModel):
    """First and last stage in one; of Megatron's class in name only."""

    def __init__(self, config: Any, *, recomputes: bool = False) -> None:
        torch.nn.Module.__init__(self)
        self.config = config
        self.vocab_size = VOCAB
        self.share_embeddings_and_output_weights = False
        torch.manual_seed(3)
        self.pre_process = self.post_process = True
        self.embedding = Embedding(VOCAB, HIDDEN, dtype=torch.float64)
        self.decoder = Decoder(2, recomputes=recomputes)
        for number, layer in enumerate(self.decoder.layers):
            of_megatron: Any = layer
            of_megatron.config, of_megatron.layer_number = config, number + 1
        self.output_layer = Linear(HIDDEN, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[b, s, V]``."""
        return self.output_layer(self.decoder(self.embedding(tokens)))[0].transpose(0, 1)


def one_rank(**axes: int) -> Runtime:
    """A rank of a layout, without any process group."""
    places: dict[str, Any] = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1} | axes
    return Runtime(global_rank=0, world_size=1, device=torch.device("cpu"), **places)


def tiny_model(
    *,
    recomputes: bool = False,
    implementation: Literal["local", "transformer_engine"] = "local",
    runtime: Runtime | None = None,
    **config: Any,
) -> ObservedModel:
    """The model as a probe sees it."""
    values = {
        "transformer_impl": implementation, "num_query_groups": HEADS, "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS, "ffn_hidden_size": FFN, "gated_linear_unit": False, "hidden_size": HIDDEN,
        "sequence_parallel": False, "calculate_per_token_loss": True, "qk_layernorm": False, "num_layers": 2,
        "num_moe_experts": None, "moe_layer_freq": 1, **config,
    }  # fmt: skip
    place = runtime or one_rank()
    return ObservedModel(
        chunks=[TinyGpt(SimpleNamespace(**values), recomputes=recomputes)],
        ranks=place,
        vocab_size=VOCAB,
        num_replicas=place.dp_size * place.cp_size,
    )


def micro_batch(index: int, rows: list[list[int]]) -> MicroBatch:
    """Lines that each hold one row, given by its tokens' places in the step: -1 is padding, n is token n of row n // 4.

    Rows have 4 tokens; the token at place n is n % 10.
    """
    places = torch.tensor(rows)
    is_real = places >= 0
    nothing = torch.zeros(places.shape, dtype=torch.float64)
    return MicroBatch(
        index=index,
        tokens=torch.where(is_real, places % VOCAB, 0),
        targets=torch.zeros_like(places),
        response_mask=is_real,
        advantages=nothing,
        returns=nothing,
        rollout_logprobs=nothing,
        weights=is_real.double(),
        kept_mask=is_real,
        loss_weights=is_real.double(),
        row_ids=torch.where(is_real, places // 4, -1),
        positions=torch.where(is_real, places % 4, 0),
    )
