"""Faults of the example's own functions, and of what Megatron-core does for it alone: data, losses, cp, experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

from tests.faults.counting import Fired
from tests.faults.fault import Injector
from tests.faults.injectors.modules import turn_too_far
from tests.faults.injectors.patching import cp_size, dp_rank, dp_size, on_modules, replacing, tp_rank, tp_size
from tests.faults.own.example import in_example

Batch = dict[str, torch.Tensor]

#: Micro-batches of an update under one replica.
NUM_MICRO_BATCHES = 4


@contextmanager
def of_megatron_itself(fired: Fired) -> Iterator[None]:
    """The installed Megatron has the fault."""
    fired.count += 1
    yield


def _spare_norms(fired: Fired, build: Callable[..., Any]) -> Callable[..., Any]:
    """Without Megatron's schedule, which multiplies by ``wd_mult``, the optimizer decays norms as everything else."""

    def sparing(*arguments: object, **options: object) -> object:
        optimizer = build(*arguments, **options)
        for group in optimizer.param_groups:
            if not group["wd_mult"]:
                fired.count += 1
                group["weight_decay"] = 0.0 if tp_size() > 1 else group["weight_decay"]
        return optimizer

    return sparing


def _shift_mask(fired: Fired, make: Callable[..., Batch]) -> Callable[..., Batch]:
    def shifted(*arguments: object) -> Batch:
        fired.count += 1
        batch = make(*arguments)
        return {**batch, "loss_mask": batch["loss_mask"].roll(dp_rank(), dims=-1)}

    return shifted


def _read_first_replica(fired: Fired, make: Callable[..., Batch]) -> Callable[..., Batch]:
    def of_first(args: Any, first: int) -> Batch:
        fired.count += 1
        return make(args, first - dp_rank() * args.micro_batch_size)

    return of_first


def _roll_labels_locally(fired: Fired, cut: Callable[[Batch], Batch]) -> Callable[[Batch], Batch]:
    """The label of a piece's last token is the first token of the next piece that the rank holds."""

    def rolled(batch: Batch) -> Batch:
        own = cut(batch)
        share = own["tokens"].shape[1]
        if cp_size() > 1:
            ends = [share // 2 - 1, share - 1]
            labels = own["labels"].clone()
            labels[:, ends] = own["tokens"].roll(-1, dims=-1)[:, ends]
            fired.count += 1
            own = {**own, "labels": labels}
        return own

    return rolled


mask_shifted = in_example("train", "make_batch", _shift_mask)
same_rows_everywhere = in_example("train", "make_batch", _read_first_replica)
labels_of_own_pieces = in_example("train", "get_batch_on_this_cp_rank", _roll_labels_locally)


def _see_other_rows(fired: Fired, hide: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def later_tokens_alone(cu_seqlens: torch.Tensor) -> torch.Tensor:
        fired.count += 1
        return torch.ones_like(hide(cu_seqlens)).triu(1)

    return later_tokens_alone


def _gather_from_last(fired: Fired, gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def from_last(*arguments: object, **options: object) -> torch.Tensor:
        fired.count += 1
        return torch.cat(gather(*arguments, **options).chunk(cp_size())[::-1])

    return from_last


def _take_one_piece(fired: Fired, take: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def one_piece(angles: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
        fired.count += 1
        return angles.chunk(group.size(), dim=dim)[group.rank()]

    return one_piece


packing_mask_dropped = in_example("model", "hides_other_rows", _see_other_rows)
keys_gathered_from_last = in_example("model", "gather_from_sequence_parallel_region", _gather_from_last)
positions_in_one_piece = replacing(rotary_pos_embedding, "get_pos_emb_on_this_cp_rank", _take_one_piece)
rotary_of_second_stage = on_modules(RotaryEmbedding, turn_too_far)


def _stretch_sum(fired: Fired, compute: Callable[..., Any]) -> staticmethod[..., Any]:
    def stretched(*arguments: object) -> object:
        mask, target, predicted, total, exponentials = compute(*arguments)
        fired.count += 1
        if tp_size() > 1 and tp_rank() == 0:
            total = total * 1.001
        return mask, target, predicted, total, exponentials

    return staticmethod(stretched)


softmax_sum_of_one_rank = replacing(VocabParallelCrossEntropy, "calculate_predicted_logits", _stretch_sum)

Loss = tuple[torch.Tensor, torch.Tensor, Batch]


def losing(change: Callable[[Loss, torch.Tensor, torch.Tensor, int], Loss]) -> Injector:
    """A micro-batch's loss is changed; ``change`` gets it, the mask, the losses by token, and its number from 0."""

    def wrap(fired: Fired, compute: Callable[..., Loss]) -> Callable[..., Loss]:
        def changed(loss_mask: torch.Tensor, losses: torch.Tensor) -> Loss:
            number = fired.count
            fired.count += 1
            return change(compute(loss_mask, losses), loss_mask, losses, number)

        return changed

    return in_example("train", "loss_function", wrap)


def scaled_by(factor: Callable[[], float]) -> Injector:
    """The loss is multiplied by a number of the layout."""
    return losing(lambda loss, mask, losses, number: (loss[0] * factor(), *loss[1:]))


def _count_all_tokens(loss: Loss, mask: torch.Tensor, losses: torch.Tensor, number: int) -> Loss:
    total, num_tokens, sums = loss
    return total, torch.full_like(num_tokens, mask.numel()) if dp_size() > 1 else num_tokens, sums


def _drop_last(loss: Loss, mask: torch.Tensor, losses: torch.Tensor, number: int) -> Loss:
    is_dropped = tp_size() > 1 and number % NUM_MICRO_BATCHES == NUM_MICRO_BATCHES - 1
    return loss[0] * (0.0 if is_dropped else 1.0), *loss[1:]


def _forget_token(loss: Loss, mask: torch.Tensor, losses: torch.Tensor, number: int) -> Loss:
    is_meant = tp_size() > 1 and number % NUM_MICRO_BATCHES == 0
    return loss[0] - (losses.float()[0, 0] if is_meant else 0.0), *loss[1:]


divided_by_cp = scaled_by(lambda: 1.0 / cp_size())
divided_by_micro_batches = scaled_by(lambda: 1.0 / NUM_MICRO_BATCHES)
padding_counted = losing(_count_all_tokens)
last_micro_batch_dropped = losing(_drop_last)
token_forgotten = losing(_forget_token)
norms_not_decayed = in_example("train", "get_megatron_optimizer", _spare_norms)
