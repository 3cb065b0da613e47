"""Reads the environment variables that a library's sources name, and says which of them the table does not know.

    python -m tests.determinism.source_variables nccl FOLDER_OF_ITS_SOURCES

``source_variables.yaml`` has, by library, the release that was read, and every variable with no effect on bits, by the
reason. All others must be in the table of settings by name. A new release is read by the command above: it prints the
names that neither has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from mock_scheduler.determinism.settings import is_documented

STORED = Path(__file__).with_name("source_variables.yaml")
_READS = re.compile(
    r"""(?:\w*[gG]et_?[eE]nv(?:<[^>]*>)?|environ(?:\.get)?|PoolSizeMB)\s*[(\[]\s*["']([A-Z][A-Za-z0-9_]{3,})["']"""
)
_NCCL_PARAMETERS = re.compile(r"""NCCL_PARAM\(\s*\w+\s*,\s*"([A-Z0-9_]+)\"""")
_SUFFIXES = frozenset({".py", ".cc", ".cpp", ".cu", ".cuh", ".h"})


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVariables:
    """Holds what is stored of a library. sources: its folders. in_table: names that the table of settings has.

    others: the reason, why no bit follows from them -> names.
    """

    release: str
    sources: tuple[str, ...]
    in_table: frozenset[str]
    others: Mapping[str, frozenset[str]]

    @property
    def names(self) -> frozenset[str]:
        """Returns every name."""
        return self.in_table.union(*self.others.values())


def read_stored(path: Path = STORED) -> dict[str, StoredVariables]:
    """Reads the stored lists, by library."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        library: StoredVariables(
            release=item["release"],
            sources=tuple(item["sources"]),
            in_table=frozenset(item["in_table"].split()),
            others={reason: frozenset(names.split()) for reason, names in item["no_bits"].items()},
        )
        for library, item in content.items()
    }


def find_variables(folder: Path) -> set[str]:
    """Finds the names that the sources in a folder read from the environment."""
    found: set[str] = set()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found |= set(_READS.findall(text)) | {f"NCCL_{name}" for name in _NCCL_PARAMETERS.findall(text)}
    return found


def find_unknown(names: set[str], stored: StoredVariables) -> list[str]:
    """Lists the names that neither the table nor the stored list has."""
    return sorted(name for name in names if not is_documented(name) and name not in stored.names)


def main() -> int:
    """Prints the unknown names of a checkout; 1 where there are some."""
    library, root = sys.argv[1], Path(sys.argv[2])
    stored = read_stored()[library]
    names = {name for folder in stored.sources for name in find_variables(root / folder)}
    unknown = find_unknown(names, stored)
    gone = sorted(stored.names - names)
    print(f"{library}: {len(names)} variables in {root}; stored: {stored.release}")
    print(f"unknown: {', '.join(unknown) or 'none'}")
    print(f"no longer read: {', '.join(gone) or 'none'}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
