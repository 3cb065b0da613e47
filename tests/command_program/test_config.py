"""The configuration of a command: what is passed, what is refused, and with which words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mock_scheduler.command_program.command import Command, build_command
from mock_scheduler.command_program.config import CommandConfig
from mock_scheduler.command_program.entry import opens_a_port
from mock_scheduler.command_program.program import PROGRAM, CommandProgram
from mock_scheduler.config.base import Decides
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import RunConfig, find_program

TP, SP, DP = (
    "parallel.tensor_model_parallel_size",
    "parallel.sequence_parallel",
    "parallel.data_parallel_size",
)
BASE: dict[str, Any] = {
    "command": ["torchrun", "--nproc-per-node", "{world_size}", "train.py"],
    "arguments": {TP: ["--tp", "{}"], SP: ["--sequence-parallel"], "options.lr": ["--lr={}"]},
    "options": {"lr": 0.5},
}


def load(folder: Path, *overrides: str, **values: Any) -> CommandConfig:
    (folder / "align.yaml").write_text(yaml.safe_dump({**BASE, **values}, sort_keys=False), encoding="utf-8")
    config: RunConfig = PROGRAM.build_loader("align", folder)(overrides)
    assert isinstance(config, CommandConfig)
    return config


def build(folder: Path, *overrides: str, **values: Any) -> Command:
    return build_command(load(folder, *overrides, **values), folder=folder, python="/env/bin/python")


def test_a_file_with_a_command_is_the_command_programs(tmp_path: Path) -> None:
    load(tmp_path)
    assert find_program("align", tmp_path) is PROGRAM
    (tmp_path / "other.yaml").write_text("x:\n  command: [a]\n", encoding="utf-8")
    assert not isinstance(find_program("other", tmp_path), CommandProgram)


def test_nothing_is_passed_for_a_degree_of_one_and_a_switch_that_is_off(tmp_path: Path) -> None:
    assert build(tmp_path).words == ("torchrun", "--nproc-per-node", "1", "train.py", "--lr=0.5")
    words = build(tmp_path, f"{TP}=2", f"{SP}=true").words
    assert words == ("torchrun", "--nproc-per-node", "2", "train.py", "--tp", "2", "--sequence-parallel", "--lr=0.5")


def test_a_listed_value_has_its_own_arguments_and_a_star_every_other(tmp_path: Path) -> None:
    arguments = {
        **BASE["arguments"],
        TP: {"*": ["--tp", "{}"]},
        "precision": {"bfloat16": ["--bf16"], "float64": ["--double"]},
    }
    assert build(tmp_path, arguments=arguments).words[4:] == ("--tp", "1", "--lr=0.5")
    words = build(tmp_path, "precision=bfloat16", arguments=arguments).words
    assert words[4:] == ("--tp", "1", "--lr=0.5", "--bf16")
    switches = {**BASE["arguments"], "options.te": {True: ["--impl=te"], False: ["--impl=local"]}}
    options = {"lr": 0.5, "te": False}
    assert build(tmp_path, arguments=switches, options=options).words[-1] == "--impl=local"
    assert build(tmp_path, "options.te=true", arguments=switches, options=options).words[-1] == "--impl=te"


def test_sections_of_arguments_may_be_nested(tmp_path: Path) -> None:
    arguments = {"parallel": {"tensor_model_parallel_size": ["--tp", "{}"]}, "options": {"lr": ["--lr={}"]}}
    assert build(tmp_path, f"{TP}=4", arguments=arguments).words[2:] == ("4", "train.py", "--tp", "4", "--lr=0.5")


def test_the_arguments_stand_where_the_command_says(tmp_path: Path) -> None:
    command = ["bash", "train.sh", "{arguments}", "--end"]
    assert build(tmp_path, command=command).words == ("bash", "train.sh", "--lr=0.5", "--end")


def test_fields_are_filled_in_the_command_and_its_variables(tmp_path: Path) -> None:
    command = ["{python}", "{folder}/train.py", "--dp={dp}", '{{"tp": {tp}}}', "{arguments}"]
    found = build(tmp_path, f"{DP}=2", command=command, env={"STEPS": "{max_steps}", "FLAG": 1}, output_dir="/out")
    assert found.words == ("/env/bin/python", f"{tmp_path}/train.py", "--dp=2", '{"tp": 1}', "--lr=0.5")
    assert (found.env["STEPS"], found.env["FLAG"]) == ("2", "1")
    assert found.env["MOCK_SCHEDULER_RUN"] == "/out/attached_run.json"
    assert found.env["PATH"].split(":")[0] == "/env/bin"


def test_the_run_file_says_what_the_instruments_do(tmp_path: Path) -> None:
    config = ["perturbation.seed=3", "trace.level=full", "max_steps=4", "initial_state=/traces/a", f"{TP}=2"]
    run = build(tmp_path, *config, first_step=1, vocab_size=100).run
    assert (run.first_step, run.last_step, run.initial_state, run.vocab_size) == (1, 3, "/traces/a", 100)
    assert (run.perturbation.seed, run.trace.level, run.rollout_mock) == (3, "full", None)
    assert run.parallel is not None
    assert run.parallel.tensor_model_parallel_size == 2
    assert run.system_envs["DETERMINISTIC_MODE"] == "1"


def test_a_program_with_a_scheduler_gets_its_section(tmp_path: Path) -> None:
    run = build(tmp_path, "rollout_mock.mode=mock", rollout_mock={"enable": True, "dump_dir": "/rec"}).run
    assert run.rollout_mock is not None
    assert (run.rollout_mock.effective_mode, run.rollout_mock.dump_dir) == ("mock", "/rec")


def test_a_launcher_has_the_command_word_by_word_or_as_one_text(tmp_path: Path) -> None:
    sbatch = ["sbatch", "--wait", "--nodes={nodes}", "--ntasks-per-node=1", "--wrap", "{command_line}"]
    command = ["torchrun", "--nnodes", "{nodes}", "--nproc-per-node", "{processes_per_node}", "my train.py"]
    found = build(tmp_path, f"{TP}=8", command=command, launcher=sbatch, processes_per_node=4)
    line = "torchrun --nnodes 2 --nproc-per-node 4 'my train.py' --tp 8 --lr=0.5"
    assert found.words == ("sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", "--wrap", line)
    ray = build(tmp_path, launcher=["ray", "job", "submit", "--", "env", "{env}", "{command}"], env={"A": "b c"})
    assert ray.words[:5] == ("ray", "job", "submit", "--", "env")
    assert {"A=b c", f"MOCK_SCHEDULER_RUN={ray.run_file}", "DETERMINISTIC_MODE=1"} <= set(ray.words)
    assert ray.words[-5:] == ("torchrun", "--nproc-per-node", "1", "train.py", "--lr=0.5")
    few = build(tmp_path, launcher=sbatch, processes_per_node=8)
    assert few.words[2] == "--nodes=1"


def test_a_file_of_ranks_that_is_not_there_is_found_while_nothing_runs(tmp_path: Path) -> None:
    options = {"options": {"script": "train.py"}, "arguments": {}, "working_dir": "code"}
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    load(tmp_path, command=["{ranks}", "{options.script}"], **options)
    missing = f"there is no Python file other.py in {tmp_path / 'code'}; ranks run a file, or -m and a module"
    with pytest.raises(ConfigError, match=re.escape(missing)):
        load(tmp_path, "options.script=other.py", command=["{ranks}", "{options.script}"], **options)
    # On other machines the file may be there alone.
    far = {"launcher": ["srun", "{command}"], **options}
    load(tmp_path, "options.script=other.py", command=["{ranks}", "{options.script}"], **far)


def test_ranks_are_started_where_nobody_else_can_join_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    found = build(tmp_path, f"{TP}=2", command=["{ranks}", "train.py", "{arguments}", "--end"], output_dir="/out")
    ours = ("/env/bin/python", "-P", "-u", "-m", "mock_scheduler.launch.ranks", "/out", "2", "1", "0", "memory")
    assert found.words == (*ours, "train.py", "--tp", "2", "--lr=0.5", "--end")
    alone = build(tmp_path, command=["{ranks}", "-m", "train"], launcher=["srun", "{command}"], output_dir="/out")
    assert alone.words == ("srun", *ours[:2], *ours[3:6], "1", "1", "0", "memory", "-m", "train", "--lr=0.5")


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (["torchrun", "--standalone", "train.py"], True),
        (["/env/bin/torchrun", "train.py"], True),
        (["python", "-m", "torch.distributed.run", "train.py"], True),
        (["{ranks}", "train.py"], False),
        (["python", "torchrun.py"], False),
    ],
)
def test_torchrun_is_known_by_its_names(words: list[str], warns: bool) -> None:
    assert opens_a_port(words) is warns


def test_what_came_out_of_the_environment_is_shown_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command, variables and launcher went with their values into the log of the run, which is handed on."""
    for name in ("THE_KEY", "THE_NOTE", "THE_WORD", "THE_JOB"):
        monkeypatch.setenv(name, f"value-of-{name}")
    monkeypatch.setenv("SHORT", "7")
    text = """\
command: ["{python}", train.py, --key, "${oc.env:THE_KEY}", "--at={dp}:${oc.env:THE_WORD}", "${oc.env:SHORT}", "17"]
env: {WANDB_API_KEY: "${oc.env:THE_KEY}", URL: "postgres://u:${oc.env:THE_WORD}@h/{exp_name}"}
launcher: [env, "{env}", --json, "{env_json}", --job, "${oc.env:THE_JOB}", "{command}", --line, "{command_line}"]
options: {note: "it is {${oc.env:THE_NOTE}}"}
arguments: {options.note: ["--note={}"]}
"""
    (tmp_path / "align.yaml").write_text(text.replace("{${oc.env:THE_NOTE}}", "${oc.env:THE_NOTE}"), encoding="utf-8")
    config = PROGRAM.build_loader("align", tmp_path)(())
    assert isinstance(config, CommandConfig)
    found = build_command(config, folder=tmp_path, python="/env/bin/python")
    assert found.env["URL"] == "postgres://u:value-of-THE_WORD@h/training"
    assert "value-of-THE_KEY" in found.words
    for shown in (found.shown, found.shown_inner):
        assert "value-of-" not in shown
    assert "'--at={dp}:${oc.env:THE_WORD}' '${oc.env:SHORT}' 17" in found.shown_inner
    assert "'--note=it is ${oc.env:THE_NOTE}'" in found.shown_inner
    assert "--job '${oc.env:THE_JOB}'" in found.shown


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"command": ["{ranks}", "train.py"], "processes_per_node": 1, "parallel": {"data_parallel_size": 2}},
        "command: begins with {ranks}, which starts processes of one machine, and 2 are asked for",
    ),
    ({"command": ["{ranks}"]}, "command: has nothing behind {ranks}: name the Python file that every rank runs"),
    ({"command": ["env", "{ranks}", "train.py"]}, "command: has the unknown field {ranks}"),
    ({"comand": []}, "comand: unknown key; nearest known key: command"),
    ({"options": {"lr": 0.5, "rl": 1}}, "options.rl: reaches no command; nearest: options.lr; add arguments"),
    ({"effects": {"lrr": "bits"}}, "effects.lrr: is for no option; nearest: lr"),
    ({"arguments": {**BASE["arguments"], "parallel.tensor_parallel": ["--tp"]}},
     "arguments.parallel.tensor_parallel: is for no key that changes; nearest: parallel."),
    ({"command": ["train", "{wrld_size}"]}, "command: has the unknown field {wrld_size}; nearest: world_size; write"),
    ({"env": {"A": "{optoins.lr}"}}, "env: has the unknown field {optoins.lr}; nearest: options.lr"),
    ({"launcher": ["srun"]}, "launcher: starts no command: give {command} as a word of its own"),
    ({"launcher": ["sh", "-c", "srun {command}"]}, "launcher: has 'srun {command}': {command} and {env} stand for"),
    ({"arguments": {**BASE["arguments"], "options.lr": {0.1: ["--a"]}}},
     "options.lr: is 0.5, for which arguments.options.lr has no entry; it has: 0.1"),
    ({"reductions": {"layers": 1}}, "reductions.layers: is for no key that a run becomes smaller by"),
    ({"parallel": {"data_parallel_size": 6}, "processes_per_node": 4}, "processes_per_node: is 4, by which the 6"),
    ({"align": {"entry": "my.module"}}, "align.entry: names a Python module, and a command has none of ours"),
    ({"align": {"candidates": [{"name": "a", "entry": "my.module"}]}},
     "align.candidates.0.entry: names a Python module, and a command has none of ours"),
    ({"first_step": 2}, "max_steps: is 2, and first_step 2: no step would be observed"),
    ({"command": []}, "command: is [], "),
]  # fmt: skip


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_wrong_configuration_is_refused_with_the_nearest_name(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, **values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key", "texts"),
    [
        ("parallel.pipeline_model_parallel_size=2", "parallel.pipeline_model_parallel_size", ("2", "1")),
        ("precision=float64", "precision", ("float64", "float32")),
        ("parallel.context_parallel_size=2", "parallel.context_parallel_size", ("2", "1")),
    ],
)
def test_a_change_that_would_not_reach_the_command_is_refused(
    tmp_path: Path, override: str, key: str, texts: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, override)
    assert str(caught.value) == (
        f"{tmp_path}/align.yaml: nothing passes {key} to the command, which is {texts[0]} here and {texts[1]} in the "
        f"file; add arguments.{key}, as in [--name, '{{}}'], or the field {{{key}}}"
    )


