"""A file keeps ``${oc.env:NAME}`` where a text came out of the environment; the run uses the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.config.interpolations import resolve_variables
from mock_scheduler.config.loading import dump_config
from mock_scheduler.correction.report.sources import training_of_run
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.run_folder.finished_run import load_stored_config, read_stored_keys
from mock_scheduler.support.local_key import mark_own
from pipelines.config.loading import load_clip_rule, load_config
from pipelines.config.schema import PipelineConfig

SECRET = "hunter2-and-more"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("NUMBER", "9")
    monkeypatch.setenv("LEVEL", "full")
    monkeypatch.delenv("NOT_SET", raising=False)


def load(folder: Path, text: str, *overrides: str) -> PipelineConfig:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_config("run", config_path=folder, overrides=overrides)


def dumped_again(folder: Path, config: PipelineConfig) -> PipelineConfig:
    (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    return load_config("config", config_path=folder)


TEXT = """\
exp_name: run-${oc.env:TOKEN}
output_dir: ./out/${exp_name}/${oc.env:NOT_SET,x}
system_envs: {MY_TOKEN: "${oc.env:TOKEN}", OTHER: "a ${oc.env:TOKEN} b"}
trace: {patterns: ["${oc.env:TOKEN}", "x"]}
debug: {dump_dir: "./${output_dir}/d"}
seed: ${oc.env:NUMBER}
"""


def test_texts_are_stored_unresolved_and_the_run_has_their_values(tmp_path: Path) -> None:
    config = load(tmp_path, TEXT)
    assert config.system_envs == {"MY_TOKEN": SECRET, "OTHER": f"a {SECRET} b"}
    assert config.exp_name == f"run-{SECRET}"
    text = dump_config(config)
    assert SECRET not in text
    assert "\nexp_name: run-${oc.env:TOKEN}\n" in f"\n{text}"
    assert "  MY_TOKEN: ${oc.env:TOKEN}\n  OTHER: a ${oc.env:TOKEN} b\n" in text
    assert "  - ${oc.env:TOKEN}\n  - x\n" in text
    assert "\noutput_dir: ./out/${exp_name}/${oc.env:NOT_SET,x}\n" in text
    again = dumped_again(tmp_path, config)
    assert again == config
    assert dump_config(again) == text


def test_a_text_that_refers_to_one_is_stored_with_the_variable(tmp_path: Path) -> None:
    text = "exp_name: run-${oc.env:TOKEN}\nseed: 7\ndebug: {dump_dir: './${exp_name}/${seed}'}\n"
    config = load(tmp_path, text)
    assert config.debug.dump_dir == f"./run-{SECRET}/7"
    assert "  dump_dir: ./run-${oc.env:TOKEN}/7\n" in dump_config(config)


def test_an_override_counts_as_the_file_does(tmp_path: Path) -> None:
    config = load(tmp_path, "exp_name: x\n", "system_envs.A='${oc.env:TOKEN}'", "debug.dump_dir=${oc.env:TOKEN}/d")
    text = dump_config(config)
    assert SECRET not in text
    assert dumped_again(tmp_path, config) == config


def test_a_section_of_another_framework_stores_the_variable_too(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "exp_name: x\nactor_rollout_ref: {rollout: {skip_rollout: true, skip_dump_dir: '/tmp/${oc.env:TOKEN}'}}\n",
    )
    assert SECRET in config.rollout_mock.dump_dir
    assert SECRET not in dump_config(config)


def test_numbers_and_words_of_a_closed_list_are_stored_as_they_ran(tmp_path: Path) -> None:
    config = load(tmp_path, "exp_name: x\nseed: ${oc.env:NUMBER}\ntrace: {level: '${oc.env:LEVEL}'}\n")
    text = dump_config(config)
    assert "\nseed: 9\n" in text
    assert "  level: full\n" in text


def test_a_value_that_was_replaced_is_stored_itself(tmp_path: Path) -> None:
    config = load(tmp_path, "exp_name: ${oc.env:TOKEN}\n").model_copy(update={"exp_name": "other"})
    assert "exp_name: other\n" in dump_config(config)


def test_an_interpolation_in_a_plain_text_stays_text(tmp_path: Path) -> None:
    config = load(tmp_path, "exp_name: x\nsystem_envs: {A: '\\${oc.env:TOKEN}'}\n")
    assert config.system_envs == {"A": "${oc.env:TOKEN}"}
    assert dumped_again(tmp_path, config) == config


def test_a_stored_configuration_needs_the_variable_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, "exp_name: x\nsystem_envs: {A: '${oc.env:TOKEN}'}\n")
    monkeypatch.setenv("TOKEN", "of this machine")
    assert dumped_again(tmp_path, config).system_envs == {"A": "of this machine"}
    monkeypatch.delenv("TOKEN")
    with pytest.raises(ConfigError) as caught:
        dumped_again(tmp_path, config)
    assert "system_envs.A: '${oc.env:TOKEN}' cannot be resolved: Environment variable 'TOKEN' not found; export it" in (
        str(caught.value)
    )


def test_what_reads_a_finished_run_has_the_values_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODE", "1")
    monkeypatch.setenv("PRESET", "icepop")
    text = "exp_name: x\nsystem_envs: {MODE_HERE: '${oc.env:MODE}', TOKEN: '${oc.env:TOKEN}'}\n"
    text += "algorithm: {rollout_correction: {preset: '${oc.env:PRESET}'}}\n"
    config = load(tmp_path, text)
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    mark_own(path)
    monkeypatch.delenv("TOKEN")  # a variable that nothing here asks for may be missing
    assert load_stored_config(path).precision == "float32"
    assert load_clip_rule(path).low == 0.2
    monkeypatch.delenv("PRESET")
    with pytest.raises(AlignmentError, match="algorithm: "):
        load_clip_rule(path)


@pytest.mark.parametrize(
    "text",
    [
        "precision: ['${oc.env:PASSWORD}']",
        "trace: {level: ['${oc.env:PASSWORD}']}",
        "align: {tolerance: {gradient: '${oc.env:PASSWORD}'}}",
        "pg_clip: '${oc.env:PASSWORD}'",
        "algorithm: {rollout_correction: {preset: '${oc.env:PASSWORD}'}}",
        "precision: '" + "${" * 5000 + "oc.env:PASSWORD'",
    ],
)
def test_of_a_strangers_run_no_variable_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Errors and reports show these values, and go to whoever sent the folder."""
    monkeypatch.setenv("PASSWORD", "top secret")
    path = tmp_path / "config.yaml"
    path.write_text(f"exp_name: x\n{text}\n")
    said = [repr(read_stored_keys(path))]
    for read in (load_stored_config, load_clip_rule, lambda path: training_of_run(path.parent)):
        try:
            said.append(repr(read(path)))
        except (ConfigError, AlignmentError) as error:
            said.append(str(error))
    assert len(said) == 4
    assert not [line for line in said if "top secret" in line]


def test_a_variable_that_is_missing_leaves_its_text_open() -> None:
    content = {"a": "${oc.env:NOT_SET}", "b": ["${oc.env:NUMBER}"], "c": {"d": "plain ${x}"}}
    assert resolve_variables(content, "a run") == {"a": "${oc.env:NOT_SET}", "b": ["9"], "c": {"d": "plain ${x}"}}


def test_a_stored_configuration_whose_interpolations_double_is_refused_at_once() -> None:
    doubled = {f"k{number}": f"${{k{number + 1}}}${{k{number + 1}}}" for number in range(30)}
    content = {"a": "${oc.env:HOME}${k0}", **doubled, "k30": "x"}
    with pytest.raises(ConfigError, match=r"^a run: with its interpolations resolved it stands for more than"):
        resolve_variables(content, "a run")
