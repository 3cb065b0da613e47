"""Configurations stand for a bounded number of values: aliases, interpolations and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mock_scheduler.config import problems
from mock_scheduler.config.interpolations import check_expansion
from mock_scheduler.errors import ConfigError
from pipelines.config.loading import load_config


def doubling(form: str) -> str:
    """Forty keys, each of two times the next one."""
    return "".join(form.format(f"z{number}", f"z{number + 1}") for number in range(40)) + "z40: lol\n"


@pytest.mark.parametrize(
    "form",
    [
        "{0}: ${{{1}}}${{{1}}}\n",
        "{0}: ['${{{1}}}', '${{{1}}}']\n",
        "{0}: {{a: '${{{1}}}', b: '${{.a}}'}}\n",
        "{0}: ${{oc.select:{1}}}${{oc.select:{1},x}}\n",
    ],
)
def test_interpolations_that_double_are_refused_at_once(form: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(doubling(form))
    with pytest.raises(ConfigError, match="with its interpolations resolved it stands for more than 50,000 values"):
        load_config("run", config_path=tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &a [x]\nb: &b [" + "*a, " * 300 + "]\nc: [" + "*b, " * 300 + "]\n", "run.yaml line 3: with its aliases"),
        ("seed: 1\nseed: 2\n", "run.yaml line 2: the key 'seed' is there twice"),
        ("seed: !!int x\n", "run.yaml is not YAML: line 1: 'x' is no int"),
        ("z: ${y}\ny: ${z}\n", "Recursive interpolation detected"),
        ("".join(f"z{i}: ${{z{i + 1}}}\n" for i in range(3000)), "lie too deep in each other"),
    ],
)
def test_a_file_that_stands_for_too_much_is_one_error(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config("run", config_path=tmp_path)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("head", "line", "first"),
    [
        ("", "k{0}: 1\n", "k0: unknown key; "),
        ("training:\n", "  k{0}: 1\n", "training.k0: unknown key; "),
        ("custom_envs:\n", "  k{0}: 1\n", "custom_envs.k0: is 1, "),
    ],
)
def test_thousands_of_problems_are_refused_soon(
    head: str, line: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest known key was looked for as often as there were problems: 26 s for 12,000."""
    looked_for: list[str] = []
    monkeypatch.setattr(problems, "get_close_matches", lambda word, *_, **__: looked_for.append(word) or [])
    (tmp_path / "run.yaml").write_text("exp_name: x\n" + head + "".join(map(line.format, range(3_000))))
    with pytest.raises(ConfigError) as caught:
        load_config("run", config_path=tmp_path)
    assert len(looked_for) <= 2 * 200
    lines = str(caught.value).splitlines()
    assert lines[0].endswith(" has 3,000 problems:")
    assert lines[1].startswith(f"  - {first}")
    assert (len(lines), lines[-1]) == (202, "  - and 2,800 more")


@pytest.mark.parametrize("override", [f"seed={'[' * 300}", f"seed={'f(' * 300}", f"{'a.' * 300}b=1", f"a={'${' * 99}"])
def test_overrides_that_nest_too_deep_are_refused(override: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="more than 64 levels"):
        load_config("run", config_path=tmp_path, overrides=[override])


def test_words_that_name_no_key_count_nothing() -> None:
    check_expansion(OmegaConf.create({"a": "${oc.env:HOME,x}", "b": ["${a}", "${.0}"], "c": "${b}${b}"}), "here")


@pytest.mark.parametrize("name", ["../run", "sub/run", "", ".", "..", "/etc/run"])
def test_a_name_with_a_folder_is_no_name_of_a_configuration(name: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for place in (tmp_path / "run.yaml", tmp_path / "sub/run.yaml"):
        place.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match="is no name of a file; give its folder as config_path"):
        load_config(name, config_path=tmp_path / "sub")
