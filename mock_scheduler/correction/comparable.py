"""Checks that recorded log-probabilities can be compared with training's.

Training computes log softmax(logits / temperature) over the tokens that may be chosen. An engine that reports the
log-probabilities of another distribution puts a bias into every ratio, and no weight corrects a bias.

Contract: pure functions; a problem is one sentence that names the values found.
"""

from __future__ import annotations

import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.columns import Column, TensorColumn
from mock_scheduler.support.tensor_bytes import shape_text
from mock_scheduler.support.text import count_of, list_some

#: A ragged bool column: whether the engine gave each response token's log-probability.
VALID_COLUMN = "rollout_logprobs_valid"
_NUM_LISTED = 5
_LEAST_CHANCE = 1e-6
_HAVE_THEM = "have the engine return them (verl: actor_rollout_ref.rollout.calculate_log_probs true)"


def comparison_problems(sampling: SamplingParams, *, temperature: float, restricts_vocabulary: bool) -> list[str]:
    """Finds reasons why the engine's log-probabilities are of another distribution than training's.

    Args:
        sampling: The engine's settings.
        temperature: Training divides logits by it.
        restricts_vocabulary: Whether training takes the softmax over a part of the vocabulary.
    """
    problems = []
    if sampling.temperature != temperature:
        problems.append(
            f"rollouts were sampled at temperature {sampling.temperature:g}, and training computes at "
            f"{temperature:g}: set actor_infer.generating_args.temperature to that of the recording"
        )
    if sampling.logprobs_mode == "raw":
        if sampling.temperature != 1:
            problems.append(
                f"logprobs_mode is raw at temperature {sampling.temperature:g}: raw log-probabilities are of the "
                "logits themselves, not of logits / temperature; record processed ones"
            )
        if restricts_vocabulary:
            problems.append(
                "logprobs_mode is raw, and training restricts the vocabulary: raw log-probabilities are of all "
                "tokens, not of those that may be chosen; record processed ones"
            )
    elif cut := [
        text
        for is_on, text in (
            (sampling.top_p < 1, f"top_p {sampling.top_p:g}"),
            (sampling.top_k > 0, f"top_k {sampling.top_k}"),
        )
        if is_on
    ]:
        problems.append(
            f"logprobs_mode is processed with {' and '.join(cut)}: log-probabilities are of the kept tokens alone, so "
            "that each is too high by -log(kept mass); sample with top_p 1 and top_k 0, or record raw ones"
        )
    return problems


def logprob_problems(batch: RolloutBatch) -> list[str]:
    """Finds missing and malformed log-probabilities of a batch.

    Exactly 0.0 says that a token was certain, and frameworks fill it in for a missing log-probability. So a batch of
    nothing else, and the rows of ``zero_only_rows``, are problems. A column ``rollout_logprobs_valid`` says which are
    missing; rows are then not looked at.
    """
    problems = valid_column_problems(batch)
    if problems:
        return problems
    valid = valid_logprobs(batch)
    logprobs = batch.rollout_logprobs if valid is None else batch.rollout_logprobs[valid]
    number = count_of(len(batch.rollout_logprobs), "rollout log-probability", "rollout log-probabilities")
    if len(batch.rollout_logprobs) and not len(logprobs):
        return [f"none of {number} is valid, as the column {VALID_COLUMN} says; {_HAVE_THEM}"]
    if len(logprobs) and not bool(logprobs.any()):
        return [f"all of {number} are exactly 0.0: they are missing, and 0 was filled in; {_HAVE_THEM}"]
    rows = zero_only_rows(batch) if valid is None else []
    if not rows:
        return []
    named = list_some([str(batch.identities[row]) for row in rows], _NUM_LISTED, ", ")
    return [
        f"{count_of(len(rows), 'row')} of {len(batch)} with log-probabilities of exactly 0.0 alone, filled in for "
        f"missing ones: {named}; {_HAVE_THEM}, or give the column {VALID_COLUMN}"
    ]


def valid_logprobs(batch: RolloutBatch) -> torch.Tensor | None:
    """Reads bool ``[M]`` of the M response tokens, False where the engine gave no log-probability.

    ``None`` where the batch does not say. ``valid_column_problems`` must have found the column sound.
    """
    column = batch.extras.get(VALID_COLUMN)
    if column is None:
        return None
    assert isinstance(column, TensorColumn)
    return column.values


def zero_only_rows(batch: RolloutBatch) -> list[int]:
    """Finds rows whose log-probabilities are all exactly 0.0, where chance does not explain it.

    A certain token has exactly 0.0 too. With q the share of 0.0 among the tokens of all other rows, chance explains n
    such tokens in a row where q^n ≥ 1e-6; it always explains a single one.
    """
    is_zero, lengths = batch.rollout_logprobs == 0, batch.response_lengths
    counts = torch.cat((torch.zeros(1, dtype=torch.int64), is_zero.cumsum(0)))
    zeros = counts[batch.response_offsets].diff()
    is_only = (zeros == lengths) & (lengths > 1)
    others = int(lengths[~is_only].sum())
    share = int(zeros[~is_only].sum()) / others if others else 0.0
    is_filled = is_only & (share ** lengths.double() < _LEAST_CHANCE)
    return [int(row) for row in is_filled.nonzero().flatten()]


def valid_column_problems(batch: RolloutBatch) -> list[str]:
    """Finds faults of the column ``rollout_logprobs_valid``; empty without one."""
    column = batch.extras.get(VALID_COLUMN)
    if column is None:
        return []
    expected = f"extra {VALID_COLUMN!r}: expected a ragged bool column with one entry per response token"
    found = _describe(column)
    if not isinstance(column, TensorColumn) or column.offsets is None or column.values.dtype != torch.bool:
        return [f"{expected}; it is {found}"]
    if column.values.dim() != 1:
        return [f"{expected}; it is {found}"]
    own, needed = column.offsets.diff(), batch.response_lengths
    wrong = [int(row) for row in (own != needed).nonzero().flatten()]
    if not wrong:
        return []
    named = [f"{batch.identities[row]}: {int(own[row])} for {int(needed[row])} response tokens" for row in wrong]
    return [f"{expected}; of another length in {count_of(len(wrong), 'row')}: {list_some(named, _NUM_LISTED)}"]


def _describe(column: Column) -> str:
    if not isinstance(column, TensorColumn):
        return "JSON"
    return f"{'dense' if column.offsets is None else 'ragged'} {shape_text(column.values)}"
