"""The options of the two builders are those that a proxy has."""

from dataclasses import MISSING, fields
from typing import get_type_hints

from mock_scheduler.proxy import BuildOptions
from mock_scheduler.proxy.settings import ProxySettings


def test_the_options_are_exactly_the_optional_settings_with_their_types() -> None:
    optional = {f.name for f in fields(ProxySettings) if f.default is not MISSING or f.default_factory is not MISSING}
    settings = get_type_hints(ProxySettings)
    assert get_type_hints(BuildOptions) == {name: settings[name] for name in optional}
    assert BuildOptions.__optional_keys__ == optional
