"""What a difference does to the training, of traces whose figures are worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.errors import AlignmentError, TraceError
from mock_scheduler.program import ClipRule
from mock_scheduler.trace.entries import RowTable, StepFooter, TraceEntry
from mock_scheduler.trace.shards import whole
from mock_scheduler.trace.sketch.files import SketchSink
from mock_scheduler.verdict.consequence.consequence import CLIP_STATES, clip_states
from mock_scheduler.verdict.consequence.consequence import find_consequence as find_consequence_by
from mock_scheduler.verdict.consequence.figures import CONSEQUENCE_KINDS, ClipFlip, Consequence
from mock_scheduler.verdict.wording.consequence import describe_consequence
from pipelines.algorithm.geometric_loss import compute_geometric_loss
from pipelines.algorithm.losses import METRIC_SUMS, PolicyLossConfig, PolicyLossInputs, compute_policy_loss
from pipelines.config.loading import load_clip_rule
from tests.trace.builders import entry, place, save, token_piece

#: Two rows of 4 tokens, of which those at 0 to 2 and 4 to 6 say something about a response token.
ROWS = RowTable(
    identities=("default/group 0/episode 0/env 0/turn 0", "default/group 0/episode 0/env 1/turn 0"), lengths=(4, 4)
)
RESPONSE = (0, 1, 2, 4, 5, 6)
CONFIG = {"pg_clip": 0.2, "pg_clip_high": None, "dual_clip": 3.0}

RATIOS = (1.0, 1.3, 1.3, 0.7, 0.7, 4.0)
ADVANTAGES = (1.0, 1.0, -1.0, 1.0, -1.0, -1.0)
#: not clipped, high, not clipped, not clipped, low, dual.
OLD = -1.0

Weights = Mapping[str, Sequence[float]]
BEFORE: Weights = {"w": (0.0, 0.0), "b": (0.0,)}


def by_token(kind: TraceKind, name: str, values: Sequence[float], *, update: int = 0) -> TraceEntry:
    """A tensor of the response tokens."""
    whole_tensor = torch.zeros(8)
    whole_tensor[list(RESPONSE)] = torch.tensor(values)
    return token_piece(whole_tensor, RESPONSE, name=name, kind=kind, is_masked=True, update=update)


def parameters(kind: TraceKind, weights: Weights, *, update: int = 0) -> list[TraceEntry]:
    return [
        entry(whole(name, (len(values),)), torch.tensor(values), kind=kind, update=update)
        for name, values in weights.items()
    ]


def new_logprobs(ratios: Sequence[float]) -> list[float]:
    return [OLD + math.log(ratio) for ratio in ratios]


def side(
    folder: Path,
    entries: Sequence[TraceEntry],
    *,
    config: Mapping[str, object] = CONFIG,
    num_updates: int = 1,
) -> Path:
    """A run's folder with one step."""
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    footer = StepFooter(rows=ROWS, update_rows=((0, 1),) * num_updates, ranks=(0,))
    save(folder / "trace", 0, 1, entries, footer=footer)
    return folder


def tokens(
    ratios: Sequence[float] = RATIOS,
    *,
    advantages: Sequence[float] = ADVANTAGES,
    old: Sequence[float] = (OLD,) * 6,
    rollout: Sequence[float] = (OLD,) * 6,
    ref: Sequence[float] | None = None,
    kept: Sequence[float] | None = None,
) -> list[TraceEntry]:
    """All token tensors of a step with one update."""
    found = [
        by_token("input", "rollout_logprobs", rollout),
        by_token("score", "old_logprobs", old),
        by_token("advantage", "advantages", advantages),
        by_token("output", "logprobs", new_logprobs(ratios)),
    ]
    found += [] if ref is None else [by_token("score", "ref_logprobs", ref)]
    return found + ([] if kept is None else [by_token("advantage", "kept", kept)])


def find_consequence(ours: Path, theirs: Path) -> Consequence:
    return find_consequence_by(ours, theirs, load_clip_rule=load_clip_rule)


def consequence(tmp_path: Path, ours: Sequence[TraceEntry], theirs: Sequence[TraceEntry]) -> Consequence:
    return find_consequence(side(tmp_path / "a", ours), side(tmp_path / "b", theirs))


