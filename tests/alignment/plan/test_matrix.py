"""Candidates out of a list and a matrix."""

from typing import Any

import pytest

from mock_scheduler.alignment.plan.overrides import expand_candidates, layout_overrides
from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.layout import ParallelConfig, parse_layout
from mock_scheduler.errors import ConfigError, LayoutError

ONE = ParallelConfig()
TP2 = "parallel.tensor_model_parallel_size=2"
PP2 = "parallel.pipeline_model_parallel_size=2"
SP = "parallel.sequence_parallel=true"


def expand(*, parallel: ParallelConfig = ONE, reserved: tuple[str, ...] = (), **align: object) -> dict[str, list[str]]:
    """The candidates' own overrides, by name."""
    candidates = expand_candidates(AlignConfig.model_validate(align), parallel, reserved=reserved)
    return {candidate.name: candidate.overrides for candidate in candidates}


def problems_of(**align: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        expand(**align)
    return str(caught.value).split("\n")


def test_a_product_goes_layout_by_layout_and_leaves_out_what_is_excluded() -> None:
    matrix = {
        "layouts": ["tp2-sp", "pp2"],
        "options": {"plain": [], "packing": ["training.sequence_packing=true"], "fast": ["a.b=1", "c=2"]},
        "exclude": ["pp2.f*"],
    }
    assert expand(matrix=matrix) == {
        "tp2-sp": [TP2, SP],
        "tp2-sp.packing": [TP2, SP, "training.sequence_packing=true"],
        "tp2-sp.fast": [TP2, SP, "a.b=1", "c=2"],
        "pp2": [PP2],
        "pp2.packing": [PP2, "training.sequence_packing=true"],
    }


def test_the_list_comes_before_the_matrix_and_layouts_alone_need_no_options() -> None:
    listed = [{"name": "same"}, {"name": "odd", "overrides": ["seed=3"], "exact": False}]
    assert expand(candidates=listed, matrix={"layouts": ["dp2"]}) == {
        "same": [],
        "odd": ["seed=3"],
        "dp2": ["parallel.data_parallel_size=2"],
    }


def test_a_layout_undoes_what_the_baseline_has_and_it_does_not_name() -> None:
    parallel = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    assert layout_overrides("tp2-dp2", parallel) == (
        "parallel.pipeline_model_parallel_size=1",
        "parallel.virtual_pipeline_model_parallel_size=null",
        "parallel.data_parallel_size=2",
        "parallel.sequence_parallel=false",
    )
    assert layout_overrides("pp2-vpp2-sp-tp2", parallel) == ()


def test_every_problem_of_a_matrix_is_said_at_once() -> None:
    matrix = {
        "layouts": ["tp2", "xp3", "tp2", "pp2-tp2", "tp2-pp2"],
        "options": {"plain": ["seed=1"], "packing": []},
        "exclude": ["tp2.pack*", "dp*"],
    }
    assert problems_of(candidates=[{"name": "tp2"}, {"name": "baseline"}], matrix=matrix, reserved=("baseline",)) == [
        "align.matrix.options.plain is ['seed=1'], but plain is the layout alone; set it to [], or rename the option",
        "align.matrix.layouts: 'xp3' is no layout: 'xp3' is no axis with a degree, as in tp2, nor sp; write it as "
        "tp2-sp-pp2; axes are tp, pp, vpp, cp, ep, etp, dp",
        "align.matrix.layouts: 'tp2' is listed more than once",
        "align.matrix.layouts: 'pp2-tp2' and 'tp2-pp2' are the same layout",
        "align.matrix.exclude: 'dp*' matches no candidate; the candidates are tp2, tp2.packing, pp2-tp2, "
        "pp2-tp2.packing, tp2-pp2, tp2-pp2.packing",
        "align.candidates: the alignment itself uses 'baseline'; give the candidate another name",
        "align.candidates: more than one candidate is named 'tp2'",
    ]


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        ({"layouts": ["tp2"], "exclude": ["*"]}, "align.matrix: its one candidate is excluded"),
        ({"layouts": ["tp2", "pp2"], "exclude": ["*"]}, "align.matrix: all of its 2 candidates are excluded"),
        (
            {"options": {"packing": ["x=1"]}},
            "align.matrix.options has no layouts to combine with; add align.matrix.layouts, as in [tp1]",
        ),
        ({"exclude": ["tp2"]}, "align.matrix.exclude: 'tp2' matches no candidate; the candidates are none"),
    ],
)
def test_a_product_that_is_empty_is_an_error_beside_a_list_too(matrix: dict[str, Any], problem: str) -> None:
    assert problems_of(candidates=[{"name": "same"}], matrix=matrix) == [problem]


def test_no_candidate_at_all_is_an_error() -> None:
    assert problems_of() == [
        "there is no candidate: align.candidates and align.matrix are empty; fill one, as in align.candidates: "
        "[{name: tp2, overrides: [...]}] or align.matrix.layouts: [tp2]"
    ]


def test_a_layout_text_has_every_degree() -> None:
    assert parse_layout("tp2-sp-pp4-vpp2-ep8-etp2") == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 2,
        "data_parallel_size": 1,
        "sequence_parallel": True,
    }
    assert parse_layout("tp1")["virtual_pipeline_model_parallel_size"] is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is no axis with a degree, as in tp2, nor sp"),
        ("tp0", "'tp0' is no axis with a degree, as in tp2, nor sp"),
        ("tp", "'tp' is no axis with a degree, as in tp2, nor sp"),
        ("sp2-tp2", "'sp2' is no axis with a degree, as in tp2, nor sp"),
        ("tp2-tp2-sp-sp", "tp is there more than once; sp is there more than once"),
        ("tp2-plain", "'plain' is no axis with a degree, as in tp2, nor sp"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, problem: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert str(caught.value) == (
        f"{text!r} is no layout: {problem}; write it as tp2-sp-pp2; axes are tp, pp, vpp, cp, ep, etp, dp"
    )
