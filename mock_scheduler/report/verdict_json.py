"""Writes one verdict with all its grounds as values of strict JSON.

Contract: numbers are numbers, but NaN and infinities, unknown to JSON, are the texts ``"nan"``, ``"inf"`` and
``"-inf"``. Every list of details has at most ``MAX_LISTED`` items, in the order of computation, and beside it stands
``num_…`` with how many there are in all. Facts are fields; the worded texts beside them (``reason``, ``sentence``,
``message``, ``text``, ``command``) are the ones that terminal and page show. A verdict is an object of

- ``verdict``, ``exit_code``, ``reason``, ``sentence`` (the first divergence in one sentence, or null), ``full_dump``
  (overrides of the full trace to take after a comparison of sketches);
- ``why``: the reason as facts: ``name`` is a class of ``verdict.reasons``, and the rest are its fields;
- ``first_divergence``: null, or ``step``, ``update``, ``kind``, ``name``, ``value``, ``bound``, ``message``,
  ``is_selection``, ``is_estimate``, ``before`` (null, or ``num_compared``, ``num_equal`` and ``num_unjudged`` tensors
  before it), ``index``, ``sample``, ``position``, ``baseline_ranks`` and ``candidate_ranks`` (of the worst element, or
  null), ``residual`` and ``locality`` (null, or as in ``compare.differences``), ``evidence`` (a class of
  ``verdict.divergences.Evidence``) and ``difference`` (null, or a tensor as below);
- ``proofs``: of an alignment, those that were tried, strongest first: ``name``, ``outcome``, ``text``,
  ``num_compared``, ``num_equal``, ``seconds``, ``facts`` (null, or ``name`` and the fields of a class of
  ``verdict.verdict.ProofFacts``) and ``compared`` (null, or ``verdict``, ``why`` and ``first_divergence`` of the
  comparison that the proof judges);
- ``suspicions`` (``test``, ``step``, ``update``, ``name``, ``value``, ``limit``, ``text``) and ``tests`` (``test``,
  ``num_looked_at``, ``smallest``, ``text``): differences beyond any explanation by noise, and the tests for them;
- ``unseen``: null where the comparison looked at all modules, parameters and steps, or ``modules`` (``name``,
  ``reason``) and ``module_share`` (of the compared parameters' elements), ``parameters`` (``name``, ``num_elements``)
  and ``parameter_share`` (of all elements, or null), ``steps`` (``side`` that was not to have them, ``why``: before,
  after, untraced; and ``steps``, as in ``0-1``) and ``last_state`` (whether the optimizer's moments behind the last
  update were not compared), with ``text``;
- ``limits``: null, or ``num_not_compared``, ``num_flipped_tokens``, ``turned``, ``hidden_from_step``;
- ``smallest_error``: ``bounds`` (by kind, the smallest relative error in sight as a divergence),
  ``num_without_size``, ``nearest_metric``;
- ``metrics``: null, or ``steps``, ``differences`` (by metric: ``name``, ``num_steps``, ``bit_equal``, ``max_abs``,
  ``max_abs_step``, ``max_relative``, ``max_relative_step``, ``times_bound``, ``nearest_step``, ``bound``,
  ``first_different_step``, ``first_exceeding_step``) and ``findings``;
- ``tensors``: null, or as follows.

``tensors`` is an object of ``level`` (``full``, or ``sketch``: figures are estimates), ``steps``, ``num_compared``,
``tiers`` (by kind: how many are ``identical``, ``ulp``, ``tolerance``, ``diverged``, ``missing``, ``unobserved``,
``unjudged``, ``undecided``), ``groups`` and ``per_step`` (by kind: ``num_compared``, ``num_bit_equal``, ``worst``,
``fraction_excluded``, ``num_unjudged``), ``exceeding`` (tensors beyond their bound), ``undecided``, ``nearest`` (the
``NUM_NEAREST`` tensors nearest to their bound, worst first), ``findings``, ``unusable``,
``baseline_replica_conflicts``, ``candidate_replica_conflicts``, ``not_compared``, ``flips``, ``ledgers`` and ``notes``.
A tensor has all fields of ``compare.tensors.TensorDifference``, and ``tier``, ``is_judged`` and ``margin``.
A finding is one of ``compare.findings.Finding``. ``bounds`` beside it are ``source`` (``noise``, ``theory``,
``stated``), ``description``, ``advice`` (how to have measured ones, or empty) and ``noise``: null, or ``baseline``
(digest), ``seeds``, ``unit_roundoffs`` and ``num_tensors`` of the measurement.
"""