def test_planted_flips_are_counted_by_the_states_that_they_join(tmp_path: Path) -> None:
    """Of the six tokens the first is now clipped high, the second no more, and the last no more dual clipped."""
    found = consequence(tmp_path, tokens(), tokens((1.3, 1.1, 1.3, 0.7, 0.7, 2.9)))
    assert (found.num_tokens, found.num_clipped, found.num_clip_flips) == (6, 3, 3)
    assert sorted(found.clip_flips, key=lambda flip: flip.baseline + flip.candidate) == [
        ClipFlip(baseline="clipped high", candidate="not clipped", num_tokens=1),
        ClipFlip(baseline="dual clipped", candidate="not clipped", num_tokens=1),
        ClipFlip(baseline="not clipped", candidate="clipped high", num_tokens=1),
    ]
    assert describe_consequence(found).startswith(
        "The baseline clips 3 of 6 response tokens (each counted in every update); 3 (50 %) change their clip state: 1 "
    )


def test_equal_runs_have_no_consequence(tmp_path: Path) -> None:
    entries = [*tokens(), *parameters("initial", BEFORE), *parameters("parameter", {"w": (3.0, 0.0), "b": (4.0,)})]
    found = consequence(tmp_path, entries, entries)
    assert (found.num_clip_flips, found.max_advantage_change, found.num_sign_flips) == (0, 0.0, 0)
    assert (found.update_cosine, found.update_ratio) == ((1.0,), (1.0,))
    assert describe_consequence(found) == (
        "The baseline clips 3 of 6 response tokens (each counted in every update), and the candidate the same ones; "
        f"the KL from the rollout policy stays {mean_k3(RATIOS):.4g}; advantages are equal. The policy's one update "
        "points where the baseline's does to a cosine of 1 (just as long); log-probabilities of trainer and rollout "
        "stay as far apart as they were (0 in the median, 0 in 99 % and 0 at most, token_mult_prob_error 1)."
    )


def mean_k3(ratios: Sequence[float]) -> float:
    return sum(ratio - 1.0 - math.log(ratio) for ratio in ratios) / len(ratios)


def test_kl_is_to_the_reference_where_there_is_one(tmp_path: Path) -> None:
    """k3 of KL(policy‖reference) with d = ref - new: a token half as likely under the reference gives ½ - 1 + ln 2."""
    half, same = [OLD - math.log(2.0)] * 6, [OLD] * 6
    found = consequence(tmp_path, tokens((1.0,) * 6, ref=half), tokens((1.0,) * 6, ref=same))
    assert found.kl_to == "reference"
    assert found.kl_baseline == pytest.approx(math.log(2.0) - 0.5, rel=1e-6)
    assert found.kl_candidate == 0.0
    assert "the KL to the reference policy goes from 0.1931 to 0 (-0.19)" in describe_consequence(found)


def test_advantages_and_their_signs(tmp_path: Path) -> None:
    found = consequence(tmp_path, tokens(), tokens(advantages=(1.0, 1.0, 0.5, 1.0, -1.0, -1.25)))
    assert (found.max_advantage_change, found.max_advantage, found.num_sign_flips) == (1.5, 1.0, 1)
    assert "advantages move by up to 1.5 where the largest is 1, 1 sign changed" in describe_consequence(found)


def test_the_gap_to_the_rollout_is_nemo_rls_metric(tmp_path: Path) -> None:
    """One of six tokens is twice as likely in training: (2 + 5 · 1) / 6. The candidate's trainer agrees with it."""
    rollout = [OLD - math.log(2.0), *[OLD] * 5]
    found = consequence(tmp_path, tokens(rollout=rollout), tokens(old=rollout, rollout=rollout))
    assert found.gaps is not None
    ours, theirs = found.gaps
    assert ours.mult_prob_error == pytest.approx(7.0 / 6.0, rel=1e-6)
    assert (ours.median, theirs.largest, theirs.mult_prob_error) == (0.0, 0.0, 1.0)
    assert ours.largest == pytest.approx(math.log(2.0), rel=1e-6)
    # Between the fifth and the sixth of six sorted values, at 0.99 · 5 = 4.95.
    assert ours.p99 == pytest.approx(0.95 * math.log(2.0), rel=1e-6)


def test_a_log_probability_that_the_engine_did_not_give_is_in_no_gap(tmp_path: Path) -> None:
    rollout = [math.nan, OLD - math.log(2.0), *[OLD] * 4]
    found = consequence(tmp_path, tokens(rollout=rollout), tokens(rollout=rollout))
    assert found.gaps is not None
    assert found.gaps[0].mult_prob_error == pytest.approx(6.0 / 5.0, rel=1e-6)


