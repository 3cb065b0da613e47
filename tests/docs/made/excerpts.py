"""Renews what a page shows of a command's output, without the lines that the page leaves out.

A line of a page stands for the next line of the output that has its words; numbers may be others. So a page keeps its
choice of lines, and its figures are the command's. What no two machines print alike is kept as the page has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

#: A cut: lines that are left out, or the rest of a line.
CUT = "…"

#: What varies by machine, by run or by load: it stays as the page has it, and nothing of it is compared.
_VARIES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",  # run ids
        r"\b[0-9a-f]{12,64}\b",  # revisions and digests
        r"\b\d{4}-\d\d-\d\d[T ][\d:]+(\.\d+)?Z?( UTC)?",  # dates
        r"\bLinux-\S+",
        r"\b(python|numpy|torch|megatron-core|safetensors|mock-scheduler|my_project) [\d.]\S*",  # versions
        r"\bpid \d+|\bport \d+|127\.0\.0\.1:\d+",
        r"\b[\d.,]+ ?(s|ms|seconds|minutes|min|MiB|KiB|GiB|MB/s|KiB/s)\b",
        r"(?<=\s)\d+\.\d$",  # the last column of a table: seconds
    )
)
#: Figures that rounding decides, and so the processor: a number with a point or an exponent, per cent, thousands, and
#: how many of so many tensors are equal.
_FIGURE = re.compile(
    r"(?<![\w.])[-+]?(\d+\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\d{1,3}(,\d{3})+|\d+(?=%)"
    r"|\d+(?= of [\d,]+ (tensors|response)))"
)
_NUMBER = re.compile(r"\d+")


def mask(line: str) -> str:
    """Returns a line as it is on every machine: what varies, and figures that rounding decides, are a sign each."""
    for pattern in _VARIES:
        line = pattern.sub("~", line)
    return " ".join(_FIGURE.sub("#", line).split())


def renew(shown: str, printed: str) -> tuple[str, list[str]]:
    """Returns the excerpt with the figures of ``printed``, and the lines of it that are printed no more.

    A line with a cut in it has its parts looked for in one line of the output, in their order.
    """
    rest = iter(printed.splitlines())
    lines, lost = [], []
    for line in shown.splitlines():
        if not line.strip() or line.strip() == CUT:
            lines.append(line)
            continue
        pattern = _pattern_of(line)
        passed: list[str] = []
        found = next((item for item in _noting(rest, passed) if pattern.fullmatch(_shape(item))), None)
        if found is None:
            lost.append(line)
            lines.append(line)
            rest = iter(passed)  # a lost line must not swallow those behind it
        else:
            lines.append(line if mask(line) == mask(found) else _with_figures(line, found.rstrip()))
    return "\n".join([*lines, ""]), lost


def _with_figures(line: str, found: str) -> str:
    """Returns the line as it is printed now, with the same cuts; a cut line whose words moved stays as it is."""
    if CUT not in line:
        return found
    parts = [r"\s+".join(map(_figures_open, part.split())) for part in line.split(CUT)]
    match = re.search(r"\s*.*?\s*".join(f"({part})" for part in parts), found)
    if match is None:
        return line
    # The page's own white space around its cuts stays.
    around = [re.fullmatch(r"(\s*)(.*?)(\s*)", part, re.DOTALL) for part in line.split(CUT)]
    texts = [f"{old[1]}{new}{old[3]}" if old else new for old, new in zip(around, match.groups(), strict=True)]
    whole = CUT.join(texts)
    return line if mask(whole) == mask(line) else whole


def _figures_open(word: str) -> str:
    return re.sub(r"\d+(\\[.,]\d+)*", r"[\\d.,]+", re.escape(word))


def _noting(items: Iterator[str], passed: list[str]) -> Iterator[str]:
    for item in items:
        passed.append(item)
        yield item


def _shape(line: str) -> str:
    return _NUMBER.sub("0", mask(line))


def _pattern_of(line: str) -> re.Pattern[str]:
    return re.compile(r" ?.* ?".join(re.escape(_shape(part)) for part in line.split(CUT)))
