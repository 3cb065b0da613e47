"""Who carries an alignment's runs out: kinds, their keys, and what is refused before anything runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from mock_scheduler.alignment.executors.build import build_execution
from mock_scheduler.config.align import AlignConfig
from mock_scheduler.config.executor import LocalExecutorConfig, RayExecutorConfig, SlurmExecutorConfig
from mock_scheduler.errors import ConfigError
from mock_scheduler.program import list_stored_code
from pipelines.config.loading import load_config


def load(*overrides: str) -> AlignConfig:
    return load_config("quickstart", overrides=overrides).align


def test_runs_are_processes_of_this_machine_unless_said_otherwise() -> None:
    assert isinstance(load().executor, LocalExecutorConfig)
    slurm = load("align.executor={kind: slurm, parameters: {slurm_partition: gpu}, gpus_per_process: 1}").executor
    assert isinstance(slurm, SlurmExecutorConfig)
    assert (slurm.parameters, slurm.gpus_per_process, slurm.max_jobs) == ({"slurm_partition": "gpu"}, 1, 32)
    assert isinstance(load("align.executor={kind: ray, address: 'http://h:8265'}").executor, RayExecutorConfig)


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("{kind: kubernetes}", "kind must be one of local, slurm, ray"),
        ("{kind: slurm, address: 'http://h:8265'}", "align.executor.address"),
        ("{kind: ray, retries: -1}", "align.executor.retries"),
        ("{kind: ray, on_interrupt: kill}", "align.executor.on_interrupt"),
        ("{kind: local, retries: 2}", "align.executor.retries"),
    ],
)
def test_a_key_of_another_kind_and_a_wrong_value_are_named(section: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(f"align.executor={section}")


def test_runs_at_once_are_of_this_machine() -> None:
    with pytest.raises(ConfigError, match=r"at_once is 2, and counts runs of this machine; write executor\.max_jobs"):
        load("align.executor={kind: ray}", "align.at_once=2")


@pytest.mark.parametrize(("kind", "module"), [("slurm", "submitit"), ("ray", "ray.job_submission")])
def test_a_missing_package_is_named_with_its_extra(kind: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    align = load(f"align.executor={{kind: {kind}}}")
    with pytest.raises(ConfigError, match=rf"pip install 'mock-scheduler\[{kind}\]'"):
        build_execution(align, "quickstart", Path("configs"), recording_dir=None, say=lambda name, what: None)


def test_a_stored_configuration_that_sends_jobs_elsewhere_names_it_as_code(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    found = {}
    for kind in ("local", "ray"):
        path.write_text(yaml.safe_dump({"align": {"executor": {"kind": kind}}}))
        found[kind] = [item.key for item in list_stored_code(path)]
    assert found == {"local": [], "ray": ["align.executor", "align.executor.kind"]}
