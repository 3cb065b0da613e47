"""What a trace selects: kinds, globs of names, ranks; and what is said of a glob that selects nothing."""

from __future__ import annotations

import pytest

from mock_scheduler.config.instruments import TraceConfig
from mock_scheduler.trace.selection import TraceSelection, describe_unmatched

QKV = "decoder.layers.3.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.3.mlp.linear_fc1.weight"
HINT = "Correct or remove them, or add the kind that has such names to trace.kinds"


def selection_of(**values: object) -> TraceSelection:
    return TraceSelection(TraceConfig.model_validate({"level": "full", **values}))


@pytest.mark.parametrize(
    ("patterns", "exclude", "expected"),
    [
        (["*"], [], [True, True]),
        (["decoder.layers.3.*"], ["*.mlp.*"], [True, False]),
        (["*linear_fc[12]*"], [], [False, True]),
        (["decoder.layers.?.mlp.linear_fc1.weight"], [], [False, True]),
        (["*.weight"], ["*"], [False, False]),
        (["DECODER.*"], [], [False, False]),
        (["layers.3"], [], [False, False]),  # a glob is of the whole name
    ],
)
def test_a_name_is_selected_by_any_pattern_and_no_exclusion(
    patterns: list[str], exclude: list[str], expected: list[bool]
) -> None:
    selection = selection_of(patterns=patterns, exclude=exclude)
    assert [selection.wants("gradient", name) for name in (QKV, FC1)] == expected


def test_kinds_and_ledgers_are_selected_apart() -> None:
    selection = selection_of(kinds=["gradient", "collective"])
    assert selection.wants_kind("gradient")
    assert not selection.wants_kind("parameter")
    assert not selection.wants("parameter", QKV)
    assert selection.wants_ledger("collective")
    assert not selection.wants_ledger("random")


def test_nothing_is_selected_where_the_trace_is_off() -> None:
    selection = selection_of(level="off", kinds="all")
    assert not selection.wants("gradient", QKV)
    assert not selection.wants_ledger("random")
    assert not selection.writes(0)


@pytest.mark.parametrize(("ranks", "expected"), [(None, [True, True, True]), ([2, 0], [True, False, True])])
def test_ranks_that_are_not_chosen_write_nothing(ranks: list[int] | None, expected: list[bool]) -> None:
    selection = selection_of(ranks=ranks)
    assert [selection.writes(global_rank) for global_rank in range(3)] == expected


def test_only_names_of_chosen_kinds_count_as_seen_and_matched() -> None:
    selection = selection_of(kinds=["gradient"], patterns=["*qkv*", "*fc1*"])
    selection.wants("gradient", QKV)
    selection.wants("parameter", FC1)
    assert selection.names == {QKV}
    assert selection.matched == {"*qkv*"}


def test_a_misspelt_pattern_is_told_with_the_nearest_names() -> None:
    names = {QKV, FC1, "output_layer.weight", "embedding.word_embeddings.weight"}
    message = describe_unmatched(
        ["*qkv*", "decoder.layer.3.self_attention.linear_qkv.weight"], names, matched={"*qkv*"}
    )
    assert message == (
        "trace.patterns do not all select something:\n"
        "  - 'decoder.layer.3.self_attention.linear_qkv.weight' selects nothing: it matches none of 4 names; the "
        f"nearest are {QKV}, {FC1}, output_layer.weight\n{HINT}"
    )


def test_a_pattern_whose_names_are_all_excluded_is_told_apart() -> None:
    selection = selection_of(patterns=["*.mlp.*"], exclude=["*.weight"])
    selection.wants("gradient", FC1)
    message = describe_unmatched(selection.patterns, selection.names, matched=selection.matched)
    assert f"'*.mlp.*' selects nothing: trace.exclude takes out all that it matches, as {FC1}\n" in message


def test_a_kind_that_the_run_does_not_have_is_told() -> None:
    selection = selection_of(kinds=["router"])
    message = describe_unmatched(selection.patterns, selection.names, matched=selection.matched)
    assert "'*' selects nothing: none of the chosen trace.kinds has a tensor in this run\n" in message


def test_ledgers_alone_need_no_names_but_a_pattern_for_them_is_an_error() -> None:
    everything, other = selection_of(kinds=["random"]), selection_of(kinds=["random"], patterns=["a.*"])
    assert describe_unmatched(everything.patterns, everything.names, matched=everything.matched) == ""
    assert "'a.*' selects nothing" in describe_unmatched(other.patterns, other.names, matched=other.matched)
