"""The sections ``debug`` and ``rollout_worker``, and the variables of NexRL's trainer mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mock_scheduler.adapters.nexrl.config import DebugConfig, RolloutWorkerConfig, TrainerDump, read_trainer_dump
from mock_scheduler.adapters.nexrl.names import DUMP_KINDS
from mock_scheduler.config.loading import dump_config
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig

ROOT = Path(__file__).parents[2]
GUIDE = """\
exp_name: guide
debug:
  enable_data_dump: true
  dump_dir: "${oc.env:EXPERIMENT_PATH,./debug_dump}/debug_dump"
  dump_format: "pt"
  dump_every_n_steps: 1
  dump_options:
    trajectory: true
    old_log_probs: true
    forward_data: true
    loss: true
    param: false
    gradient: false
  target_param_pattern: "model\\\\.layers\\\\.0\\\\.self_attn\\\\.q_proj\\\\.weight"
"""


def load(folder: Path, text: str, *overrides: str) -> PipelineConfig:
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    return load_config("run", config_path=folder, overrides=overrides)


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value).split(":\n  - ", 1)[1]


def test_the_guides_section_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EXPERIMENT_PATH", raising=False)
    debug = load(tmp_path, GUIDE).debug
    assert debug.dump_dir == "./debug_dump/debug_dump"
    assert debug.enabled_options() == ("trajectory", "old_log_probs", "forward_data", "loss")
    assert debug.target_param_pattern == r"model\.layers\.0\.self_attn\.q_proj\.weight"
    monkeypatch.setenv("EXPERIMENT_PATH", "/data/run")
    assert load(tmp_path, GUIDE).debug.dump_dir == "/data/run/debug_dump"


def test_the_guides_remote_and_mock_sections_load(tmp_path: Path) -> None:
    text = """\
exp_name: guide
debug:
  enable_data_dump: true
  dump_dir: /d
  remote_api_dump_options: {prepared_trajectories: true, datums: true, training_metrics: true}
rollout_worker:
  type: "mock"
  need_llm_inference: false
  trajectory_load_path: "/path/to/debug_dump/trajectory/step_000000.pt"
  trajectory_format: "pt"
