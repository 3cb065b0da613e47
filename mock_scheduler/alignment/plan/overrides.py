"""Overrides in Hydra's grammar, and the candidates of an alignment that they make.

Candidates are the listed ones, and the product of layouts and options without the excluded. Contract: pure; nothing is
loaded or run. All problems of list and matrix are said at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from mock_scheduler.config.align import AlignConfig, CandidateConfig, MatrixConfig
from mock_scheduler.config.layout import ParallelConfig, parse_layout
from mock_scheduler.errors import ConfigError


def override_keys(overrides: Sequence[str]) -> list[str]:
    """Returns the keys to set, add or delete: ``a.b`` of ``a.b=c``, ``+a.b=c`` and ``~a.b``."""
    return [override.partition("=")[0].lstrip("+~").strip() for override in overrides]


def check_free(where: str, overrides: Sequence[str], taken: Iterable[str]) -> None:
    """Raise ``ConfigError`` for an override of a key reserved for the alignment; ``a.`` takes all keys below it."""
    keys = override_keys(overrides)
    clashes = [
        clash
        for name in taken
        for clash in dict.fromkeys(keys)
        if clash == name or (name.endswith(".") and f"{clash}.".startswith(name))
    ]
    if clashes:
        raise ConfigError(f"an alignment run sets {', '.join(clashes)} itself; remove it from {where}")


def format_override(key: str, value: object) -> str:
    """Writes ``key=value`` for a number, a bool, ``None`` or a text."""
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    return f"{key}={value}" if isinstance(value, int | float) else quote_override(key, str(value))


def quote_override(key: str, value: str) -> str:
    """Writes ``key='value'`` in Hydra's grammar, for any text: quotes and interpolations in it stay text."""
    return f"{key}={quote_value(value)}"


def quote_value(value: str) -> str:
    """Returns a text as a quoted value, also as an element of a list or an object.

    In a quoted value (Hydra 1.3) a quote is escaped, and so are the backslashes just before one or at the end; a ``${``
    is escaped for OmegaConf, since it resolves the value afterwards.
    """
    quoted = ""
    num_backslashes = 0
    for character in value.replace("${", "\\${"):
        if character == "'":
            quoted += "\\" * num_backslashes + "\\"
        num_backslashes = num_backslashes + 1 if character == "\\" else 0
        quoted += character
    return f"'{quoted}{chr(92) * num_backslashes}'"


#: The option that changes nothing; with it a candidate is named by its layout alone.
PLAIN_OPTION = "plain"


def expand_candidates(
    align: AlignConfig, parallel: ParallelConfig, *, reserved: Collection[str] = ()
) -> tuple[CandidateConfig, ...]:
    """Returns all candidates in order, as ``list_candidates``; raises ``ConfigError`` with all problems of them."""
    candidates, problems = list_candidates(align, parallel, reserved=reserved)
    if problems:
        raise ConfigError("\n".join(problems))
    return candidates


def list_candidates(
    align: AlignConfig, parallel: ParallelConfig, *, reserved: Collection[str] = ()
) -> tuple[tuple[CandidateConfig, ...], list[str]]:
    """Returns all candidates in order, and their problems.

    First ``align.candidates``, then the matrix layout by layout, each with every option.

    ``parallel``: the baseline's layout; a candidate of the matrix overrides the degrees where its own differs.
    ``reserved``: names forbidden to candidates. Problems are every unknown layout, doubled or reserved name,
    exclusion without a match and empty product.
    """
    problems: list[str] = []
    product = list(_expand_matrix(align.matrix, parallel, problems))
    candidates = (*align.candidates, *product)
    problems += _name_problems([candidate.name for candidate in candidates], reserved)
    if not candidates and not problems:
        problems.append(
            "there is no candidate: align.candidates and align.matrix are empty; fill one, as in "
            "align.candidates: [{name: tp2, overrides: [...]}] or align.matrix.layouts: [tp2]"
        )
    return candidates, problems


def layout_overrides(layout: str, parallel: ParallelConfig) -> tuple[str, ...]:
    """Returns overrides from ``parallel`` to the layout of a text like ``tp2-sp``; other degrees become 1.

    Keys beside the degrees stay as they are. Raises ``LayoutError`` where the text is no layout.
    """
    current = parallel.model_dump()
    return tuple(
        format_override(f"parallel.{key}", value)
        for key, value in parse_layout(layout).items()
        if value != current[key]
    )


def _expand_matrix(matrix: MatrixConfig, parallel: ParallelConfig, problems: list[str]) -> Iterator[CandidateConfig]:
    options = matrix.options or {PLAIN_OPTION: []}
    if matrix.options and not matrix.layouts:
        problems.append("align.matrix.options has no layouts to combine with; add align.matrix.layouts, as in [tp1]")
    if options.get(PLAIN_OPTION):
        problems.append(
            f"align.matrix.options.{PLAIN_OPTION} is {options[PLAIN_OPTION]}, but {PLAIN_OPTION} is the layout alone; "
            "set it to [], or rename the option"
        )
    layouts = _parse_layouts(matrix.layouts, parallel, problems)
    names = {
        layout if option == PLAIN_OPTION else f"{layout}.{option}": (layout, option)
        for layout in layouts
        for option in options
    }
    excluded = {name for name in names if any(fnmatchcase(name, glob) for glob in matrix.exclude)}
    if layouts or not problems:
        problems += [
            f"align.matrix.exclude: {glob!r} matches no candidate; the candidates are {', '.join(names) or 'none'}"
            for glob in matrix.exclude
            if not any(fnmatchcase(name, glob) for name in names)
        ]
    if names and len(excluded) == len(names):
        which = "its one candidate is" if len(names) == 1 else f"all of its {len(names)} candidates are"
        problems.append(f"align.matrix: {which} excluded")
    for name, (layout, option) in names.items():
        if name not in excluded:
            yield CandidateConfig(name=name, overrides=[*layouts[layout], *options[option]])


def _parse_layouts(texts: Sequence[str], parallel: ParallelConfig, problems: list[str]) -> dict[str, tuple[str, ...]]:
    """Returns the overrides of every valid layout, by its text."""
    layouts: dict[str, tuple[str, ...]] = {}
    for text in texts:
        try:
            overrides = layout_overrides(text, parallel)
        except ConfigError as error:
            problems.append(f"align.matrix.layouts: {error}")
            continue
        same = next((other for other, found in layouts.items() if found == overrides), None)
        if text in layouts:
            problems.append(f"align.matrix.layouts: {text!r} is listed more than once")
        elif same is not None:
            problems.append(f"align.matrix.layouts: {same!r} and {text!r} are the same layout")
        layouts[text] = overrides
    return layouts


def _name_problems(names: Sequence[str], reserved: Collection[str]) -> Iterator[str]:
    taken = sorted(set(reserved) & set(names))
    if taken:
        names_taken = ", ".join(map(repr, taken))
        yield f"align.candidates: the alignment itself uses {names_taken}; give the candidate another name"
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        yield f"align.candidates: more than one candidate is named {', '.join(map(repr, doubled))}"
