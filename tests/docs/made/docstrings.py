"""Reads what classes say of their fields: docstrings beneath a field, and ``name``: items of the class's docstring."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass

_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_NAMES = r"``\w+``(?:(?:,\s+| and )``\w+``)*"
#: An item begins a paragraph, or stands behind a sentence: ``name``: or ``one``, ``two``:.
_ITEM = re.compile(rf"(?:^|(?<=[.;)]\s)|(?<=\n\n))({_NAMES}):\s+")
#: The same without signs: at the beginning of a line or behind a sentence, ``name, other: ...``.
_LINE_ITEM = re.compile(r"(?:^ *|(?<=[.;] ))(\w+(?:, \w+)*):\s+", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Returns a docstring's text as Markdown: code in single signs."""
    return _LITERAL.sub(r"`\1`", text)


def in_a_cell(text: str) -> str:
    """Returns text for a cell of a table: one line, bars escaped."""
    return " ".join(as_markdown(text).split()).replace("|", "\\|")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown; cells are as ``in_a_cell`` makes them."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def paragraphs(text: str) -> str:
    """Returns prose with each paragraph in lines of at most 120 characters; lists stay lists."""
    parts = []
    for part in re.split(r"\n\n+|\n(?=- )", as_markdown(text).strip()):
        indent = "  " if part.startswith("- ") else ""
        filled = textwrap.fill(
            " ".join(part.split()), 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        parts.append(filled)
    return re.sub(r"(?m)^(- .*(?:\n  .*)*)\n(?=\n- )", r"\1", "\n\n".join(parts))


def split_docstring(cls: type, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Returns a class's docstring without its items, and the items' texts by field, inherited ones among them.

    A docstring beneath the field comes before an item.
    """
    items: dict[str, str] = {}
    prose = ""
    for base in reversed(cls.__mro__):
        if _is_ours(base):
            prose, own = _split(inspect.cleandoc(base.__doc__ or ""), names)
            items |= own
    return prose, {**items, **beneath_fields(cls)}


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("mock_scheduler", "pipelines")


def _split(doc: str, names: Collection[str]) -> tuple[str, dict[str, str]]:
    """Splits a docstring; a line that begins with names of fields and a colon begins an item too."""

    def mark(line: re.Match[str]) -> str:
        found = line[1].split(", ")
        return f"\n\n{', '.join(f'``{name}``' for name in found)}: " if set(found) <= set(names) else line[0]

    doc = _LINE_ITEM.sub(mark, re.sub(r"^Args:\n", "", doc, flags=re.MULTILINE))
    pieces = _ITEM.split(doc)
    prose, items = [pieces[0]], dict[str, str]()
    listed: list[str] = []
    for heads, body in zip(pieces[1::2], pieces[2::2], strict=True):
        text, _, rest = body.partition("\n\n")
        found = re.findall(r"``(\w+)``", heads)
        if set(found) <= set(names):
            listed = found
            items |= dict.fromkeys(listed, text)
        elif listed:  # a value of the field before it
            items |= {name: f"{items[name]}{heads}: {text}" for name in listed}
        else:
            prose.append(f"{heads}: {text}")
        if rest:
            prose.append(rest)
            listed = []
    items = {name: text.strip().rstrip(";,") for name, text in items.items()}
    return "\n\n".join(part.strip() for part in prose if part.strip()), items


def beneath_fields(cls: type) -> dict[str, str]:
    """Returns the docstrings beneath a class's own and inherited fields."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not _is_ours(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(ast.literal_eval(ast.unparse(text))))
    return found


def describe_dataclass(cls: type) -> str:
    """Returns a class's prose and a table of its fields: name, type, meaning."""
    assert is_dataclass(cls)
    names = [field.name for field in fields(cls)]
    prose, items = split_docstring(cls, names)
    types: Mapping[str, object] = {field.name: field.type for field in fields(cls)}
    rows = [
        (f"`{name}`", f"`{in_a_cell(_type_name(types[name]))}`", in_a_cell(items.get(name, "")))
        for name in names
        if not name.startswith("_")
    ]
    return f"{paragraphs(prose)}\n\n{table(('field', 'type', 'meaning'), rows)}"


def _type_name(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
