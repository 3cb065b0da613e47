"""Alignment runs against a fake launcher that writes what a run would write."""

import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from mock_scheduler.alignment.executors.protocol import LaunchRun
from mock_scheduler.alignment.plan.overrides import quote_override
from mock_scheduler.alignment.plan.planned_run import PlannedRun
from mock_scheduler.api import align as alignments
from mock_scheduler.commands.align import AlignOptions, run_align
from mock_scheduler.config.instruments import TraceKind
from mock_scheduler.display.console import Console
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.report.alignment.builder import build_view
from mock_scheduler.report.alignment.view import AlignmentView
from mock_scheduler.trace.begun_calls import BegunCalls
from mock_scheduler.trace.entries import LedgerCall, TraceEntry
from mock_scheduler.trace.shards import whole
from mock_scheduler.verdict.results import AlignmentResult
from pipelines.config.loading import load_config
from tests.alignment.finished_runs import leave_no_own_code
from tests.rank_traces import save_rank_trace

CONFIG = """
exp_name: lake
output_dir: {output_dir}
max_steps: 2
system_envs:
  NCCL_ALGO: Ring
  NVTE_ALLOW_NONDETERMINISTIC_ALGO: '0'
  CUBLAS_WORKSPACE_CONFIG: ':4096:8'
  DETERMINISTIC_MODE: '1'
align:
  baseline: [seed=7]
  candidates:
    - {{name: same}}
    - {{name: tp2, overrides: [parallel.tensor_model_parallel_size=2]}}
"""
NORM = "decoder.final_layernorm.weight"


