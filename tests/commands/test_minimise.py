"""``mock-scheduler minimise`` on alignments that a test answers by what it is asked to run."""

import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mock_scheduler.alignment.minimise.trials import only_candidate, remember
from mock_scheduler.alignment.plan.plan import plan_alignment
from mock_scheduler.commands import minimise as minimise_command
from mock_scheduler.commands.align import AlignOptions
from mock_scheduler.commands.minimise import MinimiseOptions, align_once, run_minimise
from mock_scheduler.config.align import CandidateConfig
from mock_scheduler.display.console import Console
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.program import ConfigLoader
from mock_scheduler.verdict.verdict import VerdictKind
from pipelines.config.loading import build_loader
from pipelines.config.schema import PipelineConfig
from pipelines.program import PROGRAM

CONFIG = """
exp_name: lake
seed: 1
max_steps: 4
rollout_batch_size: 4
model: {num_layers: 4, num_attention_heads: 4, num_query_groups: 4}
training: {micro_batch_size: 2, global_batch_size: 4}
train_env_manager: {num_env_groups: 2, group_size: 2}
align:
  baseline: [seed=7]
  candidates:
    - name: many
      overrides: [parallel.tensor_model_parallel_size=2, parallel.data_parallel_size=2, training.lr=0.1, gamma=0.5]
"""
# Steps, layers and the layout are all that can be reduced.
SMALL = """
exp_name: lake
max_steps: 2
rollout_batch_size: 2
val_batch_size: 2
model: {num_layers: 2}
training: {micro_batch_size: 2, global_batch_size: 2}
train_env_manager: {num_env_groups: 1, group_size: 2}
val_env_manager: {num_env_groups: 1, group_size: 2}
align:
  candidates: [{name: lr, overrides: [training.lr=0.1]}]
  matrix: {layouts: [pp2]}
"""


@dataclass(frozen=True)
class Case:
    """What one alignment was asked to compare, and in which folder."""

    baseline: PipelineConfig
    candidate: PipelineConfig
    num_candidates: int
    folder: Path


@dataclass
class Bench:
    """Answers alignments by what they compare, and remembers these."""

    folder: Path
    answer: Callable[[Case], VerdictKind]
    text: str = SMALL
    cases: list[Case] = field(default_factory=list)
    loads: dict[str, ConfigLoader] = field(default_factory=dict)
    output: io.StringIO = field(default_factory=io.StringIO)

    def align(
        self,
        config_name: str,
        config_path: Path,
        overrides: Sequence[str],
        candidate: CandidateConfig,
        output_dir: Path,
    ) -> VerdictKind:
        load = self.loads.setdefault(config_name, remember(build_loader(config_name, config_path)))
        align = load([*overrides, *only_candidate(load, overrides, candidate)]).align
        shared = [*overrides, *align.baseline]
        case = Case(
            baseline=load(shared),
            candidate=load([*shared, *align.candidates[0].overrides]),
            num_candidates=len(align.candidates) + len(align.matrix.layouts),
            folder=output_dir,
        )
        self.cases.append(case)
        return self.answer(case)

    def minimise(self, name: str = "lr", *overrides: str, max_runs: int = 100) -> int:
        (self.folder / "lake.yaml").write_text(self.text)
        return run_minimise(
            "lake",
            name,
            MinimiseOptions(output_dir=self.folder / "out", max_runs=max_runs),
            config_path=self.folder,
            overrides=overrides,
            align=self.align,
            console=Console(file=self.output, width=200),
        )

    @property
    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "out" / "minimise.json").read_text())
        return content


