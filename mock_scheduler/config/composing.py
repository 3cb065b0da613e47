"""Composition of a configuration's YAML files and overrides, by Hydra.

Contract: creates no folder, changes no working directory and configures no logging.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import deepcopy
from functools import cached_property, lru_cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mock_scheduler.config.number_traps import SourceFile, may_have_traps
from mock_scheduler.config.sweeps import describe_sweep
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.text import bullet_list

_NESTED_HINT = (
    "\nWithin a list or an object quote each text that holds any of = , : [ ] { }, and for the shell the whole "
    "override, as in\n  \"align.candidates=[{name: tp2, overrides: ['parallel.tensor_model_parallel_size=2']}]\""
)


class Composer:
    """One configuration under any overrides: ``{folder}/{name}.yaml``.

    reads_once: read the files once for all overrides that only set values, as the candidates of an alignment have them;
    what these give is what Hydra gives with them. All other overrides go through Hydra each time.
    """

    def __init__(self, folder: Path, name: str, *, reads_once: bool = False) -> None:
        self._folder = folder
        self._name = name
        self._reads_once = reads_once

    @property
    def origin(self) -> str:
        """What is composed, for messages."""
        return f"configuration '{self._name}' ({self._folder / self._name}.yaml)"

    def compose(self, overrides: Sequence[Override]) -> tuple[DictConfig, list[SourceFile]]:
        """The composed configuration, interpolations open, and where that matters the files that it is of.

        The files are in the order in which they count. Raises ``ConfigError``.
        """
        if self._reads_once and self._bare is not None and all(map(self._sets_a_value, overrides)):
            composed = _set_values(self._bare, overrides)
            if composed is not None and not may_have_traps(composed):
                return composed, []
        return self._ask_hydra([self._as_hydra_override(override) for override in overrides])

    @cached_property
    def _bare(self) -> DictConfig | None:
        """Without any override; ``None`` where that cannot be composed."""
        try:
            return self._ask_hydra([])[0]
        except ConfigError:
            return None

    def _is_group(self, override: Override) -> bool:
        return override.package is not None or (self._folder / override.key_or_group).is_dir()

    def _sets_a_value(self, override: Override) -> bool:
        """Whether it sets a key of the configuration and nothing else, however the rest was composed."""
        is_own = override.key_or_group.split(".")[0] not in ("hydra", "defaults")
        return override.type is OverrideType.CHANGE and is_own and not self._is_group(override)

    def _as_hydra_override(self, override: Override) -> str:
        """Hydra changes only keys that the YAML has; ours may set every key of the schema, hence its ``++``."""
        text = override.input_line
        assert text is not None  # Hydra's parser keeps the line of every override that it reads
        return text if override.type is not OverrideType.CHANGE or self._is_group(override) else f"++{text}"

    def _ask_hydra(self, overrides: list[str]) -> tuple[DictConfig, list[SourceFile]]:
        try:
            # Hydra only warns of a defaults list without _self_, whose order it then guesses.
            with warnings.catch_warnings(), initialize_config_dir(config_dir=str(self._folder), version_base="1.3"):
                warnings.simplefilter("error", UserWarning)
                composed = compose(config_name=self._name, overrides=overrides)
                if not may_have_traps(composed):
                    return composed, []
                loader = GlobalHydra.instance().config_loader()
                defaults = loader.compute_defaults_list(self._name, overrides, RunMode.RUN)
        # OmegaConf lets errors of Python out where a key of a list is no number.
        except (HydraException, OmegaConfBaseException, yaml.YAMLError, UserWarning, ValueError, TypeError) as error:
            raise ConfigError(f"{self.origin} cannot be composed: {error}") from error
        places = [(self._folder / f"{entry.config_path}.yaml", entry.package or "") for entry in defaults.defaults]
        return composed, [SourceFile(path=path, package=package) for path, package in places if path.is_file()]


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Overrides in Hydra's grammar. Raises ``ConfigError`` with all that cannot be read, or would start a sweep."""
    parsed, problems, nested = [], [], ""
    for text in overrides:
        try:
            override = _parse(text)
        except HydraException as error:
            problems.append(f"{text!r}: {str(error).splitlines()[0]}")
            nested = nested or (_NESTED_HINT if any(bracket in text for bracket in "[{") else "")
            continue
        parsed.append(override)
        if override.is_sweep_override():
            problems.append(f"{text!r}: {describe_sweep(text, override)}")
    if problems:
        raise ConfigError(
            f"overrides that cannot be read:{bullet_list(problems, limit=None)}\n"
            f"Write them as a.b=c; quote values that hold special characters, as in 'a.b=\"^x\"'.{nested}"
        )
    return parsed


@lru_cache(maxsize=4096)
def _parse(text: str) -> Override:
    """One override; the runs of an alignment share most of theirs."""
    return OverridesParser.create().parse_override(text)


def _set_values(bare: DictConfig, overrides: Sequence[Override]) -> DictConfig | None:
    """As Hydra merges ``++key=value`` (1.3); ``None`` where one cannot be merged, for which it has the words."""
    composed = deepcopy(bare)
    try:
        for override in overrides:
            OmegaConf.update(composed, override.key_or_group, override.value(), merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError):
        return None
    return composed
