"""A stored configuration that names code is told from one that names none, whatever way it names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler.config.stored_code import StoredCode, Use, find_stored_code, is_stored, refuse_stored_code
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import check_stored_code, list_stored_code

PLAIN = """\
exp_name: lake
system_envs: {DETERMINISTIC_MODE: '1', NCCL_ALGO: Ring, CUBLAS_WORKSPACE_CONFIG: ':4096:8', NCCL_TUNER_PLUGIN: ''}
align:
  baseline: [seed=7, system_envs.NCCL_PROTO=Simple]
  candidates:
    - {name: tp2, overrides: [parallel.tensor_model_parallel_size=2], entry: null, python: null}
  matrix: {options: {packed: [training.sequence_packing=true]}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    (folder / "run.json").write_text("{}")
    return path


def found_in(folder: Path, text: str, use: Use = Use.ALIGN) -> list[str]:
    found = list_stored_code(write(folder, text))
    return [item.describe() for item in found if item.use <= use]


def test_layouts_and_settings_are_no_code(tmp_path: Path) -> None:
    assert found_in(tmp_path, PLAIN) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("align: {candidates: [{name: a, python: ./evil}]}", ["interpreter: align.candidates.0.python = './evil'"]),
        ("align: {candidates: [{name: a, entry: evil}]}", ["entry: align.candidates.0.entry = 'evil'"]),
        ("align: {entry: evil}", ["entry: align.entry = 'evil'"]),
        ("program: evil:PROGRAM", ["program: program = 'evil:PROGRAM'"]),
        ("note: |\n  x\nprogram: 'evil:P'  # ours", ["program: program = 'evil:P'"]),
        ("system_envs: {LD_PRELOAD: /x.so}", ["environment: system_envs.LD_PRELOAD = '/x.so'"]),
        ("system_envs: {NCCL_NET_PLUGIN: evil}", ["environment: system_envs.NCCL_NET_PLUGIN = 'evil'"]),
        ("system_envs: {TRITON_CACHE_DIR: /e}", ["environment: system_envs.TRITON_CACHE_DIR = '/e'"]),
        ("system_envs: ${align.x}", ["unresolved section: system_envs = '${align.x}'"]),
        (
            "align: {candidates: [{name: a, overrides: [+system_envs.LD_PRELOAD=/x.so]}]}",
            ["environment: system_envs.LD_PRELOAD = '/x.so'"],
        ),
        (
            "align: {baseline: ['align.candidates=[{name: a, python: ./evil}]']}",
            ["interpreter: align.candidates.0.python = './evil'"],
        ),
        (
            "align: {matrix: {options: {o: ['system_envs={PYTHONPATH: \"/e\"}']}}}",
            ["environment: system_envs.PYTHONPATH = '/e'"],
        ),
        (
            "align: {baseline: ['hydra.searchpath=[pkg://evil]']}",
            ["further configuration: align.baseline = 'hydra.searchpath=[pkg://evil]'"],
        ),
        ("align: {baseline: ['program=evil:P']}", ["program: align.baseline = 'program=evil:P'"]),
        ("align: {baseline: ['a.b=[']}", ["unreadable override: align.baseline = 'a.b=['"]),
        ("align: {baseline: [group=x]}", ["further configuration: align.baseline = 'group=x'"]),
        ("align: {candidates: '${x}'}", ["unresolved section: align.candidates = '${x}'"]),
        ("defaults: [other, _self_]", ["further configuration: defaults = \"['other', '_self_']\""]),
        ("hydra: {searchpath: ['pkg://e']}", ["further configuration: hydra = \"{'searchpath': ['pkg://e']}\""]),
        ("custom_envs: {a: {_target_: os.system}}", ["class: custom_envs.a._target_ = 'os.system'"]),
        ("command: [rm, -r]", ["command: command = \"['rm', '-r']\""]),
        (
            "program: mock_scheduler.command_program.program:PROGRAM\n'command': ${x}",
            ["command: command = '${x}'"],
        ),
        ("env: {PYTHONPATH: /e}", ["command: env = \"{'PYTHONPATH': '/e'}\""]),
        (
            "launcher: [sh, -c]\nworking_dir: /e",
            ["command: launcher = \"['sh', '-c']\"", "command: working_dir = '/e'"],
        ),
        ("arguments: {precision: [--e]}", ["command: arguments = \"{'precision': ['--e']}\""]),
        (
            "align: {candidates: [{name: a, overrides: ['command=[evil]']}]}",
            ["command: command = \"['evil']\""],
        ),
        # The name of an option may hold dots.
        (
            "align: {matrix: {options: {v1.5: [system_envs.A_LIBRARY=/e.so]}}}",
            ["environment: system_envs.A_LIBRARY = '/e.so'"],
        ),
        (
            "align: {matrix: {options: {a.b.c: ['align.candidates=[{name: a, python: ./evil}]']}}}",
            ["interpreter: align.candidates.0.python = './evil'"],
        ),
        # An override may set a part of a list or of a mapping.
        ("align: {baseline: [command.0=evil]}", ["command: command.0 = 'evil'"]),
        ("align: {baseline: [env.PATH=/e]}", ["command: env.PATH = '/e'"]),
        (
            "align: {baseline: ['align.candidates.0.overrides.0=\"program=evil:P\"']}",
            ["program: align.candidates.0.overrides = 'program=evil:P'"],
        ),
        (
            "align: {baseline: [align.candidates.0.python=./evil]}",
            ["interpreter: align.candidates.0.python = './evil'"],
        ),
        # Hydra puts the whole file below this key.
        (
            "# @package align\ncandidates: [{name: a, python: ./evil}]",
            ["further configuration: package = '# @package align'"],
        ),
        ("# a\n\n#  @package  align\nbaseline: []", ["further configuration: package = '#  @package  align'"]),
        (
            "system_envs: {TORCHINDUCTOR_CACHE_DIR: cache}",
            ["environment: system_envs.TORCHINDUCTOR_CACHE_DIR = 'cache'"],
        ),
        ("system_envs: {NCCL_TOPO_FILE: topo.xml}", ["environment: system_envs.NCCL_TOPO_FILE = 'topo.xml'"]),
        (
            "command: [sh, -c, '{options.x}']\noptions: {x: evil}",
            ["command: command = \"['sh', '-c', '{options.x}']\"", "command: options = \"{'x': 'evil'}\""],
        ),
    ],
)
def test_every_way_to_name_code_is_found(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "group").mkdir()
    assert found_in(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training_service: {url: http://e:80}", ["address: training_service.url = 'http://e:80'"]),
        ("training_service: {token_variable: KEY}", ["address: training_service.token_variable = 'KEY'"]),
        ("training_service: {service_file: /s}", ["address: training_service.service_file = '/s'"]),
        ("training_service: {host: 0.0.0.0}", ["address: training_service.host = '0.0.0.0'"]),
        ("training_service: {host: 127.0.0.1, url: null, service_file: null}", []),
        (
            "system_envs: {NCCL_SOCKET_IFNAME: eth0}",
            ["environment: system_envs.NCCL_SOCKET_IFNAME = 'eth0'"],
        ),
        ("system_envs: {NCCL_SOCKET_IFNAME: ''}", ["environment: system_envs.NCCL_SOCKET_IFNAME = ''"]),
        ("system_envs: {NCCL_SOCKET_IFNAME: =lo}", []),
        ("rollout_mock: {dump_dir: s3://bucket/x}", ["address: rollout_mock.dump_dir = 's3://bucket/x'"]),
        ("rollout_mock: {dump_dir: 'reference::x'}", ["address: rollout_mock.dump_dir = 'reference::x'"]),
        ("rollout_mock: {dump_dir: /home/a/recording}", []),
        ("exp_name: 'a${oc.env:KEY}'", ["text to be resolved: exp_name = 'a${oc.env:KEY}'"]),
        ("note: ['${oc.env:KEY}']", ["text to be resolved: note.0 = '${oc.env:KEY}'"]),
        ("a: {url: '${b}'}", ["text to be resolved: a.url = '${b}'"]),
        (r"exp_name: 'a\${x}'", []),
        (r"exp_name: 'a\\${x}'", [r"text to be resolved: exp_name = 'a\\\\${x}'"]),
        (
            "align: {baseline: ['training_service.url=\"http://e\"']}",
            ["address: training_service.url = 'http://e'"],
        ),
        (
            "align: {candidates: [{name: a, overrides: ['exp_name=${oc.env:KEY}']}]}",
            ["text to be resolved: exp_name = '${oc.env:KEY}'"],
        ),
    ],
)
def test_what_brings_secrets_or_data_to_another_machine_is_found(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    assert found_in(tmp_path, text) == expected


def test_a_command_asks_only_about_what_it_would_run(tmp_path: Path) -> None:
    text = "program: e:P\nsystem_envs: {LD_PRELOAD: x}\nalign: {candidates: [{name: a, python: ./p}]}\n"
    assert len(found_in(tmp_path, text, Use.LOAD)) == 1
    assert len(found_in(tmp_path, text, Use.RUN)) == 2
    assert len(found_in(tmp_path, text, Use.ALIGN)) == 3


def test_of_one_candidate_only_its_own_code_counts(tmp_path: Path) -> None:
    path = write(tmp_path, "align: {candidates: [{name: a, python: ./p}, {name: b, python: ./q}]}")
    assert [item.value for item in list_stored_code(path, only="b")] == ["./q"]
    hidden = write(tmp_path, "align: {candidates: [{name: '${exp_name}', python: ./p}]}\nexp_name: b")
    assert [item.value for item in list_stored_code(hidden, only="b")] == ["${exp_name}", "./p"]


def test_a_part_that_is_named_many_times_is_walked_once(tmp_path: Path) -> None:
    levels = ["l0: &l0 {python: x}"] + [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 5)]
    assert found_in(tmp_path, "\n".join(levels)) == []


