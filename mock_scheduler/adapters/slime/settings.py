"""The settings of a run of slime's family, in one YAML file that ``MOCK_SCHEDULER_SLIME`` names.

rollout_mock: {enable: true, mode: dump, dump_dir: dumps/v1}
real: slime.rollout.sglang_rollout.generate_rollout
"""

from __future__ import annotations

from pathlib import Path

from mock_scheduler.adapters.settings import AdapterSettings, read_settings
from mock_scheduler.errors import ConfigError

VARIABLE = "MOCK_SCHEDULER_SLIME"
FAMILY = ("slime", "miles", "vime", "relax")


class SlimeSettings(AdapterSettings):
    """The content of the file.

    Attributes:
        real: the rollout function, or class, that plays: ``module.name``.
        framework: the package of its classes; ``None``: the first part of ``real`` where that is slime, miles or vime.
    """

    real: str
    framework: str | None = None

    @property
    def package(self) -> str:
        """The package of the framework's classes; raises ``ConfigError`` where it is not known."""
        first = self.real.partition(".")[0]
        if self.framework is None and first not in FAMILY:
            raise ConfigError(f"real is {self.real!r}: set framework to the package of its samples, as in slime")
        return self.framework or first


def load_settings(path: Path | None = None) -> SlimeSettings:
    """Read the file; ``None``: the one that the variable names; raises ``ConfigError`` listing all its problems."""
    return read_settings(SlimeSettings, VARIABLE, path)
