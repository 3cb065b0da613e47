"""Arguments as verl's releases read them, with the errors of the releases.

Contract: pure functions of plain values. Raises ValueError, TypeError or ZeroDivisionError where the release does.
Kept gaps: NaN passes every check, and ``True`` counts as 1 before 0.8.
"""

from __future__ import annotations

from dataclasses import dataclass

_OPTIONS = frozenset(
    f"{unit}_{estimator}" for unit in ("token", "seq_sum", "seq_mean") for estimator in ("k1", "k2", "k3")
)
SUPPORTED_OPTIONS = _OPTIONS | {"seq_max_k2", "seq_max_k3"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightBounds:
    """Bounds of weights. lower: ``None`` truncates at ``upper``; a number zeroes weights outside both (IcePop)."""

    upper: float
    lower: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of ``rollout_rs`` since 0.7.1. lower, upper: as written; of ratios for k1, of the estimator else."""

    name: str
    lower: float | None
    upper: float

    @property
    def unit(self) -> str:
        """Returns ``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``."""
        return self.name.rpartition("_")[0]

    @property
    def estimator(self) -> str:
        """Returns ``k1``, ``k2`` or ``k3``."""
        return self.name.rpartition("_")[2]


def read_number(name: str, value: object) -> float:
    """Reads the number, unconverted; TypeError for a text or a list, as no release compares them with a number."""
    if not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}; expected a number")
    return value


def read_positive(name: str, value: object) -> float:
    """Reads a number; ValueError for one ≤ 0; NaN passes."""
    number = read_number(name, value)
    if number <= 0:
        raise ValueError(f"{name} is {number}; expected a positive number")
    return number


def read_choice(name: str, value: object, choices: frozenset[str]) -> str:
    """Returns one of ``choices``; ValueError for another, TypeError for an unhashable value."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(sorted(choices))}")
    return str(value)


def read_weight_bounds(value: object, *, text_bounds: bool) -> WeightBounds:
    """``rollout_is_threshold``: a number; with ``text_bounds`` also ``"upper"`` or ``"lower_upper"``, but no bool."""
    name = "rollout_is_threshold"
    if not text_bounds:
        return WeightBounds(upper=read_positive(name, value))
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name} is {value!r}; expected a number, or a text 'upper' or 'lower_upper'")
    before, underscore, after = value.strip().partition("_") if isinstance(value, str) else ("", "", "")
    upper = float(value) if not isinstance(value, str) else float(after if underscore else before)
    lower = float(before) if underscore else None
    if upper <= 0 or (lower is not None and (lower <= 0 or lower > upper)):
        raise ValueError(f"{name} is {value!r}; expected positive bounds, lower at most upper")
    return WeightBounds(upper=upper, lower=lower)


def read_options(names: object, threshold: object, *, refuses_crossed_bounds: bool) -> tuple[Option, ...]:
    """Returns options of ``rollout_rs`` with their bounds of ``rollout_rs_threshold``: one for all, or one for each.

    Repeated options count once. A number for k1 is [1/number, number].
    """
    if not isinstance(names, str):
        raise ValueError(f"rollout_rs is {names!r}; expected a text of options with commas between")
    listed = tuple(dict.fromkeys(_split(names)))
    if not listed:
        raise ValueError(f"rollout_rs is {names!r}; expected at least one option")
    for name in listed:
        read_choice("an option of rollout_rs", name, SUPPORTED_OPTIONS)
    if not isinstance(threshold, int | float | str):
        raise TypeError(f"rollout_rs_threshold is {threshold!r}; expected a number or a text")
    texts = _split(threshold) if isinstance(threshold, str) else [str(threshold)]
    if not texts or len(texts) not in (1, len(listed)):
        raise ValueError(f"rollout_rs_threshold is {threshold!r}; expected one threshold, or {len(listed)}")
    texts = texts * len(listed) if len(texts) == 1 else texts
    pairs = zip(listed, texts, strict=True)
    return tuple(_read_option(name, text, refuses_crossed_bounds=refuses_crossed_bounds) for name, text in pairs)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _read_option(name: str, text: str, *, refuses_crossed_bounds: bool) -> Option:
    before, underscore, after = text.partition("_")
    if not name.endswith("k1"):
        if underscore:
            raise ValueError(f"the threshold of {name} is {text!r}; expected one upper bound")
        upper = float(text)
        if upper <= 0:
            raise ValueError(f"the threshold of {name} is {text!r}; expected a positive number")
        return Option(name=name, lower=None, upper=upper)
    upper = float(after if underscore else before)
    lower = float(before) if underscore else 1.0 / upper
    if lower <= 0 or upper <= 0:
        raise ValueError(f"the thresholds of {name} are {text!r}; expected positive numbers")
    if refuses_crossed_bounds and lower > upper:
        raise ValueError(f"the thresholds of {name} are {text!r}; expected lower at most upper")
    return Option(name=name, lower=lower, upper=upper)
