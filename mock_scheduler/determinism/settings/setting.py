"""Defines a row of the settings table: its kind, repeatable values, reader, and the source of these facts.

Contract: imports no torch. The rows are in the modules beside this one; ``table.SETTINGS`` is the whole table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a setting decides how it is read back."""

    ENVIRONMENT = "environment variable"
    FLAG = "flag"  # of Python, torch or a library: read by the probe of the same name (``probes.PROBES``)
    VERSION = "version"  # of a package, a library, the hardware: also read by the probe of the same name


class ReadAt(StrEnum):
    """The moment when a library reads a setting; a later change has no effect."""

    INTERPRETER = "when the Python interpreter starts"
    TORCH_IMPORT = "when torch is imported"
    TE_IMPORT = "when transformer_engine is imported"
    CUDA_CONTEXT = "when the first CUDA context is made"
    PROCESS_GROUP = "when a process group is made"
    MODEL_BUILD = "when the model is built"
    EVERY_CALL = "at every call"
    INSTALLED = "as it is installed"


class Between(StrEnum):
    """How strictly a recording run and its replays must agree on a setting."""

    MUST_MATCH = "must match"
    REPORTED = "changes bits: equal for bit-equality, a difference is reported"
    RECORDED = "recorded only"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Holds one environment variable, flag or version.

    ``pattern``: regular expression for the whole value in a deterministic run; ``None`` allows any.
    ``recommended``: the value to write, ``None`` without a recommendation.
    ``required``: a deterministic run must have it in ``system_envs``.
    ``exported``: launchers export the recommended value under ``DETERMINISTIC_MODE=1`` where it is not configured.
    ``per_node``: names devices, files or logs of one node, so ranks may differ in it.
    ``remedy``: why other values are refused or matter, and the advice.
    """

    name: str
    kind: Kind = Kind.ENVIRONMENT
    pattern: str | None = None
    recommended: str | None = None
    required: bool = False
    exported: bool = False
    per_node: bool = False
    between_runs: Between
    read_at: ReadAt
    reader: str
    source: str
    remedy: str

    def allows(self, value: str) -> bool:
        """Says whether a deterministic run may have this value."""
        return self.pattern is None or re.fullmatch(self.pattern, value) is not None

    def problem(self, value: str | None) -> str | None:
        """Says why a deterministic run cannot have a value (``None``: not set); ``None`` where it can."""
        if value is None:
            return f"{self.name} is not set; set it to {self.recommended!r}" if self.required else None
        if self.allows(value):
            return None
        if self.kind is Kind.FLAG:
            return f"{self.name} is {value}, must be {self.recommended}"
        return f"{self.name} is {value!r}: {self.remedy}"

    @property
    def yaml_line(self) -> str:
        """Returns the line to write under ``system_envs``."""
        return f"{self.name}: '{self.recommended}'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """All environment variables that begin with ``prefix`` and have no row of their own.

    Where they are present they are read back as ``between_runs`` says. ``per_node`` as in :class:`Setting`.
    ``documented``: members with values that are kept; of any other member only its presence is, since anybody may call
    a token by such a name.
    """

    prefix: str
    read_at: ReadAt
    reader: str
    between_runs: Between = Between.REPORTED
    per_node: bool = False
    documented: frozenset[str] = frozenset()

    def setting(self, name: str) -> Setting:
        """Makes the row of one member."""
        return Setting(
            name=name,
            per_node=self.per_node,
            between_runs=self.between_runs,
            read_at=self.read_at,
            reader=self.reader,
            source=f"all {self.prefix}* are recorded",
            remedy="keep it equal between runs",
        )