def write_results(run: PlannedRun, *, gradient: float = 1.0, batches: tuple[str, str] = ("a", "b")) -> int:
    """What a completed run leaves behind, and its exit code."""
    values: Sequence[tuple[TraceKind, float]] = (("initial", 0.0), ("gradient", gradient), ("parameter", 1.0))
    for step in range(2):
        entries = [
            TraceEntry(update=0, kind=kind, spec=whole(NORM, (2,)), tensor=torch.full((2,), value))
            for kind, value in values
        ]
        save_rank_trace(
            run.output_dir / "trace", step=step, global_rank=0, world_size=1, coordinates={"tp": 0}, entries=entries
        )
    rows = [json.dumps({"step": step, "metrics": {"pg_loss": 0.5}}) for step in range(2)]
    (run.output_dir / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    stated = {"status": "completed", "layout": run.layout, "wall_s": 10.0, "rollout_s": 4.0}
    stated["batches"] = {str(step): digest for step, digest in enumerate(batches)}
    (run.output_dir / "run.json").write_text(json.dumps(stated))
    built = {"engine": 0, "environment": 0}
    (run.output_dir / "ledger.json").write_text(json.dumps({"built": built}))
    leave_no_own_code(run.output_dir)
    return 0


@dataclass
class FakeLauncher:
    """Writes results in place of starting processes; ``behave`` replaces that for runs by name."""

    behave: dict[str, Callable[[PlannedRun], int]] = field(default_factory=dict)
    started: list[PlannedRun] = field(default_factory=list)

    def make(self, config_name: str, config_path: Path) -> LaunchRun:
        return self.launch

    def launch(self, run: PlannedRun) -> int:
        self.started.append(run)
        return self.behave.get(run.name, write_results)(run)


@dataclass
class Bench:
    """A configuration folder and a console to read back."""

    folder: Path
    output: io.StringIO = field(default_factory=io.StringIO)

    def write(self, text: str) -> None:
        (self.folder / "lake.yaml").write_text(text)

    def align(
        self,
        launcher: FakeLauncher,
        *overrides: str,
        overwrite: bool = False,
        json_path: Path | None = None,
        html_path: Path | None = None,
        is_ci: bool = False,
    ) -> int:
        return run_align(
            config_name="lake",
            config_path=self.folder,
            overrides=overrides,
            options=AlignOptions(overwrite=overwrite, json_path=json_path, html_path=html_path, is_ci=is_ci),
            make_launch=launcher.make,
            console=Console(file=self.output, width=100),
        )

    @property
    def root(self) -> Path:
        return self.folder / "out dir=1" / "align"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    bench.write(CONFIG.format(output_dir=tmp_path / "out dir=1"))
    return bench


def fail_with_error_json(exit_code: int, name: str) -> Callable[[PlannedRun], int]:
    def behave(run: PlannedRun) -> int:
        error = {"type": name, "message": "it went wrong", "exit_code": exit_code, "global_rank": 0}
        (run.output_dir / "error.json").write_text(json.dumps(error))
        return exit_code

    return behave


def test_the_baseline_dumps_then_each_candidate_mocks_its_recording(bench: Bench) -> None:
    launcher = FakeLauncher()
    assert bench.align(launcher, "max_steps=3") == 0
    configs = [load_config("lake", config_path=bench.folder, overrides=run.overrides) for run in launcher.started]
    assert [run.name for run in launcher.started] == ["baseline", "same", "tp2"]
    assert [config.rollout_mock.effective_mode for config in configs] == ["dump", "mock", "mock"]
    assert {config.rollout_mock.dump_dir for config in configs} == {str(bench.root / "recording")}
    assert [config.output_dir for config in configs] == [str(bench.root / name) for name in ("baseline", "same", "tp2")]
    assert [config.exp_name for config in configs] == ["lake-baseline", "lake-same", "lake-tp2"]
    assert {(config.trace.level, config.seed, config.max_steps) for config in configs} == {("full", 7, 3)}
    assert [config.parallel.world_size for config in configs] == [1, 1, 2]


def test_equal_runs_are_identical_in_report_and_json(bench: Bench, tmp_path: Path) -> None:
    copy = tmp_path / "results" / "copy.json"
    assert bench.align(FakeLauncher(), json_path=copy) == 0
    result = json.loads((bench.root / "align.json").read_text())
    assert [candidate["verdict"] for candidate in result["candidates"]] == ["identical", "identical"]
    assert result["candidates"][1]["run"]["built"] == {"engine": 0, "environment": 0}
    assert json.loads(copy.read_text()) == result
    assert "engines built 0, environments built 0" in bench.output.getvalue()


def test_a_corrupt_gradient_is_diverged_with_exit_code_1(bench: Bench) -> None:
    launcher = FakeLauncher({"tp2": lambda run: write_results(run, gradient=1.5)})
    assert bench.align(launcher) == 1
    candidate = json.loads((bench.root / "align.json").read_text())["candidates"][1]
    assert candidate["verdict"] == "diverged"
    assert candidate["first_divergence"]["name"] == NORM


def test_a_candidate_that_fails_is_incomparable_with_its_own_error_and_the_next_one_runs(bench: Bench) -> None:
    launcher = FakeLauncher({"same": fail_with_error_json(3, "ContractError")})
    assert bench.align(launcher) == 3
    failed, passed = json.loads((bench.root / "align.json").read_text())["candidates"]
    assert failed["verdict"] == "incomparable"
    assert failed["reason"] == "the run failed (exit code 3): ContractError: it went wrong"
    assert passed["verdict"] == "identical"


def test_a_candidate_without_determinism_is_unverified(bench: Bench) -> None:
    assert bench.align(FakeLauncher({"same": fail_with_error_json(4, "DeterminismError")})) == 4


def test_a_candidate_that_died_is_explained_by_the_end_of_its_log(bench: Bench) -> None:
    def die(run: PlannedRun) -> int:
        run.log_path.write_text("started\nSegmentation fault\n")
        return -11

    assert bench.align(FakeLauncher({"same": die})) == 3
    failed = json.loads((bench.root / "align.json").read_text())["candidates"][0]
    assert failed["reason"] == (
        "the run failed (exit code -11): no error.json; the last lines of its output:\nstarted\nSegmentation fault"
    )


def test_a_candidate_without_a_trace_is_incomparable(bench: Bench) -> None:
    def forget(run: PlannedRun) -> int:
        write_results(run)
        (run.output_dir / "trace").rename(run.output_dir / "elsewhere")
        return 0

    assert bench.align(FakeLauncher({"same": forget})) == 3


def test_a_baseline_that_fails_ends_the_alignment(bench: Bench) -> None:
    launcher = FakeLauncher({"baseline": fail_with_error_json(5, "ConfigError")})
    with pytest.raises(AlignmentError) as caught:
        bench.align(launcher)
    assert str(caught.value) == (
        "the baseline failed (exit code 5), so no candidate was run: ConfigError: it went wrong\n"
        f"its whole output is in {bench.root / 'baseline' / 'run.log'}"
    )
    assert [run.name for run in launcher.started] == ["baseline"]


def test_ranks_that_did_not_issue_the_same_collectives_are_told_by_a_further_run(bench: Bench) -> None:
    """A rank that leaves a collective out aborts another one, whose error tells of neither."""
    calls = {0: ["reduce_scatter", "all_reduce"], 1: ["all_reduce"]}

    def abort(run: PlannedRun) -> int:
        run.log_path.write_text("Aborted\n")
        if run.config.trace.kinds == ["collective"]:
            for rank, operations in calls.items():
                begun = BegunCalls(run.output_dir, global_rank=rank, step=0)
                for operation in operations:
                    begun.add(LedgerCall(operation=operation, group=(0, 1), dtype="float32", num_elements=64))
        return 134

    launcher = FakeLauncher({"tp2": abort, "same": abort, "collectives-tp2": abort})
    assert bench.align(launcher) == 3
    # A run of one process has no other rank to disagree with.
    assert [run.name for run in launcher.started] == ["baseline", "same", "tp2", "collectives-tp2"]
    alone, torn = json.loads((bench.root / "align.json").read_text())["candidates"]
    assert alone["reason"].startswith("the run failed (exit code 134): no error.json")
    assert torn["reason"].startswith(
        "its ranks did not issue the same collectives: step 0: group [0, 1], collective 0 is reduce_scatter of 64 "
        "float32 over ranks 0, 1 in global rank 0, and all_reduce of 64 float32 over ranks 0, 1 in global rank 1; "
        "the run failed (exit code 134)"
    )
    assert torn["why"]["collectives"]["difference"]["group"] == [0, 1]


@pytest.mark.parametrize(("exit_code", "expected"), [(3, 3), (4, 4), (5, 5), (70, 70), (137, 137), (1, 70)])
def test_an_alignment_exits_as_its_failed_baseline_did(bench: Bench, exit_code: int, expected: int) -> None:
    """A baseline without determinism (4) ended the command with 3. Never with 1: nothing was compared."""
    with pytest.raises(AlignmentError) as caught:
        bench.align(FakeLauncher({"baseline": fail_with_error_json(exit_code, "SomeError")}))
    assert pickle.loads(pickle.dumps(caught.value)).exit_code == expected


def test_an_interrupt_loses_no_verdict(bench: Bench) -> None:
    """align.json was written after the last candidate only: Ctrl-C in the last of many hours lost all of them."""

    def interrupt(run: PlannedRun) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.align(FakeLauncher({"tp2": interrupt}))
    result = json.loads((bench.root / "align.json").read_text())
    assert [candidate["verdict"] for candidate in result["candidates"]] == ["identical", "incomparable"]
    assert result["candidates"][1]["reason"] == "not run yet: the alignment is still going, or was interrupted"
    assert result["exit_code"] == 3
    assert not list(bench.root.glob(".align.json*"))


def test_a_candidate_with_a_bad_layout_is_named_before_anything_runs(bench: Bench) -> None:
    bench.write(
        CONFIG.format(output_dir="out") + "    - {name: odd, overrides: [parallel.tensor_model_parallel_size=3]}\n"
    )
    launcher = FakeLauncher()
    with pytest.raises(ConfigError, match=r"(?s)^nothing was run:\ncandidate 'odd': .*layout tp3 pp1 dp1"):
        bench.align(launcher)
    assert launcher.started == []


def test_no_candidate_is_an_error(bench: Bench) -> None:
    bench.write("exp_name: lake\n")
    with pytest.raises(ConfigError) as caught:
        bench.align(FakeLauncher())
    assert str(caught.value) == (
        "there is no candidate: align.candidates and align.matrix are empty; fill one, as in "
        "align.candidates: [{name: tp2, overrides: [...]}] or align.matrix.layouts: [tp2]"
    )


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ("{name: baseline}", "align.candidates: the alignment itself uses 'baseline'; give the candidate another name"),
        ("{name: tp2}", "align.candidates: more than one candidate is named 'tp2'"),
        (
            "{name: x, overrides: [rollout_mock.mode=dump]}",
            "nothing was run:\ncandidate 'x': an alignment run sets rollout_mock.mode itself; remove it from its "
            "overrides",
        ),
    ],
)
def test_an_impossible_candidate_is_refused(bench: Bench, candidate: str, message: str) -> None:
    bench.write(CONFIG.format(output_dir="out") + f"    - {candidate}\n")
    with pytest.raises(ConfigError) as caught:
        bench.align(FakeLauncher())
    assert str(caught.value) == message


