"""The file of a checkpoint that says where its run stood; written last, and read before anything is built.

Contract: ``run_state.json`` holds step, mode, the settings behind the checkpoint's tensors and those behind its
training, the states of rollout scheduler and learner, the counters of each model, the recording that the run wrote or
replayed, and the seal of every other file. It seals itself: its bytes are those that its content has with its digest,
so a changed bit in it is found too.
Checkpoints of before there were seals have the size of every file in place of its seal; they are read with a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mock_scheduler.config.base import Decides
from mock_scheduler.determinism.agreement import RankGroup
from mock_scheduler.errors import ConfigError
from mock_scheduler.support.digests import JSON, open_sealed, seal
from mock_scheduler.support.documents import Count, Document
from mock_scheduler.support.files import encode_json, save_json
from mock_scheduler.support.foreign_files import read_bytes
from mock_scheduler.support.text import bullet_list
from pipelines.config.schema import PipelineConfig
from pipelines.keys import effect_of, keys_in_effect
from pipelines.megatron.file_seals import FileSeal, find_damage, find_wrong_sizes

logger = logging.getLogger("pipelines.checkpoint")

RUN_STATE_FILE = "run_state.json"

_FORMAT = "mock_scheduler.checkpoint"
_VERSION = 2
_VERSION_WITHOUT_SEALS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCounters:
    """The counters of a model under training: Adam's updates, and the place in the schedule of the learning rate."""

    num_updates: Count
    lr_steps: Count


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingPlace:
    """Holds the recording that a run wrote or replayed.

    ``run_id``: its run. ``last_step``, ``digest``: the last training step before the checkpoint, where it lies in the
    recording, and the digest in its header.
    """

    run_id: str
    last_step: Count | None = None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """A run's place: ``next_step`` is its first untrained step.

    ``fixed``: the settings that a continuing run must share, by the configuration's dotted names. ``training``: all
    others that decide the mathematics of training. ``counters``: by model. ``files``: the seals of all other files,
    by their names in the folder; ``save_checkpoint`` fills in both.
    """

    next_step: Count
    mode: str
    fixed: Mapping[str, JSON]
    scheduler: Mapping[str, JSON]
    learner: Mapping[str, JSON]
    training: Mapping[str, JSON] = field(default_factory=dict)
    recording: RecordingPlace | None = None
    counters: Mapping[str, ModelCounters] = field(default_factory=dict)
    files: Mapping[str, FileSeal] = field(default_factory=dict)
    version: int = _VERSION

    @property
    def is_sealed(self) -> bool:
        """Whether a release with seals wrote the checkpoint."""
        return self.version == _VERSION


_STATE = Document[RunState](RunState)


def fixed_settings(config: PipelineConfig, *, vocab_size: int) -> dict[str, JSON]:
    """Reads the settings behind a checkpoint's tensors and the run's seeded parts.

    ``vocab_size``: the one in effect; it follows from the environments where the model section has none.
    """
    values = keys_in_effect(config, vocab_size=vocab_size)
    return {
        **{key: value for key, value in values.items() if _is_handed_on(effect_of(key))},
        "models": ["policy", "critic"] if config.adv_estimator == "gae" else ["policy"],
    }


def training_settings(config: PipelineConfig, *, vocab_size: int) -> dict[str, JSON]:
    """Reads the settings that decide the mathematics of training: policies after the first step follow from them.

    ``max_steps`` does so by the length of a decay alone, which stands under its own key.
    """
    values = keys_in_effect(config, vocab_size=vocab_size)
    chosen = {key: value for key, value in values.items() if _decides_training(effect_of(key)) and key != "max_steps"}
    has_decay = config.training.lr_decay_style != "constant" or config.entropy_loss_coef_final is not None
    decay = config.lr_decay_updates(first_step=config.first_policy_step) if has_decay else None
    return {**chosen, "training.lr_decay_iters": decay}


def _decides_training(facts: Decides) -> bool:
    return Decides.TRAINING in facts and Decides.VALIDATION not in facts


def _is_handed_on(facts: Decides) -> bool:
    # The state is that of training: validation may be another after it.
    return Decides.STATE in facts and Decides.VALIDATION not in facts


def check_same_settings(folder: Path, state: RunState, current: Mapping[str, JSON]) -> None:
    """Raises ``ConfigError`` with every setting that has changed since the checkpoint was written."""
    differing = describe_differences(state.fixed, current)
    if differing:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is of a run with other settings, which its tensors, reference policy, "
            f"environments or samples follow from:{bullet_list(differing, limit=None)}\n"
            "Set them as they were, or start a new run."
        )


