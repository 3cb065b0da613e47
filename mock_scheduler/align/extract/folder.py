"""The folder of a reproduction: recording, weights, configuration, the candidate's code, a script and a README.

Contract: everything in it is named relative to it, so it can be moved; nothing outside of it is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mock_scheduler.align.extract.batch import Reduction, apply_values
from mock_scheduler.align.extract.entry import EntryFiles
from mock_scheduler.align.extract.source import DivergedCandidate
from mock_scheduler.align.plan.plan import BASELINE_NAME, build_loader
from mock_scheduler.batch.trajectory import GroupKey
from mock_scheduler.config.align import CandidateConfig, MatrixConfig
from mock_scheduler.config.loading import dump_config
from mock_scheduler.errors import ConfigError
from mock_scheduler.recording.writing.subset import write_subset
from mock_scheduler.support.digests import JSON
from mock_scheduler.support.files import load_json_object, save_json
from mock_scheduler.support.run_files import CHECKPOINTS_FOLDER, CONFIG_FILE
from pipelines.config.schema import PipelineConfig

RECORDING_FOLDER = "recording"
CHECKPOINT_FOLDER = "checkpoint"
SCRIPT_FILE = "reproduce.sh"
OUTPUT_FOLDER = "output"

# Of the checkpoints of ``pipelines``: its last file, and the keys in it that the size of a batch enters.
_RUN_STATE_FILE = "run_state.json"
_BATCH_KEYS = ("rollout_batch_size", "train_env_manager.num_env_groups")
#: What a checkpoint's tensors follow from: where a candidate differs in these, it cannot begin from the baseline's.
_STATE_KEYS = ("seed", "precision", "rollout_form", "adv_estimator", "model")

_SCRIPT = """\
#!/usr/bin/env bash
# Shows the divergence: exit code 1 and the verdict "diverged". Start it from the root of a checkout that has
# mock_scheduler and pipelines, or name that in MOCK_SCHEDULER_ROOT; PYTHON is the interpreter, else the checkout's
# .venv, else python3. What follows the script goes to mock-scheduler align.
set -euo pipefail
fail() {{  # 1 is a verdict's
  echo "error: $1" >&2
  exit 5
}}
root="$(cd "${{MOCK_SCHEDULER_ROOT:-.}}" 2>/dev/null && pwd)" \
  || fail "there is no folder ${{MOCK_SCHEDULER_ROOT:-.}}; set MOCK_SCHEDULER_ROOT to the root of a checkout"
default=python3
[[ -x "$root/.venv/bin/python" ]] && default="$root/.venv/bin/python"
python="$(command -v "${{PYTHON:-$default}}")" \
  || fail "there is no program ${{PYTHON:-$default}}; set PYTHON to the interpreter"
