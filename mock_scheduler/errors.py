"""The error tree: every failure that a user can cause or must act on.

::

    MockSchedulerError
    ├── ConfigError(ValueError)               a key, value or combination in the configuration
    │   └── LayoutError                       parallel sizes that do not fit the model or the processes
    ├── BatchError(ValueError)                a rollout batch that contradicts itself
    ├── CorrectionError(ValueError)           log-probabilities that rollout correction cannot use
    ├── RecordingError(OSError)               a recording that cannot be written or read
    │   ├── StepNotFoundError(FileNotFoundError)   a step that was never recorded here
    │   ├── StepExistsError(FileExistsError)       a step that would be overwritten
    │   ├── StepInTwoFormsError                    a step of which nothing tells the right file
    │   └── CorruptRecordingError                  bytes that are not what was written
    ├── ContractError(ValueError)             the replaying run differs from the recording one
    ├── SchedulerError(RuntimeError)          a scheduler that was used out of order
    ├── DeterminismError(RuntimeError)        a setting that is missing, late or did not take effect
    │   └── RankDisagreementError             ranks of one run that differ
    ├── TraceError(OSError)                   a trace, or metrics, that cannot be written, read or merged
    ├── ForeignFileError(OSError)             a file of another party that must not be opened, or is too large
    ├── ServiceError(OSError)                 a training service that does not answer, or refuses
    ├── EngineError(OSError)                  an inference engine that does not answer, or samples from another policy
    └── AlignmentError(RuntimeError)          an alignment run that could not be carried out
        └── UnwrittenError                    a page or a file of a result that cannot be written

Each carries its whole message as its only argument, so it stays picklable, and an exit code for the command line. No
message repeats a password: each goes through ``redact``.
"""

from __future__ import annotations

import re
from enum import IntEnum

# Repetitions around a word are bounded, and the sign that ends an address is looked for once in each run of signs: a
# hostile text of a megabyte takes no longer than its length asks for.
_WORD = r"[\w.-]{0,64}(?:token|secret|passw|pwd|signature|credential|auth|key)[\w.-]{0,64}|sig"
_KINDS = r"token|secret|password|passwd|passphrase|credentials?|(?:api|access|private|secret)[-_]?key"
_NAME = rf"(?:[A-Z0-9]+_){{0,16}}(?:{_KINDS.upper()})(?:_[A-Z0-9]+){{0,16}}"
_VALUE = r"""'[^']*'|"[^"]*"|[^\s'"]+"""
# A password may hold any sign but white space; a number and the end of a host's name are a port.
# Texts, which ``re`` compiles and keeps when they are first used: compiling them here took longer than all else that
# every command imports.
_RUN = r"""[^\s'"]+"""
_PASSWORD = r"""(://[^/@:?#]*):(?!\d{1,5}[/?#,;)]).*"""
_SECRETS: tuple[tuple[str, str], ...] = (
    (r"""(?i)\b((?:https?|ftps?)://)[^\s/@:?#'"]+@""", r"\1***@"),
    (rf"""(?i)([?&;#](?:{_WORD})=)[^&;\s#'"]+""", r"\1***"),
    (
        r"""(?i)\b((?:aws_)?(?:secret_access_key|access_key_id|session_token|security_token)|secret_key|account_key"""
        r"""|sas_token|connection_string|client_secret|password|(?<!/)passwd|api_key|access_token)"""
        r"""(['"]?\s*[:=]\s*['"]?)[^\s'",}&;)]+""",
        r"\1\2***",
    ),
    (r"""(?i)\b(authorization['"]?\s*[:=]\s*['"]?(?:\w+\s+)?)[^\s'",]+""", r"\1***"),
    # As a variable of a process, or an option of a command: WANDB_API_KEY=…, --hf-token …
    (rf"""(['"])({_NAME}=)[^'"]*\1""", r"\1\2***\1"),  # a word of a command, quoted as a whole
    (rf"""\b({_NAME}=)({_VALUE})""", r"\1***"),
    (rf"""(?i)((?:^|\s)--?(?:[a-z0-9]+[-_])*(?:{_KINDS})(?:=|\s+))(?!-)({_VALUE})""", r"\1***"),
    (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", "***"),
)


def redact(text: str) -> str:
    """Returns a text without the passwords, tokens and keys in it: ``s3://user:***@bucket``, ``?token=***``.

    For whatever repeats an address: a message, a line of a log, a report, a provenance.
    """
    if not any(sign in text for sign in "@=:A-"):
        return text
    text = re.sub(_RUN, lambda run: _hide_password(run[0]), text)
    for pattern, replacement in _SECRETS:
        text = re.sub(pattern, replacement, text)
    return text


def _hide_password(run: str) -> str:
    address, at, rest = run.rpartition("@")
    return "".join([re.sub(_PASSWORD, r"\1:***", address), at, rest]) if at else run


class ExitCode(IntEnum):
    """What every command, script and module program of this project exits with; each has its ``meaning``.

    1 to 4 are verdicts, and nothing that goes wrong ends with one of them unless it is that verdict: a contract that is
    broken leaves nothing to compare, and settings that are not in effect leave a run unverified. ``INTERNAL`` (BSD's
    EX_SOFTWARE) is an error that this project did not foresee. A process that a signal ended counts as 128 + the
    signal's number, as in shells.
    """

    meaning: str

    def __new__(cls, value: int, meaning: str = "") -> ExitCode:
        """Makes the member of a number."""
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    ALIGNED = 0, "aligned, or done"
    DIVERGED = 1, "diverged: a difference beyond its bound"
    SUSPECT = 2, "suspect: nothing shows that a difference is rounding"
    INCOMPARABLE = 3, "incomparable: a run failed, a recording's contract is broken, or nothing could be compared"
    UNVERIFIED = (
        4,
        "unverified: runs are not shown to be deterministic, or a setting is missing, late or without effect",
    )
    USAGE = 5, "bad input, or a file that cannot be read or written"
    INTERNAL = 70, "an error that this project did not foresee, with its traceback"


#: By exit code, where a signal ended the process: 128 + its number.
SIGNAL_CODES = {
    130: "interrupted (Ctrl-C)",
    141: "nobody reads the output any more",
    143: "ended by SIGTERM",
}


class MockSchedulerError(Exception):
    """Base of all errors that this library raises on purpose."""

    exit_code: int = ExitCode.USAGE
    #: The page that explains it; empty where the message is enough.
    page: str = ""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(redact(item) if isinstance(item, str) else item for item in arguments))