def test_what_the_file_says_itself_is_a_statement_about_the_command(tmp_path: Path) -> None:
    """A command that trains in bfloat16 under pp2, whatever it is told, needs no arguments for either."""
    parallel = {"pipeline_model_parallel_size": 2}
    config = load(tmp_path, f"{TP}=2", precision="bfloat16", parallel=parallel)
    assert (config.precision, config.parallel.world_size) == ("bfloat16", 4)


def test_replicas_need_no_argument_where_the_command_knows_its_processes(tmp_path: Path) -> None:
    assert build(tmp_path, f"{DP}=3").words[2] == "3"
    with pytest.raises(ConfigError, match=f"nothing passes {DP} to the command"):
        load(tmp_path, f"{DP}=3", command=["torchrun", "--nproc-per-node", "4", "train.py"])


def test_options_decide_what_the_user_states_and_else_bits(tmp_path: Path) -> None:
    options = {"recompute": False, "schedule": "a", "lr": 0.5}
    effects = {"recompute": "nothing", "schedule": "order"}
    arguments = {"options": {"recompute": ["-r"], "schedule": ["-s", "{}"], "lr": ["--lr={}"]}}
    found = PROGRAM.effects(load(tmp_path, options=options, effects=effects, arguments=arguments))
    assert found.of("options.recompute") == Decides.EXECUTION
    assert found.of("options.schedule") == Decides.ORDER
    assert found.of("options.lr") == Decides.BITS
    assert found.of("command.0") == Decides.BITS
    assert found.of("initial_state") == Decides.LABEL


