"""The consequence of another clip range in real runs of one process, counted a second time from other tensors."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from mock_scheduler.trace.entries import TraceKey
from mock_scheduler.trace.full.reader import TraceReader, open_trace
from mock_scheduler.verdict.consequence.consequence import find_consequence
from mock_scheduler.verdict.consequence.figures import CONSEQUENCE_KINDS
from pipelines.config.loading import load_clip_rule
from tests.pipelines.tiny_runs import run_tiny, write_tiny_config

CLIPS = {"baseline": 0.2, "candidate": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The same recording trained on with two clip ranges."""
    root = tmp_path_factory.mktemp("clips")
    configs = write_tiny_config(root)
    for name, mode in (("baseline", "dump"), ("candidate", "mock")):
        overrides = [
            f"output_dir={root / name}",
            "rollout_mock.enable=true",
            f"rollout_mock.mode={mode}",
            f"rollout_mock.dump_dir={root / 'recording'}",
            "trace.level=full",
            f"trace.kinds=[{','.join(CONSEQUENCE_KINDS)}]",
            f"pg_clip={CLIPS[name]}",
        ]
        done = run_tiny(configs, overrides)
        assert done.returncode == 0, done.stderr
    return {name: root / name for name in CLIPS}


def count_states(trace: TraceReader, *, clip: float) -> tuple[dict[tuple[int, int, int], str], float]:
    """By step, update and token: beyond which end of the range the loss's own ratio is, where that is clipped; and
    how many tokens the metric of the run says were clipped."""
    states: dict[tuple[int, int, int], str] = {}
    from_metric = 0.0
    for step, update in itertools.product(trace.steps, range(4)):
        ratio = trace.merge(TraceKey(step=step, update=update, kind="loss", name="ratio"))
        advantages = trace.merge(TraceKey(step=step, update=0, kind="advantage", name="advantages")).tensor.tolist()
        assert ratio.present is not None
        for token in ratio.present.nonzero().flatten().tolist():
            value, advantage = float(ratio.tensor[token]), advantages[token]
            high, low = advantage > 0 and value > 1 + clip, advantage < 0 and value < 1 - clip
            states[step, update, token] = "clipped high" if high else "clipped low" if low else "not clipped"
        fraction, number = (
            float(trace.merge(TraceKey(step=step, update=update, kind="loss", name=f"mean.{name}")).tensor)
            for name in ("clip_frac", "num_response_tokens")
        )
        from_metric += fraction * number
    return states, from_metric


def test_flips_are_those_counted_from_the_losses_own_ratios(runs: Mapping[str, Path]) -> None:
    found = find_consequence(runs["baseline"], runs["candidate"], load_clip_rule=load_clip_rule)
    with open_trace(runs["baseline"] / "trace") as ours, open_trace(runs["candidate"] / "trace") as theirs:
        before, metric = count_states(ours, clip=CLIPS["baseline"])
        after, _ = count_states(theirs, clip=CLIPS["candidate"])
    assert before.keys() == after.keys()
    flips = Counter((before[token], after[token]) for token in before if before[token] != after[token])
    assert flips.total() > 0
    assert found.num_tokens == len(before)
    assert found.num_clipped == sum(state != "not clipped" for state in before.values()) == round(metric)
    assert {(flip.baseline, flip.candidate): flip.num_tokens for flip in found.clip_flips} == dict(flips)
    assert found.num_clip_flips == flips.total()


def test_the_first_updates_agree_and_later_ones_turn_away(runs: Mapping[str, Path]) -> None:
    """Before anything is clipped both are the same run, to the last bit."""
    found = find_consequence(runs["baseline"], runs["candidate"], load_clip_rule=load_clip_rule)
    assert found.updates == tuple(itertools.product((0, 1), range(4)))
    assert found.update_cosine[0] == 1.0
    assert min(found.update_cosine) < 0.999
    assert found.kl_to == "reference"
    assert found.gaps is not None
    assert found.gaps[0].largest < 1e-5 < found.gaps[1].largest
