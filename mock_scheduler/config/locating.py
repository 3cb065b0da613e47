"""Finds a configuration by its name or the path of its file, also among those that come with an installation.

Contract: imports no torch, and no package but to ask where it lies. A file of the user's stands before a shipped one of
the same name.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import printable

DEFAULT_CONFIG_PATH = "configs"
#: The program of every configuration that names none, and of the shipped ones, which lie in a folder of its package.
DEFAULT_PROGRAM = "pipelines.program:PROGRAM"


@cache
def shipped_folder() -> Path | None:
    """Return the folder of the configurations that come with an installation; ``None`` where there is none."""
    spec = find_spec(DEFAULT_PROGRAM.partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    found = (Path(spec.origin).parent / DEFAULT_CONFIG_PATH).resolve()  # in a checkout a link to its configs
    return found if found.is_dir() else None


def locate_config(config_name: str, config_path: str | Path | None = None) -> tuple[str, str]:
    """Finds a configuration by its name in a folder, or by the path of its file; returns name and folder.

    Args:
        config_name: a file's name in ``config_path``, or a path; ``.yaml`` may be left out in both.
        config_path: ``None``, where a name is given: the first that has it of ``configs``, the working directory, and
            the configurations that come with an installation.

    Raises:
        ConfigError: there is a path, and a folder beside it; or no such file of a name with ``.yaml``.
    """
    given = Path(config_name)
    if given.name != config_name:
        if config_path is not None:
            raise ConfigError(
                f"{config_name} is the path of a configuration, so --config-path is not needed; leave it out"
            )
        return given.name.removesuffix(".yaml"), str(given.parent)
    name = given.name.removesuffix(".yaml")
    if config_path is not None or (Path(DEFAULT_CONFIG_PATH) / f"{name}.yaml").is_file():
        return config_name, str(config_path or DEFAULT_CONFIG_PATH)
    if Path(f"{name}.yaml").is_file():
        return name, "."
    shipped = shipped_folder()
    if config_name != name and (shipped is None or not (shipped / config_name).is_file()):
        raise ConfigError(
            f"there is no file {config_name} in {Path.cwd()}, nor in {DEFAULT_CONFIG_PATH}; give its path, or go to "
            "its folder"
        )
    has_own = Path(DEFAULT_CONFIG_PATH).is_dir()
    if shipped is not None and ((shipped / f"{name}.yaml").is_file() or not has_own):
        return name, str(shipped)
    return config_name, DEFAULT_CONFIG_PATH


def list_configs(config_path: str | Path | None = None) -> list[str]:
    """List the names that ``locate_config`` finds in a folder; ``None``: in all places where it looks."""
    places = [Path(config_path)] if config_path is not None else [Path(DEFAULT_CONFIG_PATH), shipped_folder()]
    return sorted({path.stem for place in places if place is not None for path in place.glob("*.yaml")})


def check_config_exists(folder: Path, name: str) -> None:
    """Raise ``ConfigError`` where there is no such file, with the nearest names."""
    if not folder.is_dir():
        raise ConfigError(
            f"config path is not a folder: {printable(str(folder))}; give the folder of YAML files as config_path "
            "(--config-path)"
        )
    if "/" in name or name in ("", ".", ".."):
        raise ConfigError(
            f"configuration name {name!r} is no name of a file; give its folder as config_path (--config-path), and "
            "the name alone"
        )
    if (folder / f"{name}.yaml").is_file():
        return
    present = list_configs(folder)
    nearest = get_close_matches(name, present, n=1, cutoff=0.5)
    hint = f"; nearest: {nearest[0]}" if nearest else ""
    raise ConfigError(
        f"no configuration '{name}' in {folder}{hint}; there are: {', '.join(present) or 'none'}. "
        "To begin with one of your own: mock-scheduler new DIR"
    )