def test_an_earlier_alignment_is_gone_on_with_and_replaced_only_with_overwrite(bench: Bench) -> None:
    bench.align(FakeLauncher())
    left_over = bench.root / "left_over"
    left_over.touch()
    again = FakeLauncher()
    assert bench.align(again) == 0
    assert left_over.exists()
    assert bench.align(FakeLauncher(), overwrite=True) == 0
    assert not left_over.exists()


def test_a_folder_in_which_another_alignment_is_at_work_is_left_to_it(bench: Bench) -> None:
    """Also with --overwrite, which would have taken its runs away."""
    refused: list[str] = []

    def interfere(run: PlannedRun) -> int:
        with pytest.raises(ConfigError) as caught:
            bench.align(FakeLauncher(), overwrite=True)
        refused.append(str(caught.value))
        return write_results(run)

    assert bench.align(FakeLauncher({"tp2": interfere})) == 0
    assert len(refused) == 1
    assert refused[0].startswith(f"another mock-scheduler align works in {bench.root}; wait until it has ended")
    assert bench.align(FakeLauncher(), overwrite=True) == 0


def test_a_folder_that_no_alignment_made_is_never_removed(bench: Bench) -> None:
    bench.root.mkdir(parents=True)
    precious = bench.root / "thesis.txt"
    precious.write_text("years of work")
    with pytest.raises(ConfigError, match="was not made by mock-scheduler align"):
        bench.align(FakeLauncher(), overwrite=True)
    assert precious.read_text() == "years of work"


