"""A run shows its messages and a progress bar on the terminal, or one line per step where there is no terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mock_scheduler.display.console import Console, ProgressBar
from mock_scheduler.support.terminal_streams import MessageHandler
from pipelines.config.schema import PipelineConfig

_SHOWN = ("sft/loss", "reward", "success", "pg_loss", "entropy", "grad_norm")


class StepProgress:
    """Shows steps on one rank; on all others it does nothing."""

    def __init__(self, config: PipelineConfig, *, first_step: int, enabled: bool) -> None:
        self._enabled = enabled
        self._max_steps = config.max_steps
        self._console = Console(highlight=False)
        self._bar: ProgressBar | None = None
        if enabled and sys.stdout.isatty():
            self._bar = ProgressBar(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(config.exp_name, total=config.max_steps, completed=first_step)

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def trained(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step of training has ended."""
        if not self._enabled:
            return
        values = "  ".join(f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics)
        elapsed_s = metrics["time/rollout"] + metrics["time/train"]
        self._console.print(f"step {step + 1}/{self._max_steps}  {values}  {elapsed_s:.2f} s", soft_wrap=True)
        if self._bar is not None:
            self._bar.advance(self._task)

    def validated(self, step: int, metrics: Mapping[str, float]) -> None:
        """A validation has ended."""
        if not self._enabled:
            return
        when = f"before step {step + 1}" if step < self._max_steps else f"after {step} steps"
        values = "  ".join(f"{name} {metrics[f'val/{name}']:.3f}" for name in ("success", "reward"))
        self._console.print(f"validation {when}: {values}{_by_tag(metrics)}", soft_wrap=True)


def _by_tag(metrics: Mapping[str, float]) -> str:
    """Success of each tag, where there are several: ``  Seen 0.912  Unseen 0.873``."""
    prefix = "val/episodes/"
    names = [name.removeprefix(prefix) for name in metrics if name.startswith(prefix)]
    tags = [name for name in names if not name.startswith("length_")]
    return "".join(f"  {tag} {metrics[f'val/success/{tag}']:.3f}" for tag in tags) if len(tags) > 1 else ""


def configure_logging(*, is_writer: bool) -> None:
    """Puts messages of ours on the writer's terminal; other libraries' only when they warn."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[MessageHandler()], force=True)
    for name in ("mock_scheduler", "pipelines"):
        logging.getLogger(name).setLevel(logging.INFO if is_writer else logging.ERROR)
