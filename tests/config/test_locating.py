"""A path is taken wherever the name of a configuration is."""

from __future__ import annotations

from pathlib import Path

import pytest

from mock_scheduler import cli
from mock_scheduler.config.locating import locate_config, shipped_folder
from mock_scheduler.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "folder", "expected"),
    [
        ("lake", "own", ("lake", "own")),
        ("docs/a/align.yaml", None, ("align", "docs/a")),
        ("docs/a/align", None, ("align", "docs/a")),
        ("/x/align.yaml", None, ("align", "/x")),
        ("./align.yaml", None, ("align", ".")),
        ("../align", None, ("align", "..")),
    ],
)
def test_a_name_with_a_folder_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, folder: str | None, expected: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = locate_config(name, folder)
    assert (found[0], Path(found[1])) == (expected[0], Path(expected[1]))


def test_a_file_of_the_working_directory_needs_no_folder_where_configs_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "align.yaml").write_text("", encoding="utf-8")
    assert locate_config("align.yaml") == ("align", ".")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "align.yaml").write_text("", encoding="utf-8")
    assert locate_config("align.yaml")[1] == "configs"


def test_configurations_that_come_with_an_installation_are_found_anywhere_behind_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a file of one's own may stand on a shipped one: this one takes all but a name from it."""
    monkeypatch.chdir(tmp_path)
    shipped = shipped_folder()
    assert shipped is not None
    assert locate_config("quickstart") == ("quickstart", str(shipped))
    (tmp_path / "mine.yaml").write_text("defaults: [quickstart, _self_]\nexp_name: mine\n", encoding="utf-8")
    assert cli.main(["config", "mine"]) == 0
    own = capsys.readouterr().out
    assert cli.main(["config", "quickstart"]) == 0
    assert own == capsys.readouterr().out.replace("quickstart", "mine")
    with pytest.raises(ConfigError, match=r"there is no file align\.yaml in .*, nor in configs; give its path"):
        locate_config("align.yaml")
    assert cli.main(["config", "quickstrat"]) == 5
    assert f"no configuration 'quickstrat' in {shipped}; nearest: quickstart" in capsys.readouterr().err
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("", encoding="utf-8")
    assert locate_config("quickstart") == ("quickstart", "configs")
    assert locate_config("lake") == ("lake", "configs")


def test_a_folder_beside_a_path_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        locate_config("a/align.yaml", "configs")
    assert str(caught.value) == (
        "a/align.yaml is the path of a configuration, so --config-path is not needed; leave it out"
    )


@pytest.mark.parametrize("command", ["config", "env", "launch", "align", "doctor"])
def test_every_command_takes_a_path(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    """The file has an unknown key, which only its loader can have found."""
    (tmp_path / "own.yaml").write_text("exp_name: a\nmax_step: 2\n", encoding="utf-8")
    assert cli.main([command, str(tmp_path / "own.yaml")]) == 5
    assert f"configuration 'own' ({tmp_path}/own.yaml) has 1 problem:" in capsys.readouterr().err.replace("\n", " ")
    assert cli.main([command, str(tmp_path / "own"), "--config-path", "configs"]) == 5
    assert "--config-path is not needed; leave it out" in capsys.readouterr().err
