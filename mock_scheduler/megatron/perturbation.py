"""Moves weights and the embedding's output by about one rounding, the same in every layout.

Contract: a perturbation is a pure function of its seed and of canonical things (a parameter's name and place in the
whole tensor; a token's position, id and channel), so layouts, micro-batches and recomputation change none of it. It is
made in float64 and rounded once to the dtype of the moved tensor. A 0, such as a bias at the start, stays 0: a relative
perturbation has nothing to move there. Every model of a run is moved alike, the frozen reference and the critic too: a
reference equal to the policy at the start stays equal, so no KL of a rounding appears that neither baseline nor
candidate has. Weights are moved where a run begins: the initial ones, or its checkpoint's.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel

from mock_scheduler.config.instruments import UNIT_ROUNDOFFS, PerturbationConfig
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.optimizer_state import share_parameters, state_dtype
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.probe.state import updated_tensors
from mock_scheduler.support.tensor_bytes import dtype_name
from mock_scheduler.trace.shards import ShardSpec, cut_shard

# Odd constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit integers.
_WEYL, _FIRST, _SECOND = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_FIELD_BITS = 16
_NUM_FIELDS = 4
# Of the sum of four integers from 0 to 2^16 - 1.
_MEAN = _NUM_FIELDS * ((1 << _FIELD_BITS) - 1) / 2
_DEVIATION = (_NUM_FIELDS * ((1 << (2 * _FIELD_BITS)) - 1) / 12) ** 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """Holds ``seed``: its number. ``unit_roundoffs``: its size in roundings of the moved tensor's dtype."""

    seed: int
    unit_roundoffs: float

    @classmethod
    def build(cls, config: PerturbationConfig) -> Perturbation | None:
        """The configured one; ``None`` where nothing is perturbed."""
        return None if config.seed is None else cls(seed=config.seed, unit_roundoffs=config.unit_roundoffs)

    def of_weight(self, local: torch.Tensor, spec: ShardSpec, dtype: torch.dtype) -> torch.Tensor:
        """Computes, in float64, w · (1 + s · u · ξ), ξ ~ N(0, 1) of Philox keyed by seed and canonical name.

        local: this rank's shard of the parameter, or of its updated wide copy; flat where the spec has a flat range.
        spec: its place in the whole one. dtype: the parameter's; it decides u.
        """
        key = hashlib.sha256(f"perturbation/{self.seed}/{spec.name}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
        noise = cut_shard(torch.from_numpy(generator.standard_normal(spec.global_shape)), spec)
        if spec.flat_range is not None:
            noise = noise.flatten()[slice(*spec.flat_range)]
        noise = noise.to(local.device)
        # 1 + u · ξ is no number of float64, in which u is half a spacing, so that it must not be made.
        return local.double() + local.double() * noise * self._size(dtype)

    def of_embedding(self, output: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the embedding's output, moved by ξ of each token's position and id and of the channel.

        output: ``[s, b, h]``; tokens, positions: int64 ``[b, s]``. Equal tokens at equal positions are moved alike.
        """
        noise = self._token_noise(tokens, positions, output.shape[-1]).transpose(0, 1)
        wide = output.double()
        return (wide + wide * noise * self._size(output.dtype)).to(output.dtype)

    def _size(self, dtype: torch.dtype) -> float:
        return self.unit_roundoffs * UNIT_ROUNDOFFS[dtype_name(dtype)]

    def _token_noise(self, tokens: torch.Tensor, positions: torch.Tensor, num_channels: int) -> torch.Tensor:
        """float64 ``[b, s, h]`` of mean 0 and variance 1, nearly normal: the sum of four 16-bit fields of a hash.

        Integers only, so that it is the same to the bit on every device, in blocks of any size.
        """
        token = _mix(positions.long() + _mix(tokens.long() + _mix(torch.full_like(tokens, self.seed).long())))
        channels = torch.arange(num_channels, device=tokens.device)
        bits = _mix(token.unsqueeze(-1) + channels * _WEYL)
        total = sum((bits >> (_FIELD_BITS * field)) & ((1 << _FIELD_BITS) - 1) for field in range(_NUM_FIELDS))
        return (torch.as_tensor(total).double() - _MEAN) / _DEVIATION


@torch.no_grad()
def perturb_weights(model: ObservedModel, perturbation: Perturbation) -> None:
    """Moves every parameter of this rank, and the wide copy that is updated in its place; it stays the rounded copy.

    Collective, over dp, with a distributed optimizer: a rank moves its ranges of the wide copies, and gets the others'
    parameters.
    """
    for local in iterate_parameters(model):
        parameter = local.parameter
        if state_dtype(parameter) is parameter.dtype or not parameter.requires_grad:
            parameter.copy_(perturbation.of_weight(parameter, local.spec, parameter.dtype))
            continue
        for _, spec, wide in updated_tensors(local, model.optimizers):
            wide.copy_(perturbation.of_weight(wide, spec, parameter.dtype))
            parameter.view(-1)[slice(*(spec.flat_range or (None, None)))].copy_(wide.view(-1))
    share_parameters(model)


def perturb_embedding(gpt: GPTModel, config: PerturbationConfig) -> None:
    """Let the model's embedding give a perturbed output; nothing where none is configured or it has no embedding.

    A token without a position of one number, as training gives none where nothing is embedded by position, is moved by
    its id alone.
    """
    perturbation = Perturbation.build(config)
    # The last stage has one too where it predicts several tokens.
    embedding = gpt._modules.get("embedding")
    if perturbation is None or embedding is None:
        return

    def move(
        module: torch.nn.Module, arguments: tuple[object, ...], keywords: dict[str, object], output: torch.Tensor
    ) -> torch.Tensor:
        named = {**dict(zip(("input_ids", "position_ids"), arguments, strict=False)), **keywords}
        tokens, positions = named["input_ids"], named["position_ids"]
        if not isinstance(tokens, torch.Tensor):
            raise TypeError("Megatron's embedding was called without a tensor of tokens")
        if not isinstance(positions, torch.Tensor) or positions.dim() != tokens.dim():
            positions = torch.zeros_like(tokens)
        # Some trainings give the positions of one row for all of them.
        positions = positions.expand_as(tokens)
        share = output.shape[0]
        if share != tokens.shape[1]:  # sequence parallelism has cut the line among the tp ranks
            start = gpt.pg_collection.tp.rank() * share
            tokens, positions = (each[:, start : start + share] for each in (tokens, positions))
        return perturbation.of_embedding(output, tokens, positions)

    embedding.register_forward_hook(move, with_kwargs=True)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """The output function of splitmix64, on int64 that wraps around."""
    values = values + _WEYL
    values = (values ^ _shift(values, 30)) * _FIRST
    values = (values ^ _shift(values, 27)) * _SECOND
    return values ^ _shift(values, 31)


def _shift(values: torch.Tensor, count: int) -> torch.Tensor:
    """A logical shift to the right, where torch's keeps the sign."""
    return (values >> count) & ((1 << (64 - count)) - 1)