def test_the_refusal_says_what_would_run_and_how_to_allow_it(tmp_path: Path) -> None:
    path = write(tmp_path, 'align: {candidates: [{name: a, python: "/x\\e[2K\\u202e"}]}')
    with pytest.raises(ConfigError) as caught:
        check_stored_code("config", tmp_path, use=Use.ALIGN, run_stored_code=False)
    assert str(caught.value) == (
        f"the stored configuration {path} names what this would run or read:\n"
        "  - interpreter: align.candidates.0.python = '/x\\x1b[2K\\u202e'\n"
        "Nothing has run. If you trust whoever wrote this folder, add --run-stored-code (in Python: "
        "run_stored_code=True)"
    )
    told = check_stored_code("config.yaml", tmp_path, use=Use.ALIGN, run_stored_code=True)
    assert told == (
        f"--run-stored-code: the stored configuration {path} names what is used now:\n"
        "  - interpreter: align.candidates.0.python = '/x\\x1b[2K\\u202e'"
    )
    assert check_stored_code("config", tmp_path, use=Use.RUN, run_stored_code=False) == ""


def test_a_long_value_is_cut_and_the_rest_counted() -> None:
    code = StoredCode(kind="environment", key="system_envs.A", value="x" * 3000, use=Use.RUN)
    with pytest.raises(ConfigError, match="x' and 1,000 more characters"):
        refuse_stored_code(Path("config.yaml"), [code], use=Use.RUN, is_allowed=False)


@pytest.mark.parametrize(
    "beside",
    ["run.json", "metrics.jsonl", "recording/recording.json", "trace/x", "reproduce.sh", "align.json", "../align.json"],
)
def test_a_configuration_among_a_runs_files_is_stored(tmp_path: Path, beside: str) -> None:
    folder = tmp_path / "baseline"
    folder.mkdir()
    path = folder / "config.yaml"
    path.write_text("program: evil:P")
    assert not is_stored(path)
    (folder / beside).parent.mkdir(exist_ok=True)
    (folder / beside).write_text("")
    assert is_stored(path)
    (folder / "run.json").touch()
    assert is_stored(folder / "Config.yaml")


def test_ones_own_configuration_is_not_asked_about(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("program: mine:P\nsystem_envs: {MY: x}")
    assert check_stored_code("config", tmp_path, use=Use.ALIGN, run_stored_code=False) == ""


@pytest.mark.parametrize("text", ["a: [", "!!python/object:os.system {}", "a: b: c"])
def test_a_file_that_is_no_plain_yaml_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"config\.yaml (is not YAML: line|line 1: the tag)"):
        find_stored_code(path, own_programs=("a:B",), settings=())
