"""A candidate's own code in words: code that never ran, code that ran for nothing, and code nobody can count."""

from dataclasses import replace
from pathlib import Path

import pytest

from mock_scheduler.run_folder.finished_run import RunSummary
from mock_scheduler.verdict.reasons import BitEqual, WithinBounds
from mock_scheduler.verdict.results import CandidateResult
from mock_scheduler.verdict.verdict import Verdict, VerdictKind
from mock_scheduler.verdict.wording.own_code import describe_outside, describe_own_code, remark_on_changes

IDENTICAL = Verdict(kind=VerdictKind.IDENTICAL, why=BitEqual(by_fingerprints=False))
ROUNDING = Verdict(kind=VerdictKind.ROUNDING, why=WithinBounds(is_estimated=False))


def candidate(
    calls: dict[str, int], *, verdict: Verdict = IDENTICAL, entry: str = "my.kernel", module: str | None = None
) -> CandidateResult:
    """A candidate whose run counted these calls; ``module``: where it is not its own ``entry``."""
    run = RunSummary(
        name="own", output_dir=Path("own"), layout="tp1", wall_s=1.0, rollout_s=0.0, elapsed_s=1.0, built={},
        batches={}, own_calls=calls,
    )  # fmt: skip
    return CandidateResult(
        name="own",
        overrides=(),
        layout="tp1",
        log_path=None,
        run=run,
        verdict=verdict,
        entry=entry,
        module=entry if module is None else module,
    )


@pytest.mark.parametrize(
    ("calls", "verdict", "text"),
    [
        (
            {"torch.gelu": 0, "torch.Tanh.forward": 0},
            IDENTICAL,
            "never called, so the verdict says nothing about it: torch.gelu, torch.Tanh.forward",
        ),
        (
            {"torch.gelu": 1200, "torch.Tanh.forward": 0},
            IDENTICAL,
            "called: torch.gelu (1,200 calls); never called: torch.Tanh.forward; it acted, and every bit is equal to "
            "the baseline's",
        ),
        ({"torch.gelu": 1}, ROUNDING, "called: torch.gelu (1 call)"),
        (
            {},
            IDENTICAL,
            "my.kernel put no function and no class of its own into a package before the run, so nothing shows that it "
            "changed anything",
        ),
    ],
)
def test_it_is_said_whether_own_code_acted(calls: dict[str, int], verdict: Verdict, text: str) -> None:
    assert describe_own_code(candidate(calls, verdict=verdict)) == text


@pytest.mark.parametrize(
    ("calls", "verdict", "remark"),
    [
        ({"torch.gelu": 0}, IDENTICAL, "but its own code was never called"),
        ({"torch.gelu": 3, "torch.silu": 0}, IDENTICAL, "although its own code was called"),
        ({}, IDENTICAL, "although it has an entry, my.kernel"),
        ({"torch.gelu": 3}, ROUNDING, ""),
    ],
)
def test_equal_bits_are_not_said_without_a_word_on_own_code(
    calls: dict[str, int], verdict: Verdict, remark: str
) -> None:
    assert remark_on_changes(candidate(calls, verdict=verdict)) == remark


def test_equal_bits_need_no_remark_where_both_sides_have_the_same_code() -> None:
    """Unless the code did not run: then equality says nothing of it."""
    acted, silent = (candidate({"torch.gelu": count}, entry="", module="my.kernel") for count in (2, 0))
    assert (describe_own_code(acted), remark_on_changes(acted)) == ("called: torch.gelu (2 calls)", "")
    assert remark_on_changes(silent) == "but its own code was never called"
    back = candidate({}, entry="pipelines.agentic", module="")
    assert (describe_own_code(back), remark_on_changes(back)) == ("", "")


def test_nothing_is_said_of_a_candidate_without_code_of_its_own() -> None:
    assert describe_own_code(candidate({}, entry="")) == ""
    assert remark_on_changes(candidate({}, entry="")) == ""


def test_an_option_of_which_no_bit_depends_is_said() -> None:
    """A clip range that no ratio reached was ``identical`` as if it had been proved."""
    option = replace(candidate({}, entry=""), options=("pg_clip",), changes=("pg_clip",))
    assert remark_on_changes(option) == "although it changes pg_clip"
    layout = replace(candidate({}, entry=""), changes=("parallel.data_parallel_size",))
    assert remark_on_changes(layout) == ""
    assert remark_on_changes(replace(option, verdict=ROUNDING)) == ""


def test_a_part_of_the_vocabulary_without_a_token_to_choose_is_outside_the_proof() -> None:
    whole = candidate({}, entry="")
    assert whole.run is not None
    assert describe_outside(whole) == ""
    one, two = (replace(whole, run=replace(whole.run, idle_vocabulary=idle)) for idle in (("tp1",), ("tp1", "tp2")))
    assert describe_outside(one) == (
        "no token of tp1's part of the vocabulary may be chosen, so that an error in its part of the softmax could not "
        "show"
    )
    assert "no token of tp1 and tp2's part" in describe_outside(two)
    assert describe_outside(replace(one, run=None)) == ""
