"""Finds the settings that bear on an operation that was not repeatable, and whether they were in effect.

Contract: imports no torch. A table leads from operators and devices to rows of ``settings.SETTINGS``, with their
required values and reasons; these are compared with the values that both runs read back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mock_scheduler.determinism.settings import find_setting
from mock_scheduler.determinism.settings.setting import Setting
from mock_scheduler.doctor.differences import Difference, DifferenceKind
from mock_scheduler.support.text import bullet_list

_UNSET = "unset"
_DETERMINISTIC = ("torch.deterministic_algorithms", "torch.deterministic_warn_only")
_THREADS = ("OMP_NUM_THREADS", "torch.num_threads")
_HASHES = ("PYTHONHASHSEED", "python.hash_randomization", "python.string_hash")
_KERNEL_LIBRARIES = (
    *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "transformer_engine.enforce_deterministic"),
    *("NVTE_DISABLE_TRITON_AUTOTUNING", "torch.inductor.max_autotune", "torch.inductor.coordinate_descent_tuning"),
    *("MAMBA_DETERMINISTIC", "CAUSAL_CONV1D_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG"),
)
_NCCL = (
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_TUNER_PLUGIN"),
    *("NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS", "NCCL_BUFFSIZE"),
)
_CPU_KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")
# Settings mean nothing where their reader is absent: beginning of the name -> the version that must be there.
_READERS = {
    "NVTE_": "version.transformer-engine",
    "transformer_engine.": "version.transformer-engine",
    "MAMBA_": "version.mamba-ssm",
    "CAUSAL_CONV1D_": "version.causal-conv1d",
    "FLASH_ATTENTION_": "version.flash-attn",
    "CUBLAS": "version.cuda",
    "NCCL_": "version.nccl",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Holds the settings that bear on some operators.

    ``operators``: a regular expression for the whole name. ``device``: ``None`` for any. ``settings``: names of the
    settings table, the likeliest first.
    """

    operators: str
    device: str | None = None
    why: str
    settings: tuple[str, ...] = ()


# The first fitting rule counts, so general ones come last. Sources: torch.use_deterministic_algorithms (torch 2.13) for
# the list of CUDA operations; the cuBLAS, NCCL and cuDNN rows of the settings table for the rest.
RULES: tuple[Rule, ...] = (
    Rule(
        operators=r"aten\.(rand|randn|randint|randperm|normal|bernoulli|multinomial|uniform|exponential|geometric"
        r"|log_normal|cauchy|poisson|random|rrelu\w*|native_dropout|_fused_dropout|binomial)(_like|_with_noise)?_?\..*",
        why="it draws random numbers, from a generator that was not in the same state in both runs: seed it from the "
        "run's own seed, never from the time, the process or hash()",
    ),
    Rule(
        operators=r"(c10d|_c10d_functional\w*)\..*",
        device="cuda",
        why="NCCL sums in an order that follows its algorithm, protocol, channels and topology",
        settings=_NCCL,
    ),
    Rule(
        operators=r"(c10d|_c10d_functional\w*)\..*",
        why="the communication gave another result for equal inputs on every rank",
    ),
    Rule(
        operators=r"aten\..*(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention).*",
        device="cuda",
        why="the backward of fused attention adds by atomics unless its deterministic form is chosen",
        settings=(
            *_DETERMINISTIC,
            *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "FLASH_ATTENTION_DETERMINISTIC"),
            *("torch.sdp.flash", "torch.sdp.mem_efficient", "torch.sdp.cudnn"),
        ),
    ),
    Rule(
        operators=r"aten\.(mm|addmm|_addmm_activation|bmm|baddbmm|addbmm|dot|mv|addmv|_scaled_mm|_grouped_mm"
        r"|_scaled_grouped_mm|_int_mm)\..*",
        device="cuda",
        why="cuBLAS picks its workspace and its split of a sum per stream",
        settings=("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "torch.cuda.preferred_blas_library"),
    ),
    Rule(
        operators=r"aten\.(\w*convolution\w*|\w*cudnn\w*|\w*rnn\w*|\w*lstm\w*|\w*gru\w*)\..*",
        device="cuda",
        why="cuDNN chooses algorithms by timing, and some of them add by atomics",
        settings=("torch.cudnn.deterministic", "torch.cudnn.benchmark", "CUBLAS_WORKSPACE_CONFIG"),
    ),
    Rule(
        operators=r"aten\.(_unsafe_)?(_?index_(add|copy|put|put_impl|reduce)|scatter\w*|put|gather_backward|cumsum"
        r"|cumprod|embedding_dense_backward|_embedding_bag\w*|\w*upsample\w*|\w*pool\w*backward|bincount|histc|kthvalue"
        r"|median|nll_loss2d\w*|\w*ctc_loss\w*|reflection_pad\w*|replication_pad\w*|grid_sampler\w*|resize"
        r"|\w*segment_reduce\w*|repeat_interleave)_?\..*",
        device="cuda",
        why="it adds by atomics in no fixed order, unless torch is told to use its deterministic form",
        settings=_DETERMINISTIC,
    ),
    Rule(
        operators=r"aten\..*",
        device="cuda",
        why="no setting is known to make this operation itself vary; a race, or a read of uninitialised memory, may",
        settings=(*_DETERMINISTIC, "torch.fill_uninitialized_memory"),
    ),
    Rule(
        operators=r"aten\..*",
        device="cpu",
        why="on the CPU a sum is split over the threads, and its kernel is chosen by the instruction set",
        settings=(*_THREADS, *_CPU_KERNELS),
    ),
    Rule(
        operators=r".*",
        why="it is an operation of another library, which torch's deterministic mode does not reach",
        settings=(*_KERNEL_LIBRARIES, "FLASH_ATTENTION_DETERMINISTIC"),
    ),
)