"""
    config = load(tmp_path, text)
    assert config.debug.enabled_remote_options() == ("prepared_trajectories", "datums", "training_metrics")
    assert config.rollout_worker.reads_dump
    assert config.rollout_worker.trajectory_load_path == "/path/to/debug_dump/trajectory/step_000000.pt"


def test_a_dumped_configuration_loads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, GUIDE)
    assert load(tmp_path, dump_config(config)) == config


def test_a_section_of_areals_is_still_areals(tmp_path: Path) -> None:
    """Both systems call theirs ``debug``; the keys tell them apart."""
    config = load(tmp_path, "exp_name: x\ndebug: {dump_rollout_data: true, path: /d}\n")
    assert (config.rollout_mock.mode, config.rollout_mock.dump_dir) == ("dump", "/d")
    assert config.debug == DebugConfig()


def test_nothing_is_dumped_where_nothing_is_said() -> None:
    config = PipelineConfig(exp_name="x")
    assert not config.debug.is_due(0)
    assert not config.rollout_worker.reads_dump


@pytest.mark.parametrize(("step", "due"), [(0, True), (1, False), (2, False), (3, True)])
def test_only_every_nth_step_is_due(step: int, due: bool) -> None:
    options = {"trajectory": True}
    debug = DebugConfig.model_validate({"enable_data_dump": True, "dump_every_n_steps": 3, "dump_options": options})
    assert debug.is_due(step) is due


def test_the_switch_turns_the_guides_whole_section_off(tmp_path: Path) -> None:
    """It was refused unless every option was taken out too."""
    debug = load(tmp_path, GUIDE, "debug.enable_data_dump=false").debug
    assert debug.dump_options.loss
    assert (debug.enabled_options(), debug.enabled_remote_options()) == ((), ())


DEBUG = "debug: has keys that do not go together:\n    - "


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{enable_data_dump: true, dump_options: {param: true, gradient: true}}",
            f"{DEBUG}target_param_pattern is not given: dump_options.param and dump_options.gradient for which "
            "parameters? Give it as 'model\\.layers\\.0\\.self_attn\\.q_proj\\.weight'",
        ),
        (
            "{dump_options: {loss: true}, remote_api_dump_options: {datums: true}}",
            f"{DEBUG}dump_options.loss, remote_api_dump_options.datums would "
            "have no effect: enable_data_dump is not given; set it to true, or to false to dump nothing",
        ),
        (
            "{enable_data_dump: true}",
            f"{DEBUG}enable_data_dump is true, and no option of dump_options or remote_api_dump_options is: nothing "
            "would be written",
        ),
        (
            "{target_param_pattern: '[q'}",
            "debug.target_param_pattern: '[q' is no regular expression: unterminated character set at position 0; in "
            "double quotes YAML halves backslashes: \"model\\\\.layers\\\\.0\\\\..*\" or 'model\\.layers\\.0\\..*'",
        ),
        ("{dump_format: npz}", "debug.dump_format: unknown value 'npz'; known values: pt, jsonl"),
        ("{dump_dir: ' '}", "debug.dump_dir: is empty; give a folder such as ./debug_dump"),
    ],
)
def test_a_debug_section_that_cannot_mean_anything_is_refused(tmp_path: Path, section: str, message: str) -> None:
    assert refused(tmp_path, f"exp_name: x\ndebug: {section}\n") == message


def test_an_unknown_option_names_the_nearest(tmp_path: Path) -> None:
    message = refused(tmp_path, "exp_name: x\ndebug: {enable_data_dump: true, dump_options: {forward_dat: true}}\n")
    assert message.startswith(
        "debug.dump_options.forward_dat: unknown key; nearest known key: debug.dump_options.forward_data; known keys"
    )


WORKER = "rollout_worker: has keys that do not go together:\n    - "


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "{type: mock}",
            f"{WORKER}type mock needs trajectory_load_path, a file such as debug_dump/trajectory/step_000000.pt or the "
            "folder it is in: rollouts are never made up",
        ),
        (
            "{type: mock, trajectory_load_path: a.pt, need_llm_inference: true}",
            f"{WORKER}need_llm_inference true with type mock: nothing is inferred; set it to false",
        ),
        (
            "{trajectory_load_path: a.pt, match: order}",
            f"{WORKER}trajectory_load_path a.pt has no effect with type real; set type=mock, or leave it out\n"
            "    - match order has no effect with type real; set type=mock, or leave it out",
        ),
        (
            "{need_llm_inference: false}",
            f"{WORKER}need_llm_inference false with type real: episodes are played by a model; leave it out",
        ),
        ("{type: simple}", "rollout_worker.type: unknown value 'simple'; known values: real, mock"),
    ],
)
def test_a_rollout_worker_that_cannot_work_is_refused(tmp_path: Path, section: str, message: str) -> None:
    assert refused(tmp_path, f"exp_name: x\nrollout_worker: {section}\n") == message


def test_two_sources_of_rollouts_are_refused_and_recording_a_dump_is_not(tmp_path: Path) -> None:
    text = "exp_name: x\nrollout_worker: {type: mock, trajectory_load_path: a.pt}\nrollout_mock: {enable: true}\n"
    assert refused(tmp_path, text, "rollout_mock.mode=mock") == (
        "rollout_worker.type mock with rollout_mock.mode mock: two sources for one rollout, and the recording would "
        "answer every request; leave out rollout_worker, or set rollout_mock.enable=false (or mode=dump, to record "
        "what the debug dump holds)"
    )
    assert load(tmp_path, text, "rollout_mock.mode=dump").rollout_worker == RolloutWorkerConfig(
        type="mock", trajectory_load_path="a.pt"
    )
    schedule = "rollout_mock.schedule=[{mode: real, steps: '2-'}]"
    assert load(tmp_path, text, "rollout_mock.mode=mock", schedule).rollout_worker.reads_dump


PREFIX = "WEAVER_DEBUG_DUMP_"


def test_the_guides_variables_are_read() -> None:
    environ = {
        f"{PREFIX}ENABLED": "1",
        f"{PREFIX}DIR": "./weaver_debug_dump",
        f"{PREFIX}EVERY_N": "2",
        f"{PREFIX}OPTIONS": "loss, forward_data,is_loss_debug",
        "PATH": "/bin",
    }
    dump = read_trainer_dump(environ)
    assert dump == TrainerDump(
        folder="./weaver_debug_dump", every_n=2, options=("forward_data", "loss", "is_loss_debug")
    )
    assert [dump.is_due(step) for step in range(3)] == [True, False, True]


@pytest.mark.parametrize("environ", [{}, {f"{PREFIX}ENABLED": "0", f"{PREFIX}OPTIONS": "loss"}])
def test_without_the_switch_nothing_is_dumped(environ: dict[str, str]) -> None:
    assert read_trainer_dump(environ) is None


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        (
            {"ENABLED": "1", "OPTIONS": "loss,forward"},
            "WEAVER_DEBUG_DUMP_OPTIONS: unknown option 'forward'; known: forward_data, loss, is_loss_debug, "
            "batch_inputs, param, gradient",
        ),
        (
            {"ENABLED": "1"},
            "WEAVER_DEBUG_DUMP_OPTIONS names nothing to write; known: forward_data, loss, is_loss_debug, batch_inputs, "
            "param, gradient",
        ),
        (
            {"ENABLED": "1", "OPTIONS": "param"},
            "WEAVER_DEBUG_DUMP_OPTIONS: param for which parameters? Set debug.target_param_pattern in the "
            "configuration",
        ),
        (
            {"ENABLED": "1", "OPTIONS": "loss", "EVERY": "2"},
            "WEAVER_DEBUG_DUMP_EVERY is unknown; nearest: WEAVER_DEBUG_DUMP_EVERY_N; known: WEAVER_DEBUG_DUMP_ENABLED, "
            "WEAVER_DEBUG_DUMP_DIR, WEAVER_DEBUG_DUMP_EVERY_N, WEAVER_DEBUG_DUMP_OPTIONS",
        ),
        (
            {"ENABLED": "1", "OPTIONS": "loss", "EVERY_N": "0"},
            "WEAVER_DEBUG_DUMP_EVERY_N is '0'; expected a whole number of at least 1",
        ),
        ({"ENABLED": "yes"}, "WEAVER_DEBUG_DUMP_ENABLED is 'yes'; expected 1 or 0"),
        ({"DIR": "/d"}, "WEAVER_DEBUG_DUMP_DIR would have no effect without WEAVER_DEBUG_DUMP_ENABLED=1"),
        (
            {"ENABLED": "1", "OPTIONS": "loss", "DIR": ""},
            "WEAVER_DEBUG_DUMP_DIR is empty; give a folder such as ./weaver_debug_dump",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_is_refused(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trainer_dump({PREFIX + name: value for name, value in environ.items()})
    assert str(caught.value) == f"the environment of the debug dump cannot be used:\n  - {problem}"


def test_all_wrong_variables_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        read_trainer_dump({f"{PREFIX}ENABLED": "1", f"{PREFIX}EVERY_N": "x", f"{PREFIX}WHAT": "1"})
    assert str(caught.value).count("\n  - ") == 3


def test_every_documented_example_loads(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "nexrl.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    dumping, loading = (load(tmp_path, f"exp_name: x\n{example}") for example in examples)
    assert dumping.debug.enabled_options() == ("trajectory", "old_log_probs", "forward_data", "loss", "param")
    assert loading.rollout_worker.trajectory_load_path == "debug_dump/trajectory/step_000000.pt"


def test_every_folder_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "nexrl.md").read_text(encoding="utf-8")
    assert [kind for kind in DUMP_KINDS if f"`{kind}/`" not in text] == []
    keys = {*DebugConfig.model_fields, *RolloutWorkerConfig.model_fields} - {"type", "match", "missing_logprobs"}
    assert [key for key in sorted(keys) if f"{key}" not in text] == []