def test_the_update_is_compared_as_a_whole_over_all_parameters(tmp_path: Path) -> None:
    """(3, 0, 4) and (3, 0, -4): 9 - 16 of 25. Then (0, 1, 0) and (0, 2, 0): the same direction, twice as long."""
    ours = [
        *parameters("initial", BEFORE),
        *parameters("parameter", {"w": (3.0, 0.0), "b": (4.0,)}),
        *parameters("parameter", {"w": (3.0, 1.0), "b": (4.0,)}, update=1),
        *parameters("parameter", {"critic.w": (1.0,)}),
    ]
    theirs = [
        *parameters("initial", BEFORE),
        *parameters("parameter", {"w": (3.0, 0.0), "b": (-4.0,)}),
        *parameters("parameter", {"w": (3.0, 2.0), "b": (-4.0,)}, update=1),
        *parameters("parameter", {"critic.w": (-1.0,)}),
    ]
    found = find_consequence(side(tmp_path / "a", ours, num_updates=2), side(tmp_path / "b", theirs, num_updates=2))
    assert found.updates == ((0, 0), (0, 1))
    assert found.update_cosine == pytest.approx((-0.28, 1.0))
    assert found.update_ratio == pytest.approx((1.0, 2.0))
    assert (
        "a cosine of -0.2800 in the first and -0.2800 at worst (step 0, update 0, just as long)"
        in describe_consequence(found)
    )


def test_an_optimizer_that_stands_still_has_no_direction(tmp_path: Path) -> None:
    ours = [*parameters("initial", BEFORE), *parameters("parameter", {"w": (3.0, 0.0), "b": (4.0,)})]
    theirs = [*parameters("initial", BEFORE), *parameters("parameter", BEFORE)]
    found = consequence(tmp_path, ours, theirs)
    assert math.isnan(found.update_cosine[0])
    assert found.update_ratio == (0.0,)
    assert "of the policy's updates, 1 update did not move both" in describe_consequence(found).lower()


def test_rows_in_another_order_are_matched_by_who_they_are(tmp_path: Path) -> None:
    """The candidate's batch has the second row first; nothing else differs."""
    ours = side(tmp_path / "a", tokens())
    theirs = tmp_path / "b"
    theirs.mkdir()
    (theirs / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    swapped = [replace_values(item) for item in tokens()]
    rows = RowTable(identities=ROWS.identities[::-1], lengths=(4, 4))
    save(theirs / "trace", 0, 1, swapped, footer=StepFooter(rows=rows, update_rows=((0, 1),), ranks=(0,)))
    found = find_consequence(ours, theirs)
    assert (found.num_tokens, found.num_clip_flips, found.max_advantage_change) == (6, 0, 0.0)


def replace_values(item: TraceEntry) -> TraceEntry:
    """The second row's three values before the first row's."""
    return replace(item, tensor=item.tensor.roll(3))


def test_rejected_tokens_are_in_no_clip(tmp_path: Path) -> None:
    found = consequence(tmp_path, tokens(kept=(1.0,) * 6), tokens(kept=(1.0, 0.0, 1.0, 1.0, 1.0, 1.0)))
    assert found.clip_flips == (ClipFlip(baseline="clipped high", candidate="not clipped", num_tokens=1),)


def test_each_side_clips_by_its_own_configuration(tmp_path: Path) -> None:
    """At 1.3 a bound of 1.4 above does not clip, at 0.7 one of 0.65 below does not, and at 4 no dual clip does."""
    wide = {"pg_clip": 0.35, "pg_clip_high": 0.4, "dual_clip": None}
    found = find_consequence(side(tmp_path / "a", tokens()), side(tmp_path / "b", tokens(), config=wide))
    assert (found.num_clipped, found.num_clip_flips) == (3, 3)
    assert {flip.candidate for flip in found.clip_flips} == {"not clipped"}


def test_with_two_policies_the_ratio_is_to_the_rollout(tmp_path: Path) -> None:
    """The trainer's own old log-probabilities would give 1.3 on the second token; to the engine's the ratio is 1."""
    bypass = {**CONFIG, "algorithm": {"rollout_correction": {"bypass_mode": True}}}
    rollout = [OLD, OLD + math.log(1.3), *[OLD] * 4]
    found = find_consequence(
        side(tmp_path / "a", tokens(rollout=rollout)), side(tmp_path / "b", tokens(rollout=rollout), config=bypass)
    )
    assert found.clip_flips == (ClipFlip(baseline="clipped high", candidate="not clipped", num_tokens=1),)


def test_a_loss_without_clip_has_no_flips(tmp_path: Path) -> None:
    plain = {"algorithm": {"rollout_correction": {"bypass_mode": True, "loss_type": "reinforce"}}}
    found = find_consequence(side(tmp_path / "a", tokens(), config=plain), side(tmp_path / "b", tokens(), config=plain))
    assert (found.num_tokens, found.num_clipped, found.num_clip_flips) == (6, None, None)
    assert describe_consequence(found).startswith("Neither loss clips; ")


def test_what_was_not_traced_is_named_with_the_trace_to_take(tmp_path: Path) -> None:
    entries = [*parameters("initial", BEFORE), *parameters("parameter", {"w": (3.0, 0.0), "b": (4.0,)})]
    found = consequence(tmp_path, entries, entries)
    assert describe_consequence(found) == (
        "The policy's one update points where the baseline's does to a cosine of 1 (just as long). Not computed: "
        "clip states, KL, advantages, the gap to the rollout's log-probabilities; run both with trace.level=full "
        "trace.kinds=[initial,input,score,advantage,output,loss,parameter]."
    )
    assert (found.num_tokens, found.kl_baseline, found.max_advantage, found.gaps) == (None, None, None, None)
    assert ",".join(CONSEQUENCE_KINDS) in describe_consequence(found)


def test_a_parameter_that_one_side_lacks_is_said(tmp_path: Path) -> None:
    ours = [*parameters("initial", BEFORE), *parameters("parameter", {"w": (3.0, 0.0), "b": (4.0,)})]
    theirs = [*parameters("initial", BEFORE), *parameters("parameter", {"w": (3.0, 0.0)})]
    found = consequence(tmp_path, ours, theirs)
    assert found.update_cosine == (1.0,)
    assert describe_consequence(found).endswith("The update is without b, which are not traced whole in both runs.")


def test_sketches_are_too_little(tmp_path: Path) -> None:
    ours = side(tmp_path / "a", tokens())
    theirs = tmp_path / "b"
    theirs.mkdir()
    (theirs / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    sink = SketchSink(theirs / "trace", step=0, place=place(0), world_size=1, num_buckets=8)
    for item in tokens():
        sink.add(item)
    sink.close(StepFooter(rows=ROWS, update_rows=((0, 1),), ranks=(0,)))
    found = find_consequence(ours, theirs)
    assert found.num_tokens is None
    assert "run both with trace.level=full" in describe_consequence(found)


def test_traces_without_a_common_step_are_an_error(tmp_path: Path) -> None:
    ours = side(tmp_path / "a", tokens())
    theirs = side(tmp_path / "b", tokens())
    (theirs / "trace" / "step_000000").rename(tmp_path / "away")
    save(theirs / "trace", 0, 1, tokens(), step=1, footer=StepFooter(rows=ROWS, update_rows=((0, 1),), ranks=(0,)))
    with pytest.raises(TraceError, match="have no step in common"):
        find_consequence(ours, theirs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "pg_clip: much\ndual_clip: true\n",
            "pg_clip is 'much', expected a number; dual_clip is True, expected a number",
        ),
        ("- 1\n", "is not a configuration: it has no keys"),
        ("a: [\n", "is not YAML: line 2: "),
    ],
)
def test_a_configuration_that_says_no_clip_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(AlignmentError) as caught:
        load_clip_rule(path)
    assert message in str(caught.value)


