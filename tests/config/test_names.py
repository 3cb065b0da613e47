"""A name that becomes a part of a path leads nowhere else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mock_scheduler.alignment.extract.source import read_diverged
from mock_scheduler.config.align import AlignConfig, CandidateConfig, MatrixConfig
from mock_scheduler.errors import ConfigError, RecordingError
from mock_scheduler.recording.paths import step_folder
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

BAD = ["../x", "a/b", "/a", "..", ".", "", "a\\b", "a\nb", "a\x1b[2Jb", "a\x00b", "\u202ea", " a", "x" * 161]


@pytest.mark.parametrize("name", BAD)
def test_the_name_of_an_experiment_is_refused_at_its_key(name: str) -> None:
    """``exp_name=../x`` moved ``output_dir`` of the shipped configurations."""
    with pytest.raises(ValidationError) as caught:
        PipelineConfig.model_validate({"exp_name": name})
    (problem,) = caught.value.errors()
    assert problem["loc"] == ("exp_name",)
    assert "name" in problem["msg"]


def test_the_refusal_says_what_a_name_may_hold() -> None:
    with pytest.raises(ConfigError, match=r"exp_name: is '\.\./x', which cannot name a folder: expected printable"):
        load_config("quickstart", overrides=["exp_name=../x"])


@pytest.mark.parametrize("name", ["lake", "lake-baseline", "Lake 3 (again)", ".hidden", "ünïcode", "a..b", "x" * 160])
def test_other_names_stay(name: str) -> None:
    assert PipelineConfig.model_validate({"exp_name": name}).exp_name == name


@pytest.mark.parametrize("name", BAD)
def test_candidates_options_and_schedulers_are_refused_as_well(name: str) -> None:
    for section, values in (
        (CandidateConfig, {"name": name}),
        (MatrixConfig, {"options": {name: []}}),
        (AlignConfig, {"candidates": [{"name": name}]}),
    ):
        with pytest.raises(ValidationError):
            section.model_validate(values)
    with pytest.raises(RecordingError, match="cannot name a folder"):
        step_folder("train", name)


def test_a_result_cannot_lead_out_by_a_candidates_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("align")
    (folder / "align.json").write_text('{"candidates": [{"name": "../x", "verdict": "diverged"}]}')
    with pytest.raises(ConfigError, match=r"has no candidate '\.\./x'"):
        read_diverged(folder, "../x")
