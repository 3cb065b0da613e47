"""What carries the runs of a configuration out is built as its section ``align.executor`` says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.alignment.executors.jobs import ClusterLaunch, Say, choose_environment
from mock_scheduler.alignment.executors.local import make_process_launch
from mock_scheduler.alignment.executors.protocol import Cluster, LaunchRun
from mock_scheduler.alignment.executors.ray import build_ray
from mock_scheduler.alignment.executors.slurm import build_slurm
from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.executor import ClusterExecutorConfig, RayExecutorConfig, SlurmExecutorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Holds how runs are carried out: by ``launch``, ``at_once`` of them.

    ``environ``, ``machine``: of their processes and of where they run, as far as it is known before; ``None``: this
    process's. ``executor``: the cluster in a word, empty without one.
    """

    launch: LaunchRun
    at_once: int
    environ: Mapping[str, str] | None = None
    machine: Mapping[str, str] | None = None
    executor: str = ""


def build_execution(
    align: AlignConfig, config_name: str, config_path: Path, *, recording_dir: Path | None, say: Say
) -> Execution:
    """Builds it; raises ``ConfigError`` where the cluster cannot be used from here."""
    executor = align.executor
    if not isinstance(executor, ClusterExecutorConfig):
        return Execution(launch=make_process_launch(config_name, config_path), at_once=align.at_once)
    environ = choose_environment(executor, os.environ)
    launch = ClusterLaunch(
        cluster=_build_cluster(executor),
        config=executor,
        config_name=config_name,
        config_path=config_path,
        recording_dir=recording_dir,
        environ=environ,
        say=say,
    )
    # Nobody knows before where a job will run; each says it at its end.
    machine = {"executor": launch.cluster.name}
    return Execution(
        launch=launch,
        at_once=executor.max_jobs,
        environ=environ,
        machine=machine,
        executor=launch.cluster.name,
    )


def _build_cluster(config: ClusterExecutorConfig) -> Cluster:
    if isinstance(config, SlurmExecutorConfig):
        return build_slurm(config)
    assert isinstance(config, RayExecutorConfig)
    return build_ray(config)