def has_planted_fault(case: Case) -> VerdictKind:
    """It needs tensor parallelism, two layers, two steps and another learning rate."""
    config = case.candidate
    shows = (
        config.parallel.tensor_model_parallel_size == 2
        and config.model.num_layers >= 2
        and config.max_steps >= 2
        and config.training.lr == 0.1
        and case.baseline.training.lr != 0.1
    )
    return VerdictKind.DIVERGED if shows else VerdictKind.ROUNDING


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A planted fault, reduced."""
    bench = Bench(tmp_path_factory.mktemp("reduced"), has_planted_fault, CONFIG)
    assert bench.minimise("many", "exp_name='it\\'s'") == 1
    return bench


def test_a_planted_fault_is_reduced_to_what_it_needs(reduced: Bench) -> None:
    result = reduced.result
    assert result["layout"] == "tp2 pp1 dp1"
    assert result["candidate_overrides"] == ["parallel.tensor_model_parallel_size=2", "training.lr=0.1"]
    assert result["overrides"] == [
        "max_steps=2",
        "train_env_manager.num_env_groups=1",
        "model.num_layers=2",
        "rollout_batch_size=2",
        "training.global_batch_size=2",
    ]
    assert result["reduced"] == ["steps 4 → 2", "groups 2 → 1", "layers 4 → 2", "dp 2 → 1", "without gamma=0.5"]
    assert result["is_complete"] is True
    assert (result["verdict"], result["candidate"]) == ("diverged", "many")
    assert result["num_runs"] == len(reduced.cases) <= 31
    assert [item["verdict"] for item in result["tried"]].count("diverged") >= 2
    assert {config.seed for case in reduced.cases for config in (case.baseline, case.candidate)} == {7}


def test_the_command_that_is_given_shows_the_reduced_case(reduced: Bench) -> None:
    words = shlex.split(reduced.result["command"])
    assert words[:3] == ["mock-scheduler", "align", "lake"]
    assert words[-4:-1] == ["--config-path", str(reduced.folder), "--output-dir"]
    plan = plan_alignment(
        build_loader("lake", reduced.folder), program=PROGRAM, overrides=words[3:-4], output_dir=Path(words[-1])
    )
    (candidate,) = plan.candidates
    case = Case(baseline=plan.baseline.config, candidate=candidate.config, num_candidates=1, folder=plan.output_dir)
    assert has_planted_fault(case) is VerdictKind.DIVERGED
    assert (case.baseline.exp_name, case.baseline.max_steps, case.baseline.seed) == ("it's-baseline", 2, 7)
    assert '"\'"' not in reduced.result["command"]
    assert reduced.output.getvalue().endswith(f"see it with  {reduced.result['command']}\n")


def test_the_command_that_is_given_works_in_a_folder_of_its_own(reduced: Bench, tmp_path: Path) -> None:
    """Not in the user's own, nor in that of another case."""
    folder = Path(shlex.split(reduced.result["command"])[-1])
    assert folder.parent == reduced.folder / "out"
    assert folder.name.startswith("smallest-")
    assert not folder.exists()
    assert folder not in {case.folder for case in reduced.cases}
    bench = Bench(tmp_path, lambda case: VerdictKind.DIVERGED)
    names = []
    for candidate in ("lr", "pp2", "lr"):
        bench.minimise(candidate)
        names.append(Path(shlex.split(bench.result["command"])[-1]).name)
    assert names[0] == names[2] != names[1]


def test_alignments_of_one_workload_share_a_folder(reduced: Bench) -> None:
    """So that its baseline runs once."""
    workloads: dict[Path, dict[str, Any]] = {}
    for case in reduced.cases:
        config = case.baseline.model_dump(mode="json", exclude={"align"})
        assert workloads.setdefault(case.folder, config) == config
    assert 1 < len(workloads) < len(reduced.cases)


def test_a_candidate_of_the_matrix_can_be_reduced(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lambda case: VerdictKind.DIVERGED)
    assert bench.minimise("pp2") == 1
    assert bench.result["candidate_overrides"] == ["parallel.pipeline_model_parallel_size=2"]
    assert bench.result["overrides"] == ["max_steps=1"]  # a layer for each of two stages stays
    assert {case.num_candidates for case in bench.cases} == {1}


