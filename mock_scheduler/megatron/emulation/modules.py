"""Lets the modules of a one-process ``GPTModel`` compute as the ranks of a layout do.

Only ``forward`` of instances is replaced, so parameters, names and hooks stay the reference's. A module gives the whole
tensor, put together from the ranks' parts. Tokens are in the order of the cp ranks, and before that of the replicas
that compute together; or in that of the line, where they are dealt to cp ranks here. Local layers of megatron-core
0.16.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mock_scheduler.layouts.order_plan import OrderPlan
from mock_scheduler.megatron.emulation.accumulators import Accumulators, ParameterSplit, Sharing
from mock_scheduler.megatron.emulation.arithmetic import Norm, column_product, norm_function, norm_of_parts, row_product
from mock_scheduler.megatron.emulation.parts import Tokens, cut_graph, join_graph, spread_bias, sum_graph

Tensors = Sequence[torch.Tensor]

Emulator = Callable[[Any, "EmulatedModules"], None]
"""Lets a module of one type compute rank by rank."""

Emulators = Mapping[type[torch.nn.Module], Emulator]
"""The emulator of each type of module. A subclass may compute something else, so it needs an entry of its own."""


def find_emulator(module: torch.nn.Module, emulators: Emulators) -> Emulator | None:
    """The emulator of a module; ``None`` of a type that is not followed."""
    kind = type(module)
    if kind not in emulators and isinstance(module, DotProductAttention):
        # Whatever a subclass does, each rank does it with its heads.
        kind = DotProductAttention
    return emulators.get(kind)


class EmulatedModules:
    """Replaces the modules of one chunk, and knows how they hold their parameters.

    ``is_paused``: the modules compute as one process does, as when tokens are generated one by one. ``round``: the lot
    of virtual replicas that computes now. ``loss_scale``: a replica's loss in units of this process's. ``emulators``:
    by type of module. ``tokens``: how those of a line are dealt to ranks.
    """

    def __init__(
        self, gpt: GPTModel, plan: OrderPlan, accumulators: Accumulators, emulators: Emulators, tokens: Tokens
    ) -> None:
        self.gpt = gpt
        self.plan = plan
        self.accumulators = accumulators
        self.emulators = emulators
        self.tokens = tokens
        self.is_paused = False
        self.round = 0
        self.loss_scale = 1.0
        self._tied: list[list[torch.Tensor]] | None = None
        # On one stage both uses of a tied weight share an accumulator; on two, each stage has one of its own.
        self._is_tied_here = plan.is_tied and plan.stages == 1 and gpt.share_embeddings_and_output_weights

    def emulate(self, module: torch.nn.Module) -> None:
        """Let a module compute as the ranks do."""
        emulator = find_emulator(module, self.emulators)
        assert emulator is not None
        emulator(module, self)

    def replace(self, module: object, compute: Callable[..., object], *, method: str = "forward") -> None:
        """Let one object's method compute so, unless paused; hooks on a module stay."""
        plain = getattr(module, method)

        def choose(*args: object, **kwargs: object) -> object:
            return (plain if self.is_paused else compute)(*args, **kwargs)

        setattr(module, method, choose)

    def split(self, sharing: Sharing, *, dim: int | None = None, blocks: int = 1) -> ParameterSplit:
        """How the ranks hold a parameter that all shares of the tokens have."""
        has_parts = sharing != "whole"
        return ParameterSplit(
            sharing=sharing,
            num_parts=self.plan.tp if has_parts else 1,
            num_replicas=self.plan.shares,
            dim=dim,
            blocks=blocks,
        )

    @property
    def over_tokens(self) -> Sharing:
        """How a parameter is shared that every tp rank has whole."""
        return "by_sequence" if self.plan.sequence_parallel else "whole"

    def register(self, module: torch.nn.Module, split: ParameterSplit) -> None:
        """Say how a module's own parameters are held."""
        for parameter in module.parameters(recurse=False):
            self.accumulators.register(parameter, split)

    def norm(self, norm: Norm) -> None:
        """Emulates a norm over tokens: each rank has some of them."""
        self.register(norm, self.split(self.over_tokens))

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            weights, biases = self.taken(norm)
            return norm_of_parts(norm, hidden, weights, biases, self.tokens)

        self.replace(norm, forward)

    def norm_of_heads(self, norm: Norm) -> None:
        """Emulates a norm over heads: each rank has some, and it takes the list of their parts."""
        self.register(norm, self.split("by_heads"))
        apply = norm_function(norm)

        def forward(parts: list[torch.Tensor]) -> torch.Tensor:
            weights, biases = self.taken(norm)
            return self.join_heads([apply(*three) for three in zip(parts, weights, biases, strict=True)])

        self.replace(norm, forward)

    def taken(self, module: torch.nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Weight and bias of every rank, share by share; ``None`` where there is no bias."""
        owner: Any = module
        weights = [part for parts in self.accumulators.take(owner.weight) for part in parts]
        bias = None if isinstance(module, torch.nn.RMSNorm) else owner.bias
        if bias is None:
            return weights, [None] * len(weights)
        return weights, [part for parts in self.accumulators.take(bias) for part in parts]

    def cut_heads(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Cuts ``[s, b, heads, n]`` into the ranks' parts, share by share."""
        by_share = self.tokens.cut(tensor)
        return [part for tokens in by_share for part in cut_graph(tokens, 2, self.plan.tp)]

    def join_heads(self, parts: Tensors) -> torch.Tensor:
        """Joins the parts to the whole again; heads are in dimension 2."""
        tp = self.plan.tp
        by_share = [join_graph(parts[start : start + tp], 2) for start in range(0, len(parts), tp)]
        return self.tokens.join(by_share)

    def column_linear(self, linear: ColumnParallelLinear, *, blocks: int = 1) -> None:
        """A layer whose output features are split; a bias that it leaves to the next is the caller's to add."""
        split = self.split("split", dim=0, blocks=blocks)
        self.register(linear, split)

        def forward(hidden: torch.Tensor, **unused: object) -> tuple[torch.Tensor, torch.Tensor | None]:
            weights = self.accumulators.take(linear.weight)
            adds = linear.bias is not None and not linear.skip_bias_add
            biases = self.accumulators.take(linear.bias) if adds else [[] for _ in weights]
            return self.column(hidden, weights, biases, blocks=blocks), linear.bias if linear.skip_bias_add else None

        self.replace(linear, forward)

    def column(
        self, hidden: torch.Tensor, weights: Sequence[Tensors], biases: Sequence[Tensors], *, blocks: int = 1
    ) -> torch.Tensor:
        """Returns all output features of all tokens; weights and biases by share and tp rank."""
        by_share = self.tokens.cut(hidden)
        if self.plan.sequence_parallel or self.plan.tp == 1:
            # There Megatron multiplies a gathered buffer, or a view: strides of dimensions of one are then the plain
            # ones, by which torch decides whether lines are multiplied together or one by one.
            by_share = [tokens.contiguous().view(tokens.shape) for tokens in by_share]
        outputs = [column_product(*three) for three in zip(by_share, weights, biases, strict=True)]
        return self.tokens.join([join_graph(parts, -1, blocks) for parts in outputs])

    def row_linear(self, linear: RowParallelLinear) -> None:
        """A layer whose input features are split; its bias is the whole tensor's, for the next operation to add."""
        self.accumulators.register(linear.weight, self.split("split", dim=1))
        if linear.bias is not None:
            self.accumulators.register(linear.bias, self.split(self.over_tokens))

        def forward(inputs: torch.Tensor | list[list[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor | None]:
            if isinstance(inputs, torch.Tensor):
                inputs = [cut_graph(tokens, -1, self.plan.tp) for tokens in self.tokens.cut(inputs)]
            weights = self.accumulators.take(linear.weight)
            output = self.tokens.join([row_product(*two) for two in zip(inputs, weights, strict=True)])
            if linear.bias is None:
                return output, None
            biases = [part for parts in self.accumulators.take(linear.bias) for part in parts]
            # Behind the sum over ranks: before it, the bias would count once for each of them.
            return output, spread_bias(biases, self.tokens, output.shape[0], output.shape[1])

        self.replace(linear, forward)

    def mlp(self, mlp: MLP) -> None:
        """Emulates an MLP of all tokens; the shared experts of a layer with experts give no bias."""
        blocks = 2 if mlp.config.gated_linear_unit else 1
        fc1 = mlp.linear_fc1
        self.column_linear(fc1, blocks=blocks)
        self.row_linear(mlp.linear_fc2)
        activation = mlp.config.activation_func

        def inner(part: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            part = part if bias is None else part + bias
            if blocks == 1:
                return activation(part)
            # Each rank holds its part of the gate and behind it its part of up, hence two blocks.
            gate, up = torch.chunk(part, 2, dim=-1)
            return activation(gate) * (up + mlp.config.glu_linear_offset)

        def forward(hidden: torch.Tensor, **unused: object) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
            by_share = self.tokens.cut(fc1(hidden)[0])
            nothing = [[None] * self.plan.tp for _ in by_share]
            biases: Sequence[Sequence[torch.Tensor | None]] = (
                nothing if fc1.bias is None else self.accumulators.take(fc1.bias)
            )
            activated = [
                [inner(*two) for two in zip(cut_graph(tokens, -1, self.plan.tp, blocks), own, strict=True)]
                for tokens, own in zip(by_share, biases, strict=True)
            ]
            output = mlp.linear_fc2(activated)
            return output[0] if isinstance(mlp, SharedExpertMLP) else output

        self.replace(mlp, forward)

    def embed(self, embedding: LanguageModelEmbedding) -> None:
        """Emulates the embedding of tokens ``[b, s]`` to ``[s, b, h]``."""
        words = embedding.word_embeddings
        self.accumulators.register(words.weight, self.split("split", dim=0))
        positions = embedding.position_embeddings if embedding.add_position_embedding else None
        if positions is not None:
            self.accumulators.register(positions.weight, self.split("whole"))

        def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, **unused: object) -> torch.Tensor:
            weights = self.accumulators.take(words.weight)
            self._tied = weights if self._is_tied_here else None
            places = None if positions is None else self.accumulators.take(positions.weight)
            embedded = []
            for share, (tokens, where) in enumerate(
                zip(self.tokens.cut(input_ids, dim=1), self.tokens.cut(position_ids, dim=1), strict=True)
            ):
                # All addends of a token but one are 0, so the all-reduce's order shows in no bit.
                own = sum_graph(
                    [
                        _look_up(
                            tokens.contiguous(),
                            weight,
                            part,
                            is_split=self.plan.tp > 1,
                            by_index=words.deterministic_mode,
                        )
                        for part, weight in enumerate(weights[share])
                    ]
                )
                if places is not None:
                    own = own + F.embedding(where.contiguous(), places[share][0])
                embedded.append(own.transpose(0, 1).contiguous())
            return self.tokens.join(embedded)

        self.replace(embedding, forward)

    def output(self, layer: ColumnParallelLinear) -> None:
        """Emulates the logits of all tokens; the weight may be that of the embedding."""
        gpt = self.gpt
        parameter = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else layer.weight
        if not self._is_tied_here:
            self.accumulators.register(parameter, self.split("split", dim=0), use="output")

        def forward(hidden: torch.Tensor, **unused: object) -> tuple[torch.Tensor, None]:
            if self._is_tied_here:
                assert self._tied is not None
                # The parts that the embedding took: autograd adds both gradients before one accumulator gets them.
                weights, self._tied = self._tied, None
            else:
                weights = self.accumulators.take(parameter, use="output")
            return self.column(hidden, weights, [[] for _ in weights]), None

        self.replace(layer, forward)


def _look_up(tokens: torch.Tensor, weight: torch.Tensor, part: int, *, is_split: bool, by_index: bool) -> torch.Tensor:
    """A rank's rows of the vocabulary for tokens ``[b, s]``, 0 where another rank has them."""
    if is_split:
        start = part * weight.shape[0]
        absent = (tokens < start) | (tokens >= start + weight.shape[0])
        tokens = tokens - start
        # Any row will do here: what belongs to another rank is set to 0 below.
        tokens[absent] = 0
    # Megatron indexes in deterministic mode, since F.embedding's backward pass has no fixed order.
    rows = weight[tokens] if by_index else F.embedding(tokens, weight)
    if is_split:
        rows[absent, :] = 0.0
    return rows
