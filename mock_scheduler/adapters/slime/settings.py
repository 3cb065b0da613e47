"""The settings of a run of slime's family, in one YAML file that ``MOCK_SCHEDULER_SLIME`` names.

    rollout_mock: {enable: true, mode: dump, dump_dir: dumps/v1}
    real: slime.rollout.sglang_rollout.generate_rollout

Contract: read once in a process, when the first rollout is asked for; an unknown key is an error.
"""

from __future__ import annotations

from typing import ClassVar

from mock_scheduler.adapters.settings import RolloutSettings
from mock_scheduler.errors import ConfigError

FAMILY = ("slime", "miles", "vime", "relax")


class SlimeSettings(RolloutSettings):
    """The content of the file; further keys are those of ``RolloutSettings``.

    Attributes:
        real: the rollout function, or class, that plays: ``module.name``.
        framework: the package of its classes; ``None``: the first part of ``real`` where that is slime, miles or vime.
        record_evaluation: evaluations are recorded and replayed; otherwise they are played, and a replay has none.
        with_engines: a replay may have engines beside it, as for a measurement of memory.
    """

    variable: ClassVar = "MOCK_SCHEDULER_SLIME"

    real: str
    framework: str | None = None
    record_evaluation: bool = True
    with_engines: bool = False

    @property
    def package(self) -> str:
        """The package of the framework's classes; raises ``ConfigError`` where it is not known."""
        first = self.real.partition(".")[0]
        if self.framework is None and first not in FAMILY:
            raise ConfigError(f"real is {self.real!r}: set framework to the package of its samples, as in slime")
        return self.framework or first