case "$python" in /*) ;; *) python="$PWD/$python" ;; esac
cd "$(dirname "${{BASH_SOURCE[0]}}")"
export PYTHONPATH="$root${{PYTHONPATH:+:$PYTHONPATH}}"
code=0
"$python" -m mock_scheduler.cli align {config} --config-path . --recording {recording} \\
  --output-dir {output} --overwrite "$@" || code=$?
if [[ "$code" == 1 ]] && ! "$python" -c "import torch, mock_scheduler.cli, pipelines" 2>/dev/null; then
  fail "$python could not run it; start this from the root of a checkout with its .venv, or set PYTHON"
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """What a reproduction begins with: ``checkpoint``, or where it is ``None`` the seed's initial weights.

    first_step, last_step: the steps that are then trained, the first divergence's among them. text: in words.
    """

    checkpoint: Path | None
    first_step: int
    last_step: int
    text: str


def choose_weights(source: DivergedCandidate) -> Weights:
    """The shortest way to the weights with which the divergent step began; raises ``ConfigError`` for a broken one."""
    step, resumed = source.step, source.baseline.resume_from_checkpoint
    last_step = max(step, source.baseline.first_policy_step, source.candidate.first_policy_step)
    start = 0 if resumed is None else _next_step(Path(resumed))
    at_step = source.baseline_dir / CHECKPOINTS_FOLDER / f"step_{step:06d}"
    if step > start and _is_checkpoint(at_step, step) and _begins_alike(source):
        text = f"the baseline's checkpoint of step {step}, from which both sides begin"
        return Weights(checkpoint=at_step, first_step=step, last_step=last_step, text=text)
    text = f"seed {source.baseline.seed}, from which the initial weights follow"
    if resumed is not None:
        text = f"the checkpoint of step {start} from which the baseline began"
    if step > start:
        why = "has none that the candidate could begin from" if _is_checkpoint(at_step, step) else "left none"
        text += (
            f"; the {step - start} steps before step {step} are kept, with as many groups, since the baseline {why} at "
            f"step {step}"
        )
    checkpoint = None if resumed is None else Path(resumed)
    return Weights(checkpoint=checkpoint, first_step=start, last_step=last_step, text=text)


def write_reproduction(
    source: DivergedCandidate,
    folder: Path,
    *,
    reduction: Reduction,
    groups: Mapping[int, Sequence[GroupKey]],
    weights: Weights,
    entry: EntryFiles,
) -> PipelineConfig:
    """Write everything but the README to an empty folder, and return the configuration.

    groups: by step, those that are kept. Raises ``RecordingError`` where a recorded step cannot be read.
    """
    checkpoint = None if weights.checkpoint is None else f"{CHECKPOINT_FOLDER}/step_{weights.first_step:06d}"
    config = _build_config(source, reduction, checkpoint=checkpoint)
    contract = {name: value for name, value in reduction.values.items() if name in _contract_names(source)}
    write_subset(source.reader, str(folder / RECORDING_FOLDER), groups, contract=contract)
    if weights.checkpoint is not None and checkpoint is not None:
        _copy_checkpoint(weights.checkpoint, folder / checkpoint, reduction)
    entry.copy_to(folder)
    (folder / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
    script = folder / SCRIPT_FILE
    script.write_text(
        _SCRIPT.format(config=Path(CONFIG_FILE).stem, recording=RECORDING_FOLDER, output=OUTPUT_FOLDER),
        encoding="utf-8",
    )
    script.chmod(0o755)
    # As it will be loaded: what cannot be is said now, and not by the reproduction.
    build_loader(Path(CONFIG_FILE).stem, folder)(config.align.candidates[0].overrides)
    return config


def _build_config(source: DivergedCandidate, reduction: Reduction, *, checkpoint: str | None) -> PipelineConfig:
    suffix = f"-{BASELINE_NAME}"
    values: dict[str, JSON] = {
        **reduction.values,
        "exp_name": f"{source.baseline.exp_name.removesuffix(suffix)}-reproduction",
        "output_dir": OUTPUT_FOLDER,
        "checkpoint_config.output_dir": None,
        "resume_from_checkpoint": checkpoint,
        "rollout_mock.enable": True,
        "rollout_mock.mode": "mock",
        "rollout_mock.dump_dir": RECORDING_FOLDER,
        "rollout_mock.retention.keep_last": None,
    }
    config = apply_values(source.baseline, values)
    own = {"output_dir": None, "baseline": [], "candidates": [_candidate(source, reduction)], "matrix": MatrixConfig()}
    return config.model_copy(update={"align": config.align.model_copy(update=own)})


def _candidate(source: DivergedCandidate, reduction: Reduction) -> CandidateConfig:
    """The candidate; where it makes another number of updates, its rate decays over those of its own whole run."""
    key = "training.lr_decay_iters"
    if key not in reduction.values or key in source.own_keys:
        return source.change
    own = source.candidate.lr_decay_updates(first_step=source.candidate.first_policy_step)
    if own == reduction.values[key]:
        return source.change
    return source.change.model_copy(update={"overrides": [*source.change.overrides, f"{key}={own}"]})


def _contract_names(source: DivergedCandidate) -> frozenset[str]:
    return frozenset(field.name for field in source.reader.manifest.contract.fields)


def _copy_checkpoint(origin: Path, target: Path, reduction: Reduction) -> None:
    """A copy that a run with other batches may go on from: their size is in no tensor."""
    shutil.copytree(origin, target)
    state = load_json_object(target / _RUN_STATE_FILE)
    state["fixed"] |= {key: reduction.values[key] for key in _BATCH_KEYS if key in reduction.values}
    save_json(target / _RUN_STATE_FILE, state)


def _is_checkpoint(folder: Path, step: int) -> bool:
    return (folder / _RUN_STATE_FILE).is_file() and _next_step(folder) == step


def _next_step(folder: Path) -> int:
    path = folder / _RUN_STATE_FILE
    try:
        step = load_json_object(path).get("next_step")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the checkpoint {folder} cannot be used: {path.name} {error}") from error
    if not isinstance(step, int):
        raise ConfigError(f"the checkpoint {folder} cannot be used: {path.name} has no next_step")
    return step


def _begins_alike(source: DivergedCandidate) -> bool:
    ours, theirs = (config.model_dump(include=set(_STATE_KEYS)) for config in (source.baseline, source.candidate))
    return ours == theirs
