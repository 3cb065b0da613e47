"""The section ``rollout_mock`` says where requests are played, recorded or replayed, and when a run refuses to go on.

Contract: importing this module imports no torch. The keys ``enable``, ``mode`` and ``dump_dir`` are ROLL's (v0.2). A
meaningless combination is refused here, whether the section is enabled or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from mock_scheduler.config.base import ConfigSection, Decides, Mode, PositiveInt, RolloutMode, Steps
from mock_scheduler.config.steps import StepRanges
from mock_scheduler.support.locations import normalize_location
from mock_scheduler.support.text import bullet_list

KINDS: tuple[Mode, ...] = ("train", "val")
#: Whose states are recorded after a live rollout: the random generators that it moved, all, or none.
RandomStates: TypeAlias = Literal["moved", "all", "none"]
_READING: tuple[RolloutMode, ...] = ("mock", "cache", "verify")
#: Keys that judge the answers of every run, recorded or not, and a permission: an alignment enables the section itself.
_ALWAYS = frozenset({"allow_nondeterministic", "on_duplicate_rows", "on_partial_groups", "on_implausible_rows"})
_WRITING: tuple[RolloutMode, ...] = ("dump", "cache")
#: The modes in which a key has any effect; the keys that are not here have one in each, or checks of their own.
_EFFECTIVE_IN: Mapping[str, tuple[RolloutMode, ...]] = {
    **dict.fromkeys(("steps", "every", "compression", "background", "on_low_disk", "retention"), _WRITING),
    "on_mismatch": ("mock", "verify"),
    "on_difference": ("verify",),
    "dump_dir": (*_WRITING, "mock", "verify"),
    **dict.fromkeys(("allow_nondeterministic", "random_states"), (*_WRITING, "mock", "verify")),
}


class ScheduleEntry(ConfigSection):
    """Another mode for some requests."""

    mode: RolloutMode
    """Of the requests that it applies to."""
    steps: Steps = StepRanges.parse("0-")
    """``'0-19, 40, 100-'``."""
    kinds: list[Mode] | None = Field(default=None, min_length=1)
    """``null``: training and validation."""
    schedulers: list[str] | None = Field(default=None, min_length=1)
    """By ``scheduler_id``; ``null``: all."""

    def applies_to(self, *, step: int, kind: Mode, scheduler_id: str) -> bool:
        """Says whether this entry decides the mode of a request."""
        return (
            step in self.steps
            and (self.kinds is None or kind in self.kinds)
            and (self.schedulers is None or scheduler_id in self.schedulers)
        )

    def describe(self) -> str:
        """Returns one phrase, for logs and messages: ``mock for train steps 10-``."""
        kinds = "" if self.kinds is None else f"{' and '.join(self.kinds)} "
        schedulers = "" if self.schedulers is None else f" of {', '.join(self.schedulers)}"
        return f"{self.mode} for {kinds}steps {self.steps}{schedulers}"


class RetentionConfig(ConfigSection):
    """The recorded steps to keep.

    A step is removed only before a saved checkpoint from which all later steps can be replayed: so at least
    ``keep_last`` steps stay, and more where no checkpoint allows the cut.
    """

    keep_last: PositiveInt | None = None
    """How many recorded steps stay at least; ``null``: all. Needs ``save_steps``; nothing is removed before the run has
    recorded a step itself.
    """
    pin_steps: Steps | None = None
    """Steps that are never removed."""


class RolloutMockConfig(ConfigSection):
    """Says where rollouts come from: played, recorded, or replayed in the place of an engine."""

    # The section says where rollouts come from; the recording's contract sees to it that they are the same.
    decides: ClassVar = Decides.NOTHING

    enable: bool = False
    """Off: the real scheduler runs and nothing is recorded. It must be given beside any key that it turns off."""
    mode: RolloutMode = "dump"
    """``real``; ``dump``: real, and recorded; ``mock``: replayed, and neither engine nor environment is built;
    ``cache``: replayed where recorded, else real and recorded; ``verify``: real, and compared with the recording.
    """
    dump_dir: Annotated[str, Decides.LABEL] = "./rollout_mock_dumps"
    """The recording: a folder, in which ``~`` is expanded, or an fsspec URL, as ``s3://bucket/path``."""
    schedule: list[ScheduleEntry] = Field(default=[])
    """Other modes for some requests; the first entry that applies wins, else ``mode``."""
    steps: Steps | None = None
    """The steps that dump and cache record, as ``'0-19, 40, 100-'`` or ``[0, 5, '10-19']``; ``null``: all."""
    every: PositiveInt = 1
    """Of these, only the steps divisible by it."""
    missing_step: Literal["error", "repeat", "repeat_last"] = "error"
    """A step that mock does not find: refuse; ``repeat`` the nearest earlier one, else the nearest later;
    ``repeat_last`` the last one.
    """
    on_mismatch: Literal["error", "warn"] = "error"
    """A broken contract, in a run that only replays. A run that adds to the recording must keep it."""
    on_difference: Literal["error", "warn"] = "error"
    """A batch, or the state of scheduler or random generators after it, that verify finds unlike the recorded one."""
    on_duplicate_rows: Literal["report", "error", "ignore"] = "report"
    """Rows of equal content in one batch."""
    on_partial_groups: Literal["error", "report"] = "error"
    """Groups that lack trajectories."""
    on_implausible_rows: Literal["strict", "error", "report", "ignore"] = "error"
    """Data that cannot be true in a live answer or in its request: ``error`` refuses them and reports data that may be,
    ``strict`` refuses both, ``report`` reports both, ``ignore`` looks for neither. Of a replayed answer both are
    reported.
    """
    on_low_disk: Literal["error", "warn"] = "error"
    """Where the disk will not hold the recording, by forecast: end before it is full, or warn."""
    retention: RetentionConfig = RetentionConfig()
    random_states: RandomStates | None = None
    """The states of the global random generators after a live rollout, recorded with the step and set after its replay:
    those that the rollout ``moved``, ``all``, or ``none``. ``null``: ``moved``, and ``none`` of an asynchronous
    trainer.
    """
    compression: Literal["none", "zstd"] = "none"
    """``zstd``: smaller files that load more slowly."""
    background: bool = True
    """Write while the next step is trained; ``false``: before ``get_batch`` returns."""
    allow_nondeterministic: bool = False
    """Record or replay although the settings of ``system_envs`` are not deterministic."""
    origin: str = ""
    """Written by the program: the section of another framework behind this one."""

    @property
    def effective_mode(self) -> RolloutMode:
        """The mode where no entry of the schedule applies; ``real`` where the section is not enabled."""
        return self.mode if self.enable else "real"

    @property
    def modes_in_use(self) -> frozenset[RolloutMode]:
        """Every mode in which a request may be answered."""
        return frozenset({self.effective_mode, *(entry.mode for entry in self.schedule if self.enable)})

    def mode_of(self, *, step: int, kind: Mode, scheduler_id: str) -> RolloutMode:
        """Returns the mode of one request."""
        entries = self.schedule if self.enable else []
        applying = (e.mode for e in entries if e.applies_to(step=step, kind=kind, scheduler_id=scheduler_id))
        return next(applying, self.effective_mode)

    def records_step(self, step: int) -> bool:
        """Says whether a step played by dump or cache is written."""
        return step % self.every == 0 and (self.steps is None or step in self.steps)

    def _given_in_vain(self) -> list[str]:
        """Returns the given keys where ``enable`` is not; mode real alone is what runs all the same."""
        given = self.model_fields_set - {"origin"}
        if "enable" in given or given <= _ALWAYS or (given - _ALWAYS == {"mode"} and self.mode == "real"):
            return []
        return [name for name in type(self).model_fields if name in given - _ALWAYS]

    @field_validator("dump_dir")
    @classmethod
    def _check_dump_dir(cls, location: str) -> str:
        if not location.strip():
            raise ValueError("is empty; give a folder such as ./rollout_mock_dumps, or a URL such as s3://bucket/path")
        return normalize_location(location)

    @model_validator(mode="after")
    def _check_combination(self) -> RolloutMockConfig:
        given = self._given_in_vain()
        if given:
            raise ValueError(
                f"{', '.join(given)} would have no effect: enable is not given, so the real scheduler would run and "
                "nothing be recorded or replayed; set enable=true, or enable=false to keep the section for later"
            )
        problems = rollout_mock_problems(self)
        if problems:
            raise ValueError(f"has keys that do not go together:{bullet_list(problems, limit=None)}")
        return self


