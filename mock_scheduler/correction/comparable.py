"""Checks that recorded log-probabilities can be compared with training's.

Training computes log softmax(logits / temperature) over the tokens that may be chosen. An engine that reports the
log-probabilities of another distribution puts a bias into every ratio, and no weight corrects a bias.

Contract: pure functions; a problem is one sentence that names the values found.
"""

from __future__ import annotations

import torch

from mock_scheduler.batch import RolloutBatch, SamplingParams
from mock_scheduler.batch.columns import Column, TensorColumn
from mock_scheduler.batch.plausibility import VALID_COLUMN, made_up_rows, valid_logprobs
from mock_scheduler.support.tensor_bytes import shape_text
from mock_scheduler.support.text import count_of, list_some

_NUM_LISTED = 5
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
    nothing else, and the rows of ``plausibility.made_up_rows``, are problems. A column ``rollout_logprobs_valid`` says
    which are missing; rows are then not looked at.
    """
    problems = valid_column_problems(batch)
    if problems:
        return problems
    valid = valid_logprobs(batch)
    logprobs = batch.arrays["rollout_logprobs"] if valid is None else batch.arrays["rollout_logprobs"][valid]
    number = count_of(len(batch.arrays["rollout_logprobs"]), "rollout log-probability", "rollout log-probabilities")
    if len(batch.arrays["rollout_logprobs"]) and not len(logprobs):
        return [f"none of {number} is valid, as the column {VALID_COLUMN} says; {_HAVE_THEM}"]
    if len(logprobs) and not bool(logprobs.any()):
        return [f"all of {number} are exactly 0.0: they are missing, and 0 was filled in; {_HAVE_THEM}"]
    rows = made_up_rows(batch) if valid is None else {}
    zeros, others = ([row for row in rows if (rows[row] == 0) is is_zero] for is_zero in (True, False))
    return [
        f"{count_of(len(found), 'row')} of {len(batch)} with log-probabilities of {what} alone, filled in for missing "
        f"ones: {_name_rows(batch, found, rows)}; {_HAVE_THEM}, or give the column {VALID_COLUMN}"
        for found, what in ((zeros, "exactly 0.0"), (others, "one value"))
        if found
    ]


def _name_rows(batch: RolloutBatch, found: list[int], values: dict[int, float]) -> str:
    named = (f"{batch.identities[row]}{f' ({values[row]:.9g})' if values[row] else ''}" for row in found)
    return list_some(list(named), _NUM_LISTED, ", ")


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