def test_keys_that_a_configuration_lacks_have_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("exp_name: x\n")
    assert load_clip_rule(tmp_path / "config.yaml") == ClipRule(low=0.2, high=0.2)


@given(
    st.lists(
        st.tuples(st.floats(min_value=-30.0, max_value=30.0, width=32), st.sampled_from([-2.0, -0.5, 0.0, 0.5, 2.0])),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([None, 1.5, 3.0]),
    st.booleans(),
)
def test_states_are_where_the_loss_itself_clips(
    cells: list[tuple[float, float]], dual: float | None, is_geometric: bool
) -> None:
    new = torch.tensor([[cell[0] for cell in cells]])
    advantages = torch.tensor([[cell[1] for cell in cells]])
    inputs = PolicyLossInputs(
        new_logprobs=new,
        entropy=torch.zeros_like(new),
        old_logprobs=torch.zeros_like(new),
        ref_logprobs=None,
        advantages=advantages,
        response_mask=torch.ones_like(new, dtype=torch.bool),
    )
    dual = None if is_geometric else dual
    config = PolicyLossConfig(pg_clip=0.2, pg_clip_high=0.3, dual_clip=dual)
    output = (compute_geometric_loss if is_geometric else compute_policy_loss)(inputs, config)
    sums = dict(zip(METRIC_SUMS, output.metrics.tolist(), strict=True))
    states = clip_states(ClipRule(low=0.2, high=0.3, dual=dual, is_geometric=is_geometric), new, advantages)
    counts = {name: int((states == number).sum()) for number, name in enumerate(CLIP_STATES)}
    assert counts["clipped low"] + counts["clipped high"] == sums["clip_frac"]
    assert counts["dual clipped"] == sums["dual_clip_frac"]