def rollout_mock_problems(config: RolloutMockConfig) -> list[str]:
    """Returns every meaningless combination of the section's own keys; empty where there is none."""
    modes = {entry.mode for entry in config.schedule}
    problems = unreachable_entries(config.schedule)
    deciders = _deciders_of_all(ScheduleEntry(mode=config.mode), config.schedule)
    if deciders is None:
        modes.add(config.mode)
    else:
        problems.append(
            f"mode {config.mode} can never apply: {_describe_deciders(config.schedule, deciders)} every request; leave "
            "the schedule out and set the mode, or give its entries the steps, kinds or schedulers that they are for"
        )
    read = [mode for mode in _READING if mode in modes]
    if "dump" in modes and read:
        problems.append(
            f"dump and {' and '.join(read)} in one run: dump begins a new recording, so there would be nothing in it "
            "to read. Use cache in place of dump: it replays what is recorded, and plays and records the rest"
        )
    if config.missing_step != "error" and "mock" not in modes:
        problems.append(
            f"missing_step {config.missing_step} is for mode mock, and no request is answered in it "
            f"(modes here: {', '.join(sorted(modes))}); leave missing_step out, or set mode=mock"
        )
    return problems


def override_problems(config: RolloutMockConfig, keys: Sequence[str]) -> list[tuple[str, str]]:
    """Returns each overridden key without effect in this run, with the reason.

    A key of a file may be meant for another mode of the same section. One of the command line is meant for this run.
    ``keys``: dotted, within the section.
    """
    if "enable" not in keys and not config.enable:
        vain = [key for key in keys if key not in _ALWAYS and not (key == "mode" and config.mode == "real")]
        return [(key, "has no effect while enable is false; add rollout_mock.enable=true") for key in vain]
    values, defaults = config.model_dump(), RolloutMockConfig().model_dump()
    problems = []
    for key in keys if config.enable else ():
        modes = _EFFECTIVE_IN.get(key.partition(".")[0], ())
        if modes and not config.modes_in_use & {*modes} and _value_at(values, key) != _value_at(defaults, key):
            used = ", ".join(sorted(config.modes_in_use))
            problems.append((key, f"has no effect in mode {used}, only in {', '.join(modes)}; leave it out"))
    return problems


