"""Has the section ``align.executor``: who carries an alignment's runs out; importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from mock_scheduler.config.base import ConfigSection, Decides, NonNegativeInt, PositiveInt, union_tag

PositiveSeconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LocalExecutorConfig(ConfigSection):
    """Runs are processes of this machine, and end with the command."""

    decides: ClassVar = Decides.LABEL

    kind: Literal["local"] = "local"
    """This machine."""


class ClusterExecutorConfig(ConfigSection):
    """Runs are jobs of a cluster, and go on when the command is gone; the same command then goes on with them.

    The alignment's folder, the project and the interpreter lie under the same paths on every node.

    ``max_jobs``: how many jobs wait or run at a time, in the place of ``at_once``. ``retries``: how often a job that
    was lost with its node is submitted again. ``on_interrupt``: what becomes of the jobs when the command is
    interrupted. ``cpus_per_process``, ``gpus_per_process``: what a job asks for, times the processes of its layout, all
    on one node. ``poll_s``: seconds between two looks.
    """

    decides: ClassVar = Decides.LABEL

    max_jobs: PositiveInt = 32
    retries: NonNegativeInt = 2
    on_interrupt: Literal["cancel", "leave"] = "cancel"
    cpus_per_process: PositiveInt = 1
    gpus_per_process: NonNegativeInt = 0
    poll_s: PositiveSeconds = 2.0


class SlurmExecutorConfig(ClusterExecutorConfig):
    """Jobs of Slurm, through submitit.

    ``timeout_min``: minutes that a job may take. ``parameters``: further ones of submitit's executor, such as
    ``slurm_partition``, ``mem_gb`` and ``slurm_additional_parameters``. ``cluster``: ``local`` has submitit start
    processes of this machine in Slurm's place, to try a configuration.
    """

    kind: Literal["slurm"]
    """``slurm``."""
    cluster: Literal["slurm", "local"] = "slurm"
    timeout_min: PositiveInt = 60
    parameters: dict[str, Any] = Field(default={})


class RayExecutorConfig(ClusterExecutorConfig):
    """Jobs of a Ray cluster, through its dashboard.

    ``address``: of the dashboard, ``http://HOST:8265``; ``None``: as ``RAY_API_SERVER_ADDRESS`` says. ``resources``:
    further resources that a job asks for, by their names. ``env``: names of variables of this process that go to every
    job, beside the settings that decide bits; Ray shows them on its dashboard. ``runtime_env``: of Ray, as it is.
    """

    kind: Literal["ray"]
    """``ray``."""
    address: str | None = None
    resources: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default={})
    env: list[str] = Field(default=[])
    runtime_env: dict[str, Any] = Field(default={})


_KINDS: Mapping[str, type[ConfigSection]] = {
    "local": LocalExecutorConfig,
    "slurm": SlurmExecutorConfig,
    "ray": RayExecutorConfig,
}


def _find_kind(value: object) -> str | None:
    """Returns the tag of a section, built or not; ``None``, which pydantic refuses, for another kind."""
    if isinstance(value, Mapping):
        kind = value.get("kind", "local")
        return union_tag(kind) if isinstance(kind, str) and kind in _KINDS else None
    return next((union_tag(name) for name, section in _KINDS.items() if isinstance(value, section)), None)


ExecutorConfig: TypeAlias = Annotated[
    Annotated[LocalExecutorConfig, Tag(union_tag("local"))]
    | Annotated[SlurmExecutorConfig, Tag(union_tag("slurm"))]
    | Annotated[RayExecutorConfig, Tag(union_tag("ray"))],
    Discriminator(
        _find_kind,
        custom_error_type="executor_kind",
        custom_error_message=f"kind must be one of {', '.join(_KINDS)}",
    ),
]
"""Who carries runs out, by ``kind``."""