class ConfigError(MockSchedulerError, ValueError):
    """A key, a value or a combination in the configuration cannot be used."""


class LayoutError(ConfigError):
    """Parallel sizes that do not fit the model, the batch or the number of processes."""

    page = "docs/layouts.md"


class BatchError(MockSchedulerError, ValueError):
    """A rollout batch contradicts itself or the request it answers."""


class CorrectionError(MockSchedulerError, ValueError):
    """Log-probabilities are missing, of another distribution, not finite, or all but rejected."""

    page = "docs/rollout_correction.md"


class RecordingError(MockSchedulerError, OSError):
    """A recording cannot be written or read."""


class StepNotFoundError(RecordingError, FileNotFoundError):
    """The recording does not hold a step that was asked for."""


class StepExistsError(RecordingError, FileExistsError):
    """Writing would replace a step that is already recorded."""


class StepInTwoFormsError(RecordingError):
    """A step lies in two forms, and nothing tells which one is meant."""


class CorruptRecordingError(RecordingError):
    """The bytes on disk are not the bytes that were written."""


class ContractError(MockSchedulerError, ValueError):
    """The run that replays differs from the run that recorded in what must match."""

    exit_code = ExitCode.INCOMPARABLE
    page = "docs/recordings.md"


class SchedulerError(MockSchedulerError, RuntimeError):
    """A rollout scheduler was used out of order or answered wrongly."""


class DeterminismError(MockSchedulerError, RuntimeError):
    """A determinism setting is missing, was applied too late or did not take effect."""

    exit_code = ExitCode.UNVERIFIED
    page = "docs/determinism.md"


class RankDisagreementError(DeterminismError):
    """Ranks of one run hold different values where they must agree."""


class TraceError(MockSchedulerError, OSError):
    """A trace, or a run's metrics, cannot be written, read or merged."""


class ForeignFileError(MockSchedulerError, OSError):
    """A file of another party is no regular file, leads out of its folder or is larger than its kind may be."""


class ServiceError(MockSchedulerError, OSError):
    """A training service does not answer, answers wrongly or refuses a request."""

    page = "docs/remote.md"


class EngineError(MockSchedulerError, OSError):
    """An inference engine does not answer, answers wrongly, or samples from another policy than the one trained."""

    page = "docs/engines.md"


class AlignmentError(MockSchedulerError, RuntimeError):
    """An alignment run could not be carried out; where its baseline failed, with the baseline's exit code."""

    exit_code: int = ExitCode.INCOMPARABLE


class UnwrittenError(AlignmentError):
    """A page or a file of a result cannot be written, which is no verdict."""

    exit_code: int = ExitCode.USAGE