@pytest.mark.parametrize("value", ["a b", "a=b", "it's", "back\\slash", "end\\", "\\'", "a,b [c] {d}", "ünï", "${x}"])
def test_quoted_overrides_arrive_as_written(bench: Bench, value: str) -> None:
    override = quote_override("output_dir", value)
    OverridesParser.create().parse_overrides([override])
    assert load_config("lake", config_path=bench.folder, overrides=[override]).output_dir == value


def test_without_determinism_a_difference_proves_nothing_and_bit_equality_still_does(bench: Bench) -> None:
    launcher = FakeLauncher({"tp2": lambda run: write_results(run, gradient=2.0)})
    code = bench.align(launcher, "system_envs.DETERMINISTIC_MODE='0'", "rollout_mock.allow_nondeterministic=true")
    same, tp2 = json.loads((bench.root / "align.json").read_text())["candidates"]
    assert (same["verdict"], tp2["verdict"], code) == ("identical", "unverified", 4)
    assert tp2["reason"].startswith(
        "without DETERMINISTIC_MODE=1 two equal runs may differ as much: first divergence: step 0, update 0, backward: "
        "gradient of "
    )


def test_a_difference_is_unverified_where_only_the_candidate_was_not_deterministic(bench: Bench) -> None:
    """Only the baseline was asked, so a candidate that may not repeat itself was called diverged."""
    loose = "[\"system_envs.DETERMINISTIC_MODE='0'\", rollout_mock.allow_nondeterministic=true]"
    bench.write(CONFIG.format(output_dir=bench.folder / "out dir=1") + f"    - {{name: loose, overrides: {loose}}}\n")
    assert bench.align(FakeLauncher({"loose": lambda run: write_results(run, gradient=2.0)})) == 4
    candidates = json.loads((bench.root / "align.json").read_text())["candidates"]
    assert [candidate["verdict"] for candidate in candidates] == ["identical", "identical", "unverified"]