def _value_at(values: Mapping[str, object], key: str) -> object:
    """Returns the value at a dotted key; an override may also set a whole section."""
    value: object = values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def unreachable_entries(schedule: Sequence[ScheduleEntry]) -> list[str]:
    """Returns a line for each entry without effect: earlier entries decide every request to which it applies."""
    problems = []
    for index, entry in enumerate(schedule):
        deciders = _deciders_of_all(entry, schedule[:index])
        if deciders is not None:
            problems.append(
                f"schedule.{index} ({entry.describe()}) can never apply: the first entry that applies wins, and "
                f"{_describe_deciders(schedule, deciders)} all of it; put it before, or leave it out"
            )
    return problems


def _describe_deciders(schedule: Sequence[ScheduleEntry], numbers: Sequence[int]) -> str:
    listed = ", ".join(f"schedule.{number} ({schedule[number].describe()})" for number in numbers)
    return f"{listed} {'decides' if len(numbers) == 1 else 'decide'}"


def _deciders_of_all(entry: ScheduleEntry, earlier: Sequence[ScheduleEntry]) -> list[int] | None:
    """Returns the earlier entries that together decide every request of ``entry``, by index; else ``None``."""
    # None stands for every scheduler that no entry names.
    named = sorted({name for one in [*earlier, entry] for name in one.schedulers or ()})
    requests = [(kind, scheduler) for kind in KINDS for scheduler in [*named, None]]
    decided_by = [_deciders(entry, earlier, *request) for request in requests if _concerns(entry, *request)]
    if any(deciders is None for deciders in decided_by):
        return None
    return sorted({number for deciders in decided_by for number in deciders or ()})


def _concerns(entry: ScheduleEntry, kind: Mode, scheduler: str | None) -> bool:
    return (entry.kinds is None or kind in entry.kinds) and (
        entry.schedulers is None or (scheduler is not None and scheduler in entry.schedulers)
    )


def _deciders(
    entry: ScheduleEntry, earlier: Sequence[ScheduleEntry], kind: Mode, scheduler: str | None
) -> list[int] | None:
    """Returns the earlier entries that together decide all steps of ``entry`` for one kind and scheduler; else None."""
    indices = [index for index, other in enumerate(earlier) if _concerns(other, kind, scheduler)]
    union = StepRanges.parse([earlier[index].steps for index in indices])
    return indices if entry.steps.is_within(union) else None