def describe_differences(recorded: Mapping[str, JSON], current: Mapping[str, JSON]) -> list[str]:
    """Describes every setting of a checkpoint that this run has another value of."""
    return [
        f"{name}: the checkpoint has {_shown(recorded, name)}, this run has {_shown(current, name)}"
        for name in dict.fromkeys([*current, *recorded])
        if _shown(recorded, name) != _shown(current, name)
    ]


def _shown(settings: Mapping[str, JSON], name: str) -> str:
    return json.dumps(settings[name]) if name in settings else "none"


def checkpoint_folder(root: Path, next_step: int) -> Path:
    """Names the folder of the checkpoint from which ``next_step`` would be run."""
    return root / f"step_{next_step:06d}"


def find_checkpoints(root: Path, next_steps: Sequence[int]) -> list[Path]:
    """Lists the checkpoints that are there already, of those that a run would write."""
    folders = [checkpoint_folder(root, step) for step in next_steps]
    return [folder for folder in folders if (folder / RUN_STATE_FILE).exists()]


def check_files(folder: Path, state: RunState) -> None:
    """Refuses a checkpoint with a missing or cut file, or a link; looks at sizes and reads no content.

    Raises:
        ConfigError: with every file of another size than was written.
    """
    _raise_problems(folder, "is not whole", find_wrong_sizes(folder, state.files))


def check_contents(folder: Path, state: RunState, ranks: RankGroup) -> None:
    """Refuses a checkpoint with a changed bit in any file. Collective: the ranks share the files out.

    Raises:
        ConfigError: on every rank, with every block that is not as it was written.
    """
    if state.is_sealed:
        _raise_problems(folder, "is damaged", find_damage(folder, state.files, ranks))
    elif ranks.global_rank == 0:
        logger.warning(
            "%s is unsealed: it was written by a release without seals, so a changed bit in it cannot be found. "
            "Nothing in it is run. A checkpoint that this run saves is sealed.",
            folder,
        )


def _raise_problems(folder: Path, problem: str, lines: Sequence[str]) -> None:
    if lines:
        raise ConfigError(
            f"resume_from_checkpoint: {folder} {problem}:{bullet_list(lines, limit=10)}\n"
            "Copy it again from where it was written, or resume from another checkpoint."
        )


def read_run_state(folder: Path) -> RunState:
    """Reads where the checkpointed run stood; reads one small file and builds nothing.

    Raises:
        ConfigError: the folder is no checkpoint, or the file is not one of ``write_run_state``'s to the last bit.
    """
    path = folder / RUN_STATE_FILE
    if not path.is_file():
        raise ConfigError(
            f"resume_from_checkpoint: {folder} is not a checkpoint ({RUN_STATE_FILE} is missing); give a folder such "
            f"as {{output_dir}}/checkpoints/step_000010"
        )
    try:
        state = _STATE.load(_open_document(read_bytes(path, inside=folder)))
        if not state.files:
            raise ValueError("files is missing")
        return state
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"resume_from_checkpoint: {path}: {error}; resume from another checkpoint") from error


def _open_document(data: bytes) -> dict[str, JSON]:
    """Opens the sealed document, or one of before there were seals; raises ``ValueError`` for any other."""
    try:
        document = open_sealed(data)
    except ValueError:
        old = _open_unsealed(data)
        if old is None:
            raise
        return old
    # The seal is over the content: a bit can change the bytes without it, as in 1e-05 and 1E-05.
    if encode_json(seal(document)) != data:
        raise ValueError("does not match its digest: its bytes were changed")
    if document.get("format") != _FORMAT or document.get("version") != _VERSION:
        raise ValueError(
            f"is of format {document.get('format')!r}, version {document.get('version')!r}; this release reads "
            f"{_FORMAT!r}, version {_VERSION}"
        )
    return document


_UNSEALED_KEYS = {"next_step", "mode", "fixed", "scheduler", "learner", "files"}


def _open_unsealed(data: bytes) -> dict[str, JSON] | None:
    """Opens a document of exactly the keys that there were before seals, with sizes for seals; else ``None``."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.keys() != _UNSEALED_KEYS or not isinstance(document["files"], dict):
        return None
    files = {name: {"size_bytes": size} for name, size in document["files"].items()}
    return {**document, "files": files, "version": _VERSION_WITHOUT_SEALS}


def write_run_state(folder: Path, state: RunState) -> None:
    """Writes the last file of a checkpoint, whose other files must all be on the disk."""
    save_json(folder / RUN_STATE_FILE, seal({"format": _FORMAT, **_STATE.dump(state)}))
