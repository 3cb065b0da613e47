"""An alignment's folder with a diverged candidate, as far as ``extract`` looks at it, and a fake check of it."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from rich.console import Console

from mock_scheduler.alignment.extract.extraction import Outcome
from mock_scheduler.batch import RolloutBatch
from mock_scheduler.commands.extract import run_extract
from mock_scheduler.config.loading import dump_config
from mock_scheduler.recording.contract import Contract
from mock_scheduler.recording.reading.reader import RecordingReader
from mock_scheduler.recording.writing.subset import load_train_step
from pipelines.config.loading import load_config
from pipelines.config.schema import PipelineConfig
from tests.batches import SAMPLING, make_row
from tests.recording.builders import make_info
from tests.recording.recordings import open_writer

#: Four groups of two; updates of two groups.
CONFIG = """\
exp_name: lake-baseline
max_steps: 3
eval_steps: 1
rollout_batch_size: 8
val_batch_size: 8
seed: 7
training: {micro_batch_size: 2, global_batch_size: 4}
train_env_manager: {num_env_groups: 4, group_size: 2}
val_env_manager: {num_env_groups: 4, group_size: 2}
align:
  baseline: [seed=7]
  tolerance: {gradient: 1.0e-5}
  candidates:
    - {name: same}
    - {name: change, overrides: [pg_clip=0.1]}
"""
SAMPLE = "default/group 2/episode 0/env 1/turn 0"
SENTENCE = "step 0, update 0, forward: activation of decoder.layers.0 differs by 0.5"


def batch_of(*rewards: Sequence[float], seed: int = 0) -> RolloutBatch:
    """A group for each sequence of rewards."""
    rows = [
        make_row(group, env, tokens=(seed, group, env, 4), turn_rewards=(reward,))
        for group, members in enumerate(rewards)
        for env, reward in enumerate(members)
    ]
    return RolloutBatch.from_trajectories(rows, sampling=SAMPLING, group_size=len(rewards[0]))


STEP = ((1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (0.0, 1.0))


@cache
def _load(text: str, overrides: tuple[str, ...]) -> PipelineConfig:
    """Hydra takes a tenth of a second for each, and the folder of the file decides nothing."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "lake.yaml").write_text(text)
        return load_config("lake", config_path=folder, overrides=overrides)


@dataclass
class Alignment:
    """The folder that an alignment left, as far as it is looked at."""

    folder: Path
    text: str = CONFIG

    @property
    def root(self) -> Path:
        return self.folder / "align"

    def config(self, *overrides: str) -> PipelineConfig:
        (self.folder / "lake.yaml").write_text(self.text)
        return _load(self.text, overrides)

    def write(
        self,
        *,
        name: str = "change",
        overrides: Sequence[str] = ("pg_clip=0.1",),
        verdict: str = "diverged",
        step: int = 0,
        sample: str | None = SAMPLE,
    ) -> Path:
        for run, own in (("baseline", ()), (name, overrides)):
            (self.root / run).mkdir(parents=True)
            (self.root / run / "config.yaml").write_text(dump_config(self.config(*own)))
        divergence = {"step": step, "difference": {"figures": {"worst": {"sample": sample}}}}
        changed: dict[str, object] = {
            "name": name,
            "overrides": list(overrides),
            "verdict": verdict,
            "reason": "for a reason",
        }
        changed |= {"sentence": SENTENCE, "first_divergence": divergence}
        same: dict[str, object] = {"name": "same", "overrides": [], "verdict": "identical", "reason": "all equal"}
        result = {"candidates": [same, changed], "recording_dir": str(self.root / "recording")}
        (self.root / "align.json").write_text(json.dumps(result))
        self.record()
        return self.root

    def record(self) -> None:
        config = self.config()
        values = {
            "seed": config.seed,
            "rollout_batch_size": config.rollout_batch_size,
            "train_env_manager.num_env_groups": config.train_env_manager.num_env_groups,
            "max_steps": config.max_steps,
            "eval_steps": config.eval_steps,
            "training.global_batch_size": config.training.global_batch_size,
            "training.micro_batch_size": config.training.micro_batch_size,
        }
        writer = open_writer(self.root / "recording", contract=Contract.of(values))
        for step in range(3):
            writer.write_step(batch_of(*STEP, seed=step), make_info(step, run_id=writer.run_id, policy_version=step))
        writer.close()


@dataclass
class FakeCheck:
    """Diverges from ``num_needed`` groups on; keeps what it saw."""

    num_needed: int = 1
    groups: list[int] = field(default_factory=list)
    output: io.StringIO = field(default_factory=io.StringIO)

    def run(self, folder: Path, name: str) -> Outcome:
        reader = RecordingReader(str(folder / "recording"))
        self.groups.append(load_train_step(reader, max(reader.steps()["train"])).num_groups)
        if self.groups[-1] >= self.num_needed:
            return Outcome(verdict="diverged", text=f"{name} still differs")
        return Outcome(verdict="identical", text="all equal")


def extract(alignment: Alignment, check: FakeCheck | None = None, **options: object) -> Path:
    """The folder of the candidate ``change``."""
    check = check or FakeCheck()
    output = alignment.folder / "small"
    console = Console(file=check.output, width=300)
    values = {"output": output, "check": check.run, "console": console, **options}
    assert run_extract(alignment.root, "change", **values) == 0  # type: ignore[arg-type]
    return output


def write_checkpoint(alignment: Alignment, step: int) -> None:
    folder = alignment.root / "baseline" / "checkpoints" / f"step_{step:06d}"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "weights").write_bytes(b"weights")
    fixed = {"seed": 7, "rollout_batch_size": 8, "train_env_manager.num_env_groups": 4}
    (folder / "run_state.json").write_text(json.dumps({"next_step": step, "fixed": fixed, "files": {"w": 7}}))
