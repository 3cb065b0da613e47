"""Whether recorded log-probabilities can be compared with those that training computes, and if not, why.

Training computes log softmax(logits / temperature) over the tokens that may be chosen. An engine that reports another
distribution's log-probabilities puts a bias into every ratio, which no weight corrects.

Contract: pure functions; a problem is one sentence that names the values found.
"""

from __future__ import annotations

import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.columns import Column, TensorColumn
from mock_scheduler.tensor_bytes import shape_text
from mock_scheduler.text import count_of, list_some

#: A ragged bool column: whether the engine gave each response token's log-probability.
VALID_COLUMN = "rollout_logprobs_valid"
_NUM_LISTED = 5


def comparison_problems(sampling: SamplingParams, *, temperature: float, restricts_vocabulary: bool) -> list[str]:
    """Why log-probabilities sampled so are not those that training computes; empty where they are.

    temperature: what training divides logits by. restricts_vocabulary: whether it takes the softmax over some of the
    vocabulary alone, as the engine then samples.
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
            f"logprobs_mode is processed with {' and '.join(cut)}: they are of the kept tokens alone, so each ratio has "
            "a bias of log(kept mass), which is below 0; sample with top_p 1 and top_k 0, or record raw ones"
        )
    return problems


def logprob_problems(batch: RolloutBatch) -> list[str]:
    """What is missing or malformed in a batch's log-probabilities; empty where nothing is.

    A log-probability of exactly 0.0 says that the token was certain. Where all of a batch or of a row of several
    response tokens are, they are taken for fillers in the place of missing ones, unless the column
    ``rollout_logprobs_valid`` says that they are valid, or which are not.
    """
    problems = _column_problems(batch)
    if problems:
        return problems
    if len(batch.rollout_logprobs) == 0 or VALID_COLUMN in batch.extras:
        return []
    if not bool(batch.rollout_logprobs.any()):
        return [
            f"all {count_of(len(batch.rollout_logprobs), 'rollout log-probability', 'rollout log-probabilities')} are "
            "exactly 0.0: they are missing, and 0 was filled in; have the engine return them (in verl, "
            "actor_rollout_ref.rollout.calculate_log_probs: true)"
        ]
    rows = zero_only_rows(batch)
    if not rows:
        return []
    named = list_some([str(batch.identities[row]) for row in rows], _NUM_LISTED, ", ")
    return [
        f"{count_of(len(rows), 'row')} of {len(batch)} have log-probabilities of exactly 0.0 alone, which fill in for "
        f"missing ones: {named}; have the engine return them, or mark them in the column {VALID_COLUMN}"
    ]


def valid_logprobs(batch: RolloutBatch) -> torch.Tensor | None:
    """bool ``[M]`` of the M response tokens, False where the engine gave no log-probability; ``None`` where the batch
    does not say. The column must be sound, as ``logprob_problems`` says."""
    column = batch.extras.get(VALID_COLUMN)
    if column is None:
        return None
    assert isinstance(column, TensorColumn)
    return column.values


def zero_only_rows(batch: RolloutBatch) -> list[int]:
    """Rows of two or more response tokens whose log-probabilities are all exactly 0.0.

    A single one may be: a token that was the only choice.
    """
    offsets = batch.response_offsets
    counts = torch.cat((torch.zeros(1, dtype=torch.int64), (batch.rollout_logprobs != 0).cumsum(0)))
    is_zero = (counts[offsets].diff() == 0) & (offsets.diff() > 1)
    return [int(row) for row in is_zero.nonzero().flatten()]


def _column_problems(batch: RolloutBatch) -> list[str]:
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
