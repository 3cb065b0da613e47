"""Loading: composition, overrides, interpolation, and every error that a user acts on."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mock_scheduler.config.loading import ConfigSource, dump_config, parse_config_arguments
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig


def write_config(folder: Path, text: str, *, name: str = "run") -> None:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def load_text(folder: Path, text: str, *overrides: str) -> PipelineConfig:
    write_config(folder, text)
    return load_config("run", config_path=folder, overrides=overrides)


def error_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    return str(caught.value)


def test_defaults_list_is_composed_and_the_file_itself_wins(tmp_path: Path) -> None:
    write_config(tmp_path, "exp_name: base\nseed: 7\nmodel: {num_layers: 4}\n", name="base")
    config = load_text(tmp_path, "defaults: [base, _self_]\nexp_name: mine\nmodel: {hidden_size: 32}\n")
    assert (config.exp_name, config.seed) == ("mine", 7)
    assert (config.model.num_layers, config.model.hidden_size) == (4, 32)


def test_plain_override_sets_keys_that_the_yaml_does_not_have(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "exp_name: x\n",
        "parallel.tensor_model_parallel_size=2",
        "custom_envs.FrozenLake.env_config.format_penalty=-0.5",
        "training.lr=1e-4",
        "system_envs.CUBLAS_WORKSPACE_CONFIG=:4096:8",
    )
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.custom_envs["FrozenLake"].env_config.format_penalty == -0.5
    assert config.training.lr == 1e-4
    assert config.system_envs == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_hydra_forms_add_force_and_delete_work(tmp_path: Path) -> None:
    config = load_text(tmp_path, "exp_name: x\nseed: 7\n", "+max_steps=3", "++pg_clip=0.3", "~seed")
    assert (config.max_steps, config.pg_clip, config.seed) == (3, 0.3, 42)


def test_override_of_a_config_group_selects_a_file(tmp_path: Path) -> None:
    write_config(tmp_path, "num_layers: 2\n", name="model/small")
    write_config(tmp_path, "num_layers: 6\n", name="model/large")
    config = load_text(tmp_path, "defaults: [{model: small}, _self_]\nexp_name: x\n", "model=large")
    assert config.model.num_layers == 6


def test_environment_variables_are_interpolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_STEPS", "5")
    monkeypatch.delenv("TEST_ABSENT", raising=False)
    config = load_text(
        tmp_path,
        "exp_name: ${oc.env:TEST_ABSENT,fallback}\nmax_steps: ${oc.env:TEST_STEPS}\noutput_dir: out/${exp_name}\n",
    )
    assert (config.exp_name, config.max_steps, config.output_dir) == ("fallback", 5, "out/fallback")


def test_integers_in_system_envs_become_strings(tmp_path: Path) -> None:
    config = load_text(tmp_path, "exp_name: x\nsystem_envs: {NCCL_NVLS_ENABLE: 0, DETERMINISTIC_MODE: '1'}\n")
    assert config.system_envs == {"NCCL_NVLS_ENABLE": "0", "DETERMINISTIC_MODE": "1"}


def test_repeated_loading_leaves_process_and_folder_as_they_were(tmp_path: Path) -> None:
    before = (Path.cwd(), dict(os.environ), list(logging.getLogger().handlers))
    first = load_text(tmp_path, "exp_name: x\n", "seed=1")
    second = load_text(tmp_path, "exp_name: x\n", "seed=1")
    assert first == second
    assert (Path.cwd(), dict(os.environ), list(logging.getLogger().handlers)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_dumped_config_loads_back_equal(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "exp_name: '1e5'\nsystem_envs: {A: '0', B: 'on', C: 'null'}\ntraining: {lr: 3.0e-7}\n"
        "align: {candidates: [{name: tp2, overrides: [parallel.tensor_model_parallel_size=2]}]}\n"
        "save_steps: 5\nrollout_mock: {enable: true, mode: cache, steps: '0-19, 40, 100-', missing_step: repeat,\n"
        "  schedule: [{mode: mock, steps: [1, '3-4'], kinds: [train]}], retention: {keep_last: 3, pin_steps: 7}}\n",
    )
    text = dump_config(config)
    assert load_text(tmp_path, text) == config
    assert text == OmegaConf.to_yaml(OmegaConf.create(yaml.safe_load(text)))


# "???" marks a value that is still to be given, so no loaded configuration has it.
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12).filter(
    lambda text: text != "???"
)


@settings(max_examples=15)
@given(text=TEXTS)
@example(text="\\")
@example(text="\\\\${y}\\")
def test_any_text_survives_dump_and_load(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """A backslash before ``${x}`` was read as its escape, and the text then as an interpolation."""
    config = PipelineConfig(exp_name="x", system_envs={"A": text, "B": f"{text}${{x}}"})
    assert load_text(tmp_path_factory.mktemp("dumped"), dump_config(config)) == config


def test_unknown_mode_names_the_known_ones(tmp_path: Path) -> None:
    assert error_of(tmp_path, "exp_name: x\nrollout_mock: {mode: replay}\n") == (
        f"configuration 'run' ({tmp_path}/run.yaml) has 1 problem:\n"
        "  - rollout_mock.mode: unknown mode 'replay'; known modes: real, dump, mock, cache, verify"
    )


def test_all_problems_are_listed_with_the_override_that_caused_them(tmp_path: Path) -> None:
    text = "exp_name: x\nrollout_mock: {dumpdir: d}\nmodel: {normalization: batch}\nsystem_envs: {A: true}\n"
    assert error_of(tmp_path, text, "max_steps=-1", "trace.levle=full") == (
        f"configuration 'run' ({tmp_path}/run.yaml) has 5 problems:\n"
        "  - max_steps: is -1, should be greater than 0 (given as 'max_steps=-1')\n"
        "  - rollout_mock.dumpdir: unknown key; nearest known key: rollout_mock.dump_dir; "
        "known keys of rollout_mock: allow_nondeterministic, background, compression, dump_dir, enable, every, "
        "missing_step, mode, on_difference, on_duplicate_rows, on_implausible_rows, on_low_disk, on_mismatch, "
        "on_partial_groups, origin, random_states, retention, schedule, steps\n"
        "  - system_envs.A: is True, should be a string; quote the variable's text, for example '1'\n"
        "  - model.normalization: unknown value 'batch'; known values: RMSNorm, LayerNorm\n"
        "  - trace.levle: unknown key; nearest known key: trace.level; "
        "known keys of trace: dump_every_n_steps, exclude, kinds, level, operations, "
        "part_bytes, patterns, ranks, sketch_buckets, steps (given as 'trace.levle=full')"
    )


def test_of_two_overrides_of_a_key_the_one_in_effect_is_named(tmp_path: Path) -> None:
    said = error_of(tmp_path, "exp_name: x\n", "max_steps=-1", "seed=3", "max_steps=-2")
    assert said.splitlines()[1:] == ["  - max_steps: is -2, should be greater than 0 (given as 'max_steps=-2')"]


def test_unknown_key_inside_dicts_and_lists_is_located(tmp_path: Path) -> None:
    text = "exp_name: x\ncustom_envs: {Lake: {env_config: {siz: 3}}}\nalign: {candidates: [{nam: a, name: b}]}\n"
    message = error_of(tmp_path, text)
    assert (
        "custom_envs.Lake.env_config.siz: unknown key; nearest known key: custom_envs.Lake.env_config.size" in message
    )
    assert "align.candidates.0.nam: unknown key; nearest known key: align.candidates.0.name" in message


def test_layout_rules_are_listed_below_their_problem(tmp_path: Path) -> None:
    assert error_of(tmp_path, "exp_name: x\n", "parallel.pipeline_model_parallel_size=3") == (
        f"configuration 'run' ({tmp_path}/run.yaml) has 1 problem:\n"
        "  - layout tp1 pp3 dp1 (3 processes: tp 1, pp 3, vpp 1, cp 1, ep 1, etp 1, dp 1, sequence parallelism off) "
        "cannot be run:\n"
        "    - model.num_layers 2 is not a multiple of pipeline_model_parallel_size 3"
    )


def test_open_values_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_ABSENT", raising=False)
    text = (
        "exp_name: ???\noutput_dir: ${oc.env:TEST_ABSENT}/x\nseed: ${sed}\n"
        "align: {baseline: ['${oc.env:TEST_ABSENT}']}\n"
    )
    assert error_of(tmp_path, text) == (
        f"configuration 'run' ({tmp_path}/run.yaml) has 4 problems:\n"
        "  - exp_name: has no value yet; give it as exp_name=VALUE\n"
        "  - output_dir: '${oc.env:TEST_ABSENT}/x' cannot be resolved: Environment variable 'TEST_ABSENT' not found; "
        "export it, or give a default: ${oc.env:NAME,default}\n"
        "  - seed: '${sed}' refers to a key that is not there: Interpolation key 'sed' not found\n"
        "  - align.baseline[0]: '${oc.env:TEST_ABSENT}' cannot be resolved: Environment variable 'TEST_ABSENT' not "
        "found; export it, or give a default: ${oc.env:NAME,default}"
    )


def test_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    write_config(tmp_path, "exp_name: x\n", name="frozen_lake")
    write_config(tmp_path, "exp_name: x\n", name="align")
    with pytest.raises(ConfigError) as caught:
        load_config("frozenlake", config_path=tmp_path)
    assert str(caught.value) == (
        f"no configuration 'frozenlake' in {tmp_path}; nearest: frozen_lake; there are: align, frozen_lake. "
        "To begin with one of your own: mock-scheduler new DIR"
    )


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("run", config_path=tmp_path / "none")
    assert str(caught.value) == (
        f"config path is not a folder: {tmp_path}/none; give the folder of YAML files as config_path (--config-path)"
    )


def test_unreadable_overrides_are_all_named(tmp_path: Path) -> None:
    assert error_of(tmp_path, "exp_name: x\n", "a.b=^x", "seed=1", "c") == (
        "overrides that cannot be read:\n"
        "  - 'a.b=^x': token recognition error at: '^'\n"
        "  - 'c': missing EQUAL at '<EOF>'\n"
        "Write them as a.b=c; quote values that hold special characters, as in 'a.b=\"^x\"'."
    )


def test_an_unreadable_list_or_object_is_refused_with_how_to_quote_it(tmp_path: Path) -> None:
    override = "align.candidates=[{name: tp2, overrides: [parallel.tensor_model_parallel_size=2]}]"
    *_, hint, example = error_of(tmp_path, "exp_name: x\n", override).splitlines()
    assert hint == (
        "Within a list or an object quote each text that holds any of = , : [ ] { }, and for the shell the whole "
        "override, as in"
    )
    (word,) = shlex.split(example)
    assert example == f'  "{word}"'
    (candidate,) = load_config("run", config_path=tmp_path, overrides=[word]).align.candidates
    assert (candidate.name, candidate.overrides) == ("tp2", ["parallel.tensor_model_parallel_size=2"])


def test_defaults_list_without_self_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, "exp_name: x\n", name="base")
    assert "Defaults list is missing `_self_`" in error_of(tmp_path, "defaults: [base]\nseed: 1\n")


def test_broken_yaml_is_a_config_error_with_its_line(tmp_path: Path) -> None:
    assert "run.yaml is not YAML: line 2: " in error_of(tmp_path, "exp_name: x\n  seed: [\n")


@pytest.mark.parametrize("dash", ["-", "_"])
def test_arguments_are_read_in_any_order_and_in_rolls_spelling(dash: str) -> None:
    arguments = ["seed=1", f"--config{dash}name", "run", "~x", f"--config{dash}path=here", "a.b=--c"]
    source = parse_config_arguments(arguments, prog="run")
    assert source == ConfigSource(config_name="run", config_path="here", overrides=("seed=1", "~x", "a.b=--c"))
    assert parse_config_arguments(source.arguments(), prog="run") == source


def test_missing_config_name_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config_arguments(["seed=1"], prog="run")
    assert str(caught.value) == "Missing option '--config-name'.\nTry 'python -m run --help'."


def test_an_unknown_option_is_a_config_error_that_names_those_like_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config_arguments(["--config-nam", "run"], prog="run")
    assert str(caught.value) == (
        "No such option: --config-nam (Possible options: --config-name, --config-path)\nTry 'python -m run --help'."
    )


def test_loading_imports_no_torch() -> None:
    code = "import sys, mock_scheduler.config.loading; print([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
