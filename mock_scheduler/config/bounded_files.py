"""Hydra reads the files of a configuration, but none that stands for more values than it may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult

from mock_scheduler.errors import ConfigError
from mock_scheduler.support.foreign_files import read_text
from mock_scheduler.support.yaml_text import load_yaml


class _BoundedFileSource(FileConfigSource):
    """Reads YAML files for Hydra as its own source does, but none that stands for more values than it may."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if path.is_file():
            try:
                load_yaml(read_text(path, what="a configuration"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path} is not UTF-8: {error}") from error
            except ValueError as error:
                raise ConfigError(f"{path} {error}") from error
        return super().load_config(config_path)


@contextmanager
def bounded_files() -> Iterator[None]:
    """Has Hydra read files by our source within the block; a host program's Hydra keeps its own."""
    Plugins.instance()  # registers Hydra's own sources
    types = SourcesRegistry.instance().types
    scheme = FileConfigSource.scheme()
    before = types[scheme]
    types[scheme] = _BoundedFileSource
    try:
        yield
    finally:
        types[scheme] = before
