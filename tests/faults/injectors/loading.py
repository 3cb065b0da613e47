"""Faults of what a rank is given: the wrong part of a weight, the wrong layer or expert, the wrong rows or values."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from mock_scheduler.megatron import parameters
from mock_scheduler.megatron.observed_model import ObservedModel
from mock_scheduler.megatron.parameters import iterate_parameters
from mock_scheduler.megatron.ranks import ModelRanks
from mock_scheduler.trace.shards import ShardSpec
from pipelines.batching.plan import MicroBatch
from pipelines.config.model import ModelConfig
from pipelines.megatron import learner, trained_model, weights
from pipelines.megatron.learner import Learner
from pipelines.megatron.places import OwnBatch, own_batch
from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.patching import dp_rank, dp_size, ep_size, pp_rank, replacing, tp_rank

Cut = Callable[[torch.Tensor, ShardSpec], torch.Tensor]


def _cutting(suffix: str, cut_wrongly: Callable[[torch.Tensor, ShardSpec, Cut], torch.Tensor]) -> Injector:
    """The weights whose names end so are cut for a rank in another way."""

    def wrap(fired: Fired, cut: Cut) -> Cut:
        def cut_some(full: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
            if not spec.name.endswith(suffix):
                return cut(full, spec)
            fired.count += 1
            return cut_wrongly(full, spec, cut)

        return cut_some

    return replacing(weights, "cut_shard", wrap)


def _of_next_rank(full: torch.Tensor, spec: ShardSpec, cut: Cut) -> torch.Tensor:
    for split in spec.splits:
        full = full.roll(spec.local_shape[split.dim], dims=split.dim)
    return cut(full, spec)


def _in_one_piece(full: torch.Tensor, spec: ShardSpec, cut: Cut) -> torch.Tensor:
    rows = spec.local_shape[0]
    return full[tp_rank() * rows : (tp_rank() + 1) * rows]


wrong_shard = _cutting("linear_proj.weight", _of_next_rank)
gated_in_one_piece = _cutting("linear_fc1.weight", _in_one_piece)


def _renaming(rename: Callable[[str], str]) -> Injector:
    """Parameters are given the values of those with other names."""

    def wrap(fired: Fired, initial: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def of_other(name: str, *arguments: object, **options: object) -> torch.Tensor:
            fired.count += 1
            return initial(rename(name), *arguments, **options)

        return of_other

    return replacing(weights, "canonical_initial_weight", wrap)


def _of_layer_before(name: str) -> str:
    return re.sub(r"layers\.(\d+)", lambda found: f"layers.{int(found[1]) - 1}", name) if pp_rank() else name


_NUM_EXPERTS = 4


def _of_local_number(name: str) -> str:
    held = _NUM_EXPERTS // ep_size()
    return re.sub(r"local_experts\.(\d+)", lambda found: f"local_experts.{int(found[1]) % held}", name)


stage_off_by_one = _renaming(_of_layer_before)
experts_without_offset = _renaming(_of_local_number)


def _on_loaded(harm: Callable[[str, torch.nn.Parameter, ModelRanks], bool]) -> Injector:
    """Something is done to parameters after they were loaded; ``harm`` says whether it was to this one."""

    def wrap(fired: Fired, load: Callable[..., None]) -> Callable[..., None]:
        @torch.no_grad()
        def load_and_harm(observed: ObservedModel, model: ModelConfig, **options: object) -> None:
            load(observed, model, **options)
            for local in iterate_parameters(observed):
                fired.count += harm(local.spec.name, local.parameter, observed.ranks)

        return load_and_harm

    return replacing(trained_model, "load_initial_weights", wrap)


def _stretch_norm(name: str, parameter: torch.nn.Parameter, ranks: ModelRanks) -> bool:
    is_meant = name == "decoder.layers.0.input_layernorm.weight" and ranks.tp_rank == 1
    if is_meant:
        parameter.mul_(1.01)
    return is_meant


def _stretch_tied_copy(name: str, parameter: torch.nn.Parameter, ranks: ModelRanks) -> bool:
    is_meant = name == "embedding.word_embeddings.weight" and ranks.pp_rank > 0
    if is_meant:
        parameter.mul_(1.01)
    return is_meant


norm_of_one_rank = _on_loaded(_stretch_norm)
tied_copy_of_its_own = _on_loaded(_stretch_tied_copy)


def _order_layers_in_blocks(fired: Fired, _: Callable[..., int]) -> Callable[..., int]:
    def in_blocks(gpt: GPTModel) -> int:
        fired.count += 1
        num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return (pp_rank() * num_chunks + (gpt.vp_stage or 0)) * len(gpt.decoder.layers)

    return in_blocks


virtual_stages_in_blocks = replacing(parameters, "layer_offset", _order_layers_in_blocks)


def own_batches(change: Callable[[Fired, OwnBatch], OwnBatch]) -> Injector:
    """What a rank holds of a micro-batch is changed."""

    def wrap(fired: Fired, own_batch: Callable[..., OwnBatch]) -> Callable[..., OwnBatch]:
        return lambda *arguments, **options: change(fired, own_batch(*arguments, **options))

    return replacing(learner, "own_batch", wrap)


def _shift_mask(fired: Fired, own: OwnBatch) -> OwnBatch:
    fired.count += 1
    return replace(own, batch=replace(own.batch, response_mask=own.batch.response_mask.roll(dp_rank(), dims=-1)))


mask_shifted = own_batches(_shift_mask)


def _contiguous_positions(fired: Fired, own: OwnBatch) -> OwnBatch:
    fired.count += 1
    if own.columns is None:
        return own
    share = len(own.columns)
    first = share * (torch.distributed.get_rank() % 2)
    columns = torch.arange(first, first + share, device=own.columns.device)
    return replace(own, inputs=replace(own.inputs, positions=columns.expand_as(own.inputs.positions)))


positions_in_one_piece = own_batches(_contiguous_positions)


def _roll_labels_locally(fired: Fired, own: OwnBatch) -> OwnBatch:
    """The label of a piece's last token is the first token of the next piece that the rank holds."""
    if own.columns is None:
        fired.count += 1
        return own
    batch, share = own.batch, len(own.columns)
    ends = [share // 2 - 1, share - 1]
    targets = batch.targets.clone()
    targets[:, ends] = batch.tokens.roll(-1, dims=-1)[:, ends]
    fired.count += int((batch.response_mask & (targets != batch.targets)).sum())
    return replace(own, batch=replace(batch, targets=targets))


labels_of_own_pieces = own_batches(_roll_labels_locally)


def _read_first_replica(fired: Fired, owned: Callable[..., list[OwnBatch]]) -> Callable[..., list[OwnBatch]]:
    def of_first(self: Learner, micro_batches: Sequence[MicroBatch]) -> list[OwnBatch]:
        fired.count += 1
        theirs = micro_batches[:: dp_size()]
        return [
            replace(mine, batch=replace(other, index=mine.batch.index), inputs=own_batch(other, self.runtime).inputs)
            for mine, other in zip(owned(self, micro_batches), theirs, strict=True)
        ]

    return of_first


same_rows_everywhere = replacing(Learner, "_owned", _read_first_replica)


def _centre_by_rank(fired: Fired, owned: Callable[..., list[OwnBatch]]) -> Callable[..., list[OwnBatch]]:
    def centred(self: Learner, micro_batches: Sequence[MicroBatch]) -> list[OwnBatch]:
        mine = owned(self, micro_batches)
        fired.count += 1
        shift = _mean_advantage(micro_batches) - _mean_advantage([own.batch for own in mine])
        return [_with_advantages(own, own.batch.advantages + shift * own.batch.response_mask) for own in mine]

    return centred


def _with_advantages(own: OwnBatch, advantages: torch.Tensor) -> OwnBatch:
    return replace(own, batch=replace(own.batch, advantages=advantages.to(own.batch.advantages.dtype)))


def _mean_advantage(batches: Sequence[MicroBatch]) -> float:
    values = torch.cat([batch.advantages[batch.response_mask] for batch in batches])
    return float(values.double().mean()) if len(values) else 0.0


advantages_centred_by_rank = replacing(Learner, "_owned", _centre_by_rank)