from __future__ import annotations

from mock_scheduler.comparison.tensors import TensorComparison
from mock_scheduler.comparison.walk.metrics import MetricComparison
from mock_scheduler.report.comparison_json import (
    bounded,
    conflict_to_json,
    metric_to_json,
    metrics_to_json,
    suspicion_to_json,
    tensor_to_json,
    tensors_to_json,
    test_to_json,
)
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.documents import dataclass_to_json, to_json
from mock_scheduler.trace.full.reader import ReplicaConflict
from mock_scheduler.verdict.consequence.figures import Consequence
from mock_scheduler.verdict.coverage import Unseen, find_limits, find_smallest_error, find_unexercised
from mock_scheduler.verdict.divergences import Divergence
from mock_scheduler.verdict.localisation import DifferingTensor, GraftedModule, Localisation
from mock_scheduler.verdict.reasons import NotDeterministic, NotRepeated, Reason, StaysInFloat64, TracedOtherThings
from mock_scheduler.verdict.verdict import Proof, ProofFacts, Verdict
from mock_scheduler.verdict.wording.consequence import describe_consequence
from mock_scheduler.verdict.wording.coverage import describe_unseen
from mock_scheduler.verdict.wording.divergences import describe_evidence
from mock_scheduler.verdict.wording.localisation import (
    compare_command,
    describe_end,
    describe_localisation,
    describe_look,
    describe_module,
)
from mock_scheduler.verdict.wording.proofs import describe_proof
from mock_scheduler.verdict.wording.verdicts import describe_reason, describe_sentence


def verdict_to_json(verdict: Verdict) -> dict[str, JSON]:
    """Returns the object of the module's docstring."""
    return {
        "verdict": verdict.kind.value,
        "exit_code": int(verdict.exit_code),
        "reason": describe_reason(verdict),
        "sentence": describe_sentence(verdict) or None,
        "why": _why(verdict.why),
        "full_dump": list(verdict.full_dump),
        "first_divergence": _divergence(verdict.first),
        "proofs": [_proof(proof) for proof in verdict.proofs],
        "suspicions": [suspicion_to_json(item) for item in verdict.suspicions],
        "tests": [test_to_json(item) for item in verdict.tests],
        "unseen": _unseen(verdict.unseen),
        "limits": _limits(verdict.tensors),
        "unexercised": _unexercised(verdict.metrics),
        "smallest_error": _smallest_error(verdict),
        "metrics": None if verdict.metrics is None else metrics_to_json(verdict.metrics),
        "tensors": None if verdict.tensors is None else tensors_to_json(verdict.tensors),
    }


def localisation_to_json(found: Localisation | None) -> JSON:
    """All fields of a localisation, and ``sentence``, ``command``, and the ``text`` of modules and of the end."""
    if found is None:
        return None
    end = found.end
    return {
        "sentence": describe_localisation(found),
        "step": found.step,
        "update": found.update,
        "phase": found.phase,
        "kind": found.kind,
        "name": found.name,
        "origin": _differing(found.origin),
        "is_exact": found.is_exact,
        "made_by": found.made_by,
        "causes": [_module(item, found, number) for number, item in enumerate(found.causes)],
        **bounded("amplifiers", found.amplifiers, lambda item: _module(item, found, 0)),
        "num_before": found.num_before,
        "num_others": found.num_others,
        **bounded("remaining", found.remaining),
        "end": None if end is None else {**dataclass_to_json(end), "text": describe_end(end)},
        **bounded("reductions", found.reductions, _differing),
        **bounded("also", found.also, _differing),
        "num_equal": found.num_equal,
        "num_later": found.num_later,
        "trace_dirs": to_json(found.trace_dirs),
        "command": compare_command(found),
        "seconds": found.seconds,
    }


def consequence_to_json(found: Consequence | None) -> JSON:
    """Returns all fields of a consequence, and its ``text``."""
    return None if found is None else {**dataclass_to_json(found), "text": describe_consequence(found)}


def _tagged(value: ReplicaConflict | ProofFacts | Reason) -> dict[str, JSON]:
    """Returns the name of a class, and its fields."""
    fields = conflict_to_json(value) if isinstance(value, ReplicaConflict) else dataclass_to_json(value)
    return {"name": type(value).__name__, **fields}


