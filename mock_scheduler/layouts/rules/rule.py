"""Defines a rule about Megatron's configuration, and the setup that it judges.

Contract: imports neither torch nor Megatron. A rule reads a ``Setup`` and changes nothing. A field absent from the
mapping does not exist in the installed version, or is not known: it reads as ``None``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

Version = tuple[int, ...]


class Effect(StrEnum):
    """The harm, or the mere change, where a rule applies."""

    WRONG = "computes wrong values"
    REFUSED = "is refused by Megatron"
    NOT_REPEATABLE = "is not repeatable"
    DEPENDS_ON_LAYOUT = "computes something else in another layout"
    CHANGES_BITS = "changes bits, so it must be equal in both runs"


def parse_version(text: str) -> Version:
    """Returns ``(0, 16, 1)`` of ``0.16.1`` or ``0.16.1rc0+cpu``: the leading numbers, without zeros at their end.

    Raises ValueError where the text does not begin with a number.
    """
    found = re.match(r"\d+(\.\d+)*", text)
    if found is None:
        raise ValueError(f"{text!r} is no version")
    numbers = [int(number) for number in found.group().split(".")]
    # 0.19 and 0.19.0 are one version.
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Holds everything for a rule to look at.

    ``values``: fields of ``TransformerConfig`` and, where known, of ``DistributedDataParallelConfig``, by name; enums
    by their member's name (``flash``), dtypes by name (``bfloat16``), and ``torch.deterministic_algorithms``. Two are
    the program's own: ``moe_router_impl``, ``layout_invariant`` where experts are chosen by another router than
    Megatron's, and ``loss_values``, how many values its loss function returns to Megatron's schedule (2 or 3).
    ``environ``: the environment in effect. ``versions``: installed packages by name, and ``cudnn``.
    ``device``: compute capability of the GPU, ``None`` on the CPU.
    """

    values: Mapping[str, object]
    environ: Mapping[str, str]
    versions: Mapping[str, str]
    device: tuple[int, int] | None

    def is_on(self, *fields: str) -> bool:
        """Says whether any of these fields is set to something other than off, zero or nothing."""
        return any(bool(self.values.get(name)) for name in fields)

    def size(self, name: str) -> int:
        """Returns a size such as ``tensor_model_parallel_size``; 1 where it is not given."""
        value = self.values.get(name)
        return value if isinstance(value, int) and value else 1

    def has_older(self, package: str, version: str) -> bool:
        """Says whether a package is installed in a version before this one."""
        installed = self.versions.get(package)
        return installed is not None and parse_version(installed) < parse_version(version)

    def is_env_on(self, name: str) -> bool:
        """Says whether a variable of the 0/1 kind is on."""
        return self.environ.get(name, "") not in {"", "0"}

    def find(self, name: str) -> str:
        """Returns the found value, for messages: of a field, a variable or a package."""
        if name in self.values:
            return f"{name} is {self.values[name]!r}"
        if name in self.versions:
            return f"{name} is {self.versions[name]}"
        return f"{name} is {self.environ[name]!r}" if name in self.environ else f"{name} is not set"


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronRule:
    """One way in which a configuration breaks training, or changes its values.

    ``shows``: the fields, variables and packages to show with their values. ``since`` and ``before``: it holds for
    versions of megatron-core from ``since`` and below ``before``. ``breaks``: why; ``change``: the remedy.
    """

    name: str
    effect: Effect
    shows: tuple[str, ...]
    applies: Callable[[Setup], bool]
    breaks: str
    change: str
    source: str
    since: str | None = None
    before: str | None = None

    @property
    def is_for_all_versions(self) -> bool:
        """Says whether it holds for every version of megatron-core."""
        return self.since is None and self.before is None

    def holds_for(self, versions: Mapping[str, str]) -> bool:
        """Says whether the rule is about the installed megatron-core; an unknown version has every rule."""
        installed = versions.get("megatron-core")
        # A rule too many is milder than wrong values.
        if installed is None:
            return True
        version = parse_version(installed)
        too_old = self.since is not None and version < parse_version(self.since)
        return not too_old and (self.before is None or version < parse_version(self.before))

    def describe_versions(self) -> str:
        """``0.15 up to 0.19``; ``all`` where it holds for every version."""
        if self.is_for_all_versions:
            return "all"
        return f"{self.since or 'first'} up to {self.before}" if self.before else f"from {self.since}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Conflict:
    """A rule that applies, with the found values as text."""

    rule: MegatronRule
    found: str

    def describe(self) -> str:
        """Returns one line with the found values, why they matter and the remedy."""
        return f"{self.found}: {self.rule.breaks}. {self.rule.change} [{self.rule.name}; {self.rule.source}]"


def apply_rules(rules: Iterable[MegatronRule], setup: Setup) -> list[Conflict]:
    """Returns every rule that holds for the installed version and applies, in their order."""
    return [
        Conflict(rule=rule, found=", ".join(setup.find(name) for name in rule.shows if _is_known(setup, name)))
        for rule in rules
        if rule.holds_for(setup.versions) and rule.applies(setup)
    ]


def _is_known(setup: Setup, name: str) -> bool:
    """Says whether a message can show a name: it leaves out fields missing from this version."""
    # Names in capitals are variables of the environment, of which "not set" is worth showing.
    return name in setup.values or name in setup.versions or name.isupper()