def test_a_shorter_run_is_told_the_instruments_and_not_the_command(tmp_path: Path) -> None:
    config = load(tmp_path, max_steps=10)
    assert PROGRAM.end_after(config, 2) == ["max_steps=3"]
    assert PROGRAM.end_after(config, 9) == []
    told = load(tmp_path, max_steps=10, arguments={**BASE["arguments"], "max_steps": ["--iters", "{}"]})
    assert PROGRAM.end_after(told, 2) == []


def test_sources_are_the_code_beside_the_file_without_hidden_folders_and_alignments(tmp_path: Path) -> None:
    for name in ("train.py", "lib/model.py", "run.sh", ".venv/a.py", "out/.mock-scheduler-align", "out/b.py", "x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    found = PROGRAM.list_sources(load(tmp_path))
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["lib/model.py", "run.sh", "train.py"]
    found = PROGRAM.list_sources(load(tmp_path, sources=["x.json", "lib"]))
    assert [path.name for path in found] == ["model.py", "x.json"]
    with pytest.raises(ConfigError, match=r"^sources: there is no file or folder .*/gone$"):
        PROGRAM.list_sources(load(tmp_path, sources=["gone"]))


def test_variables_of_a_deterministic_run_are_there_and_the_users_own_win(tmp_path: Path) -> None:
    envs = load(tmp_path, system_envs={"NCCL_ALGO": "Tree", "A": 1}).system_envs
    assert envs == {
        "NCCL_ALGO": "Tree",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "DETERMINISTIC_MODE": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "A": "1",
    }
