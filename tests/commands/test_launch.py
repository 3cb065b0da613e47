"""``mock-scheduler launch`` imports once for all ranks, where the program's own entry is what runs."""

from pathlib import Path

import pytest

from mock_scheduler.commands import launch
from mock_scheduler.config.loading import ConfigSource
from mock_scheduler.launch.launcher import LaunchPlan
from pipelines.program import PROGRAM

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("num_ranks", "entry", "preload"),
    [(2, None, PROGRAM.preload), (1, None, ()), (2, "tests.faults.optimizer_frozen", ())],
)
def test_ranks_are_forked_where_several_run_the_programs_own_entry(
    num_ranks: int, entry: str | None, preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[LaunchPlan, bool]] = []

    def take(plan: LaunchPlan, *, warm: object = None) -> int:
        started.append((plan, warm is not None))
        return 3

    monkeypatch.setattr(launch, "run_plan", take)
    overrides = (f"parallel.tensor_model_parallel_size={num_ranks}", f"output_dir={tmp_path}")
    source = ConfigSource(config_name="quickstart", config_path=str(CONFIGS), overrides=overrides)
    code = launch.run_launch(source, entry=entry, nnodes=1, node_rank=0, rdzv_endpoint=None)
    ((plan, is_warm),) = started
    assert (code, plan.num_processes, plan.preload, is_warm) == (3, num_ranks, preload, bool(preload))