def _why(why: Reason) -> dict[str, JSON]:
    match why:
        case NotDeterministic() | StaysInFloat64():
            return {"name": type(why).__name__, "otherwise": _why(why.otherwise)}
        case NotRepeated(first=first):
            place = {
                "step": first.key.step,
                "update": first.key.update,
                "kind": first.key.kind,
                "tensor": first.key.name,
            }
            return {
                "name": type(why).__name__,
                "first": {**place, "relative": first.relative},
                "otherwise": _why(why.otherwise),
            }
        case TracedOtherThings():
            return {"name": type(why).__name__, **bounded("findings", why.findings)}
        case _:
            return _tagged(why)


def _proof(proof: Proof) -> JSON:
    compared = proof.compared
    shown: JSON = None
    if compared is not None:
        first = _divergence(compared.first)
        shown = {"verdict": compared.kind.value, "why": _why(compared.why), "first_divergence": first}
    return {
        "name": proof.name,
        "outcome": proof.outcome,
        "text": describe_proof(proof),
        "num_compared": proof.num_compared,
        "num_equal": proof.num_equal,
        "seconds": proof.seconds,
        "facts": None if proof.facts is None else _tagged(proof.facts),
        "compared": shown,
    }


def _divergence(divergence: Divergence | None) -> JSON:
    if divergence is None:
        return None
    difference, worst = divergence.difference, divergence.worst
    return {
        "step": divergence.step,
        "update": divergence.update,
        "kind": divergence.kind,
        "name": divergence.name,
        "value": to_json(divergence.value),
        "bound": to_json(divergence.bound),
        "message": describe_evidence(divergence),
        "is_selection": divergence.is_selection,
        "is_estimate": divergence.is_estimate,
        "before": to_json(divergence.before),
        "index": None if worst is None else to_json(worst.index),
        "sample": None if worst is None else worst.sample,
        "position": None if worst is None else worst.position,
        "baseline_ranks": None if worst is None else to_json(worst.baseline_ranks),
        "candidate_ranks": None if worst is None else to_json(worst.candidate_ranks),
        "residual": to_json(divergence.residual),
        "locality": to_json(divergence.locality),
        "evidence": type(divergence.evidence).__name__,
        "difference": None if difference is None else tensor_to_json(difference),
    }


def _unexercised(metrics: MetricComparison | None) -> JSON:
    """The parts of training that were exactly 0 at every step."""
    found = find_unexercised(metrics)
    return None if found is None else dataclass_to_json(found)


def _unseen(unseen: Unseen | None) -> JSON:
    if unseen is None:
        return None
    return {
        "text": describe_unseen(unseen),
        **bounded("modules", list(unseen.modules.items()), lambda item: {"name": item[0], "reason": item[1]}),
        "module_share": unseen.module_share,
        **bounded(
            "parameters", list(unseen.parameters.items()), lambda item: {"name": item[0], "num_elements": item[1]}
        ),
        "parameter_share": unseen.parameter_share,
        "steps": [{"side": item.side, "why": item.why, "steps": str(item.steps)} for item in unseen.steps],
        "last_state": unseen.last_state,
    }


def _limits(tensors: TensorComparison | None) -> JSON:
    if tensors is None:
        return None
    limits = find_limits(tensors)
    turned = limits.turned
    return {
        "num_not_compared": limits.num_not_compared,
        "num_flipped_tokens": limits.num_flipped_tokens,
        "turned": None
        if turned is None
        else {
            "num_turned": turned.num_turned,
            "num_decisions": turned.num_decisions,
            "first": to_json(turned.first.key),
        },
        "hidden_from_step": limits.hidden_from_step,
    }


def _smallest_error(verdict: Verdict) -> JSON:
    found = find_smallest_error(verdict.metrics, verdict.tensors)
    nearest = found.nearest_metric
    return {**dataclass_to_json(found), "nearest_metric": None if nearest is None else metric_to_json(nearest)}


def _differing(item: DifferingTensor) -> JSON:
    return {
        **dataclass_to_json(item),
        "difference": None if item.difference is None else tensor_to_json(item.difference),
        "conflict": None if item.conflict is None else conflict_to_json(item.conflict),
        "text": describe_look(item),
    }


def _module(module: GraftedModule, found: Localisation, number: int) -> JSON:
    return {
        **dataclass_to_json(module),
        "tensor": None if module.tensor is None else _differing(module.tensor),
        "text": describe_module(module, found, is_first=number == 0),
    }