@pytest.mark.parametrize(
    ("verdict", "exit_code"), [(VerdictKind.ROUNDING, 0), (VerdictKind.EMULATED, 0), (VerdictKind.INCOMPARABLE, 3)]
)
def test_what_is_not_diverged_is_not_reduced(tmp_path: Path, verdict: VerdictKind, exit_code: int) -> None:
    bench = Bench(tmp_path, lambda case: verdict)
    assert bench.minimise() == exit_code
    assert len(bench.cases) == 1
    assert bench.output.getvalue().endswith(
        f"nothing to shrink: lr is {verdict}, and only a diverged or suspect candidate shrinks\n"
    )
    assert not (tmp_path / "out" / "minimise.json").exists()


def test_a_suspect_candidate_may_become_diverged_and_a_diverged_one_not_suspect(tmp_path: Path) -> None:
    def is_worse_when_short(case: Case) -> VerdictKind:
        return VerdictKind.DIVERGED if case.baseline.max_steps < 2 else VerdictKind.SUSPECT

    bench = Bench(tmp_path, is_worse_when_short)
    assert bench.minimise() == 2
    assert "max_steps=1" in bench.result["overrides"]

    def is_milder_when_short(case: Case) -> VerdictKind:
        return VerdictKind.SUSPECT if case.baseline.max_steps < 2 else VerdictKind.DIVERGED

    second = Bench(tmp_path, is_milder_when_short)
    assert second.minimise() == 1
    assert second.result["overrides"] == ["model.num_layers=1"]


def test_runs_that_are_used_up_end_it_with_the_best_so_far(tmp_path: Path) -> None:
    bench = Bench(tmp_path, has_planted_fault, CONFIG)
    assert bench.minimise("many", max_runs=2) == 1
    assert len(bench.cases) == 2  # that of the candidate as it is among them
    assert (bench.result["num_runs"], bench.result["is_complete"]) == (2, False)
    assert (
        "still fails after 2 alignments, the limit of --max-runs; a smaller case may exist\n" in bench.output.getvalue()
    )


def test_one_run_is_spent_on_the_candidate_as_it_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path, has_planted_fault, CONFIG)
    assert bench.minimise("many", max_runs=1) == 1
    assert len(bench.cases) == 1
    assert (bench.result["num_runs"], bench.result["reduced"]) == (1, [])
    assert (
        "still fails after 1 alignment, the limit of --max-runs; a smaller case may exist\n" in bench.output.getvalue()
    )


def test_a_candidate_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Bench(tmp_path, lambda case: VerdictKind.DIVERGED).minimise("typo")
    assert str(caught.value) == "there is no candidate 'typo'; the candidates are lr, pp2"


def test_one_alignment_has_only_its_candidate_and_gives_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lake.yaml").write_text(SMALL)
    candidate = CandidateConfig(name="x", overrides=["exp_name='a b'"], entry="my.kernel", python="/p", exact=True)
    seen = []

    def run_align(
        *, config_name: str, config_path: Path, overrides: Sequence[str], options: AlignOptions, **more: object
    ) -> int:
        align = build_loader(config_name, config_path)(overrides).align
        seen.append((align.candidates, align.matrix.layouts, align.proofs.localise, align.proofs.consequence))
        assert options.output_dir is not None
        assert not options.overwrite
        options.output_dir.mkdir()
        (options.output_dir / "align.json").write_text('{"candidates": [{"verdict": "identical (emulated)"}]}')
        return 0

    monkeypatch.setattr(minimise_command, "run_align", run_align)
    assert align_once("lake", tmp_path, ["seed=1"], candidate, tmp_path / "a") is VerdictKind.EMULATED
    assert seen == [([candidate], [], False, False)]

    def fail(**arguments: object) -> int:
        raise AlignmentError("the baseline failed")

    monkeypatch.setattr(minimise_command, "run_align", fail)
    assert align_once("lake", tmp_path, [], candidate, tmp_path / "b") is VerdictKind.INCOMPARABLE