def test_a_copy_that_cannot_be_written_is_refused_before_anything_runs(bench: Bench, tmp_path: Path) -> None:
    launcher = FakeLauncher()
    with pytest.raises(ConfigError) as caught:
        bench.align(launcher, json_path=tmp_path)
    assert (str(caught.value), launcher.started) == (
        f"--json: the command cannot write {tmp_path}; name a file in a folder that exists and is writable",
        [],
    )


def test_the_report_says_where_result_recording_and_logs_are(bench: Bench) -> None:
    bench.align(FakeLauncher())
    assert bench.output.getvalue().endswith(
        f"\nresult       {bench.root}/align.json"
        f"\nrecording    {bench.root}/recording"
        f"\nruns         {bench.root}/{{name}}/run.log\n"
    )


def test_what_is_read_from_folders_for_page_and_json_is_read_once(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of page, JSON and terminal read traces and recording anew, for seconds, when all runs had ended."""
    built: list[bool] = []

    def count(result: AlignmentResult, *, is_full: bool = True) -> AlignmentView:
        built.append(is_full)
        return build_view(result, is_full=is_full)

    monkeypatch.setattr(alignments, "build_view", count)
    bench.align(FakeLauncher(), json_path=tmp_path / "copy.json")
    assert built[-1]
    assert built.count(True) == 1


def test_the_summary_for_ci_says_where_its_files_are(bench: Bench) -> None:
    bench.align(FakeLauncher(), is_ci=True)
    assert bench.output.getvalue().endswith(
        "\nalignment of lake: all of 2 candidates pass: 2 identical (exit code 0)\n  identical: same, tp2\n"
        f"page      {bench.root}/align.html\n"
        f"result    {bench.root}/align.json\n"
        f"JUnit XML {bench.root}/align.junit.xml\n"
    )


def test_the_summary_for_ci_names_copies_too(bench: Bench, tmp_path: Path) -> None:
    bench.align(FakeLauncher(), is_ci=True, json_path=tmp_path / "copy.json", html_path=tmp_path / "copy.html")
    assert bench.output.getvalue().endswith(
        f"\nJUnit XML {bench.root}/align.junit.xml\nJSON copy {tmp_path}/copy.json\nHTML copy {tmp_path}/copy.html\n"
    )
    assert (tmp_path / "copy.json").read_bytes() == (bench.root / "align.json").read_bytes()
    assert (tmp_path / "copy.html").read_bytes() == (bench.root / "align.html").read_bytes()


def test_a_module_of_ones_own_is_named_as_what_may_round(bench: Bench) -> None:
    candidates = "align.candidates=[{name: mine, entry: tests.alignment.output_scaled_on_one_rank}]"
    launcher = FakeLauncher({"mine": lambda run: write_results(run, gradient=1.0 + 2**-20)})
    bench.align(launcher, candidates)
    (mine,) = json.loads((bench.root / "align.json").read_text())["candidates"]
    texts = {proof["name"]: proof["text"] for proof in mine["proofs"]}
    assert "what it changes may round (its module tests.alignment.output_scaled_on_one_rank)" in texts["bit-equality"]
    assert (mine["entry"], mine["overrides"]) == ("tests.alignment.output_scaled_on_one_rank", [])


def test_the_pipelines_own_module_is_not_named(bench: Bench) -> None:
    bench.align(FakeLauncher())
    found = json.loads((bench.root / "align.json").read_text())["candidates"]
    assert [candidate["entry"] for candidate in found] == ["", ""]


def test_a_module_that_does_not_run_the_pipeline_is_told_what_to_call(bench: Bench) -> None:
    """It ended with 0, and the report said only that the run's file cannot be read."""
    candidates = "align.candidates=[{name: mine, entry: tests.alignment.output_scaled_on_one_rank}]"
    assert bench.align(FakeLauncher({"mine": lambda run: 0}), candidates) == 3
    (mine,) = json.loads((bench.root / "align.json").read_text())["candidates"]
    assert (mine["verdict"], mine["reason"]) == (
        "incomparable",
        "the module tests.alignment.output_scaled_on_one_rank ended without running the program (no run.json); "
        "it must call pipelines.agentic.main, as docs/my_kernel.md says",
    )
