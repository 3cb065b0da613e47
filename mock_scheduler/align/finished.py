"""``mock-scheduler compare``: a verdict for two runs that are finished, however they were started.

Contract: reads ``config.yaml``, ``run.json``, ``ledger.json``, ``metrics.jsonl`` and ``trace/`` of both; starts nothing
and writes only the file that was asked for. Both must have trained on the same rollouts, which each run states by the
digest of every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mock_scheduler.align.plan import stated_tolerance
from mock_scheduler.align.runs import judge_runs
from mock_scheduler.compare.finished_run import load_summary
from mock_scheduler.compare.results import AlignmentResult, CandidateResult, RunSummary
from mock_scheduler.compare.verdict import worst_exit_code
from mock_scheduler.config.loading import load_config
from mock_scheduler.config.schema import PipelineConfig
from mock_scheduler.determinism.settings import is_deterministic_mode
from mock_scheduler.errors import AlignmentError, ConfigError
from mock_scheduler.report.json_file import save_result
from mock_scheduler.report.terminal import build_console, print_report
from mock_scheduler.run_files import CONFIG_FILE, ERROR_FILE, LOG_FILE, RUN_FILE, TRACE_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """A completed run with a trace: its configuration and what it says about itself."""

    config: PipelineConfig
    summary: RunSummary

    @property
    def recording_dir(self) -> Path | None:
        """The recording that it wrote or replayed, if any."""
        mock = self.config.rollout_mock
        return None if mock.effective_mode == "real" else Path(mock.dump_dir)


def run_compare(
    baseline_dir: Path, candidate_dir: Path, *, json_path: Path | None, console: Console | None = None
) -> int:
    """Compare two runs by their ``output_dir``, print the report, and return the verdict's exit code.

    The tolerance is the candidate's. Raises ``ConfigError`` where a folder is no run's or the tolerance is not stated,
    ``AlignmentError`` where a run is not completed or has no trace. ``console``: ``None`` is this terminal.
    """
    console = console or build_console()
    if baseline_dir.resolve() == candidate_dir.resolve():
        raise ConfigError(f"{baseline_dir} and {candidate_dir} are the same folder: it would be compared with itself")
    baseline, candidate = _load_both(baseline_dir, candidate_dir)
    tolerance = stated_tolerance(candidate.config)
    is_deterministic = all(is_deterministic_mode(run.config.system_envs) for run in (baseline, candidate))
    with console.status("comparing metrics, gradients and parameters"):
        alignment = judge_runs(
            baseline.summary, candidate.summary, tolerance=tolerance, is_deterministic=is_deterministic
        )
    log_path = candidate_dir / LOG_FILE
    result = AlignmentResult(
        config_name=candidate.config.exp_name,
        output_dir=candidate_dir,
        recording_dir=candidate.recording_dir,
        tolerance=tolerance,
        baseline=baseline.summary,
        candidates=(
            CandidateResult(
                name=candidate.summary.name,
                overrides=(),
                layout=candidate.summary.layout,
                log_path=log_path if log_path.is_file() else None,
                run=candidate.summary,
                alignment=alignment,
            ),
        ),
    )
    print_report(result, console, files={} if json_path is None else {"result": json_path})
    if json_path is not None:
        save_result(result, json_path)
    return worst_exit_code([alignment.verdict])


def _load_both(baseline_dir: Path, candidate_dir: Path) -> tuple[FinishedRun, FinishedRun]:
    """Both runs, or one error with what is wrong with either; of its kind is the first."""
    loaded, errors = [], []
    for folder in (baseline_dir, candidate_dir):
        try:
            loaded.append(_load_finished(folder))
        except (ConfigError, AlignmentError) as error:
            errors.append(error)
    if errors:
        raise type(errors[0])("\n".join(map(str, errors))) from errors[0]
    baseline, candidate = loaded
    return baseline, candidate


def _load_finished(folder: Path) -> FinishedRun:
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{folder} is not the output_dir of a run: there is no {CONFIG_FILE} in it")
    config = load_config(Path(CONFIG_FILE).stem, config_path=folder)
    if not (folder / RUN_FILE).is_file():
        raise AlignmentError(
            f"{folder} has no {RUN_FILE}: its run has not completed (it is still going, or {folder / ERROR_FILE} says "
            "why it failed)"
        )
    summary = load_summary(folder.resolve().name, folder, elapsed_s=None)
    if not (folder / TRACE_FOLDER).is_dir():
        raise AlignmentError(
            f"{folder} has no trace, without which gradients and parameters cannot be compared: run it again with "
            f"trace.level=full (it had trace.level={config.trace.level})"
        )
    return FinishedRun(config=config, summary=summary)