_OTHER_PATH = Rule(
    operators=r".*",
    why="what the program does next depends on something that differs between processes: the order of a set of "
    "strings, the time, a file, the environment",
    settings=_HASHES,
)
_DIFFERED_BEFORE = Rule(
    operators=r".*",
    why="the operations of the step are not the cause: what they began with was not the same, such as weights that no "
    "fixed seed made, or a value of NumPy, the time or a file",
    settings=(*_HASHES, *_THREADS, *_CPU_KERNELS),
)
_NOT_DISPATCHED = Rule(
    operators=r".*",
    why="a kernel that torch does not dispatch is not reached by torch's deterministic mode",
    settings=(*_KERNEL_LIBRARIES, *_THREADS),
)


class State(StrEnum):
    """The state of a setting in both runs, the likeliest cause first."""

    DIFFERS = "differs between the two runs"
    NOT_AS_REQUIRED = "is not as required"
    IN_EFFECT = "is in effect"
    NOT_READ = "is read by nothing that is installed"
    EQUAL = "is equal in both"


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingFound:
    """Holds one setting with its values in both runs."""

    name: str
    state: State
    first: str
    second: str
    required: str
    remedy: str

    def describe(self) -> str:
        """Writes one line with the value, the required one, and the reason."""
        if self.state is State.DIFFERS:
            return f"{self.name} was {self.first} in the first run and {self.second} in the second: {self.remedy}"
        must = f", must be {self.required}" if self.state is State.NOT_AS_REQUIRED else ""
        return f"{self.name} is {self.first}{must}: {self.remedy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """The reason of a difference. ``settings``: all bearing on it, blamed ones first; ``others``: differing besides."""

    why: str
    settings: tuple[SettingFound, ...]
    others: tuple[SettingFound, ...]

    @property
    def responsible(self) -> tuple[SettingFound, ...]:
        """The settings to blame: first differing ones, then ones not as required; may be empty."""
        return tuple(
            setting
            for state in (State.DIFFERS, State.NOT_AS_REQUIRED)
            for setting in self.settings
            if setting.state is state
        )

    def describe(self) -> str:
        """Says the verdict on settings."""
        if self.responsible:
            return f"responsible:{bullet_list([setting.describe() for setting in self.responsible], limit=None)}"
        differing = bullet_list([setting.describe() for setting in self.others], limit=None)
        if differing:
            return f"no setting known to bear on it is to blame, but the two runs differ in:{differing}"
        if not self.settings:
            return "no setting governs it: the program itself must be changed"
        read = [setting for setting in self.settings if setting.state is not State.NOT_READ]
        listed = ", ".join(f"{setting.name}={setting.first}" for setting in read) or "none is read here"
        return f"all settings that bear on it are in effect or equal ({listed}): it is not repeatable by itself"


def find_rule(difference: Difference) -> Rule:
    """Finds the rule for a difference."""
    match difference.kind:
        case DifferenceKind.OTHER_PATH | DifferenceKind.OTHER_TENSOR | DifferenceKind.ENDED_EARLIER:
            return _OTHER_PATH
        case DifferenceKind.DIFFERED_BEFORE:
            return _DIFFERED_BEFORE
        case DifferenceKind.NOT_DISPATCHED:
            return _NOT_DISPATCHED
    record = difference.record
    return next(
        rule
        for rule in RULES
        if rule.device in (None, record.device) and re.fullmatch(rule.operators, record.operator) is not None
    )


def find_cause(difference: Difference, first: Mapping[str, str], second: Mapping[str, str]) -> Cause:
    """Explains a difference by the settings that both runs read back."""
    rule = find_rule(difference)
    found = [_look_up(name, first, second) for name in rule.settings]
    order = list(State)
    others = find_changed_settings(first, second)
    return Cause(
        why=rule.why,
        settings=tuple(sorted(found, key=lambda setting: order.index(setting.state))),
        others=tuple(setting for setting in others if setting.name not in rule.settings),
    )


def find_changed_settings(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[SettingFound, ...]:
    """Finds the settings with another value in each run, by name."""
    names = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    # Random hashes differ in every process; they explain nothing where the path is the same.
    return tuple(_look_up(name, first, second) for name in names if name not in _HASHES)


def _look_up(name: str, first: Mapping[str, str], second: Mapping[str, str]) -> SettingFound:
    setting = find_setting(name)
    values = first.get(name, _UNSET), second.get(name, _UNSET)
    return SettingFound(
        name=name,
        state=_judge(setting, *values) if _is_read(name, first, second) else State.NOT_READ,
        first=values[0],
        second=values[1],
        required="" if setting is None or setting.recommended is None else repr(setting.recommended),
        remedy="keep it equal between runs" if setting is None else setting.remedy,
    )


def _is_read(name: str, first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    readers = [reader for prefix, reader in _READERS.items() if name.startswith(prefix)]
    return all(run.get(reader, "absent") != "absent" for reader in readers for run in (first, second))


def _judge(setting: Setting | None, first: str, second: str) -> State:
    if first != second:
        return State.DIFFERS
    if setting is None or setting.recommended is None:
        return State.EQUAL
    if setting.pattern is None:
        return State.IN_EFFECT if first == setting.recommended else State.NOT_AS_REQUIRED
    is_set = first not in (_UNSET, "absent")
    return State.IN_EFFECT if is_set and setting.allows(first) else State.NOT_AS_REQUIRED
