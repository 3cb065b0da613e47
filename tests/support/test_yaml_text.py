"""YAML stands for a bounded number of plain values, or is refused with the line."""

from __future__ import annotations

import pytest

from mock_scheduler.support.yaml_text import MAX_DEPTH, MAX_TEXT, MAX_VALUES, load_yaml


def bomb(levels: int, *, of: str = "list") -> str:
    """Ten times as many values with each line."""
    names = "abcdefghij"
    lines = ["a0: &a0 [" + ", ".join(["lol"] * 10) + "]"]
    for level in range(1, levels):
        items = [f"*a{level - 1}"] * 10
        body = f"[{', '.join(items)}]" if of == "list" else f"{{{', '.join(map('{}: {}'.format, names, items))}}}"
        lines.append(f"a{level}: &a{level} {body}")
    return "\n".join(lines) + "\n"


def refused(text: str) -> str:
    with pytest.raises(ValueError, match=r".") as caught:
        load_yaml(text)
    return str(caught.value)


def test_plain_values_are_read_with_their_aliases() -> None:
    assert load_yaml("a: &x [1, 0.5, no]\nb: *x\nc: {<<: {d: null}}\nday: 2026-01-01\n") == {
        "a": [1, 0.5, False],
        "b": [1, 0.5, False],
        "c": {"d": None},
        "day": "2026-01-01",
    }


@pytest.mark.parametrize("of", ["list", "map"])
@pytest.mark.parametrize("levels", [6, 9, 40])
def test_an_alias_bomb_is_refused_with_its_line(levels: int, of: str) -> None:
    assert refused(bomb(levels, of=of)) == (
        f"line 5: with its aliases this stands for more than {MAX_VALUES:,} values or 8,388,608 characters"
    )


def test_long_texts_behind_aliases_count_by_their_characters() -> None:
    text = f"a: &a '{'x' * 100_000}'\nb: [{', '.join(['*a'] * 100)}]\n"
    assert refused(text).startswith("line 2: with its aliases")


def test_merge_keys_count_as_well() -> None:
    lines = ["a0: &a0 {k0: 1}"] + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 20)}]}}" for i in range(1, 9)]
    assert "with its aliases" in refused("\n".join(lines))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: &x [*x]\n", "line 2: the alias *x stands within its own anchor"),
        ("a: 1\nb: &x {c: *x}\n", "line 2: the alias *x stands within its own anchor"),
        ("a: *y\n", "is not YAML: line 1: found undefined alias"),
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is there twice"),
        ("a:\n  - {b: 1, b: 2}\n", "line 2: the key 'b' is there twice"),
        (
            "a: !!python/object/apply:os.system [x]\n",
            "line 1: the tag 'tag:yaml.org,2002:python/object/apply:os.system'",
        ),
        ("a: !!binary x\n", "line 1: the tag 'tag:yaml.org,2002:binary'; expected plain values"),
        ("a: 1\nb: !!bool x\n", "is not YAML: line 2: 'x' is no bool"),
        (f"a: {'9' * 5000}\n", "is not YAML: line 1: '99999999"),
        ("a: \x00", "is not YAML: "),
        ("a: [\n", "is not YAML: line 2: "),
        ("a: 1\n---\nb: 2\n", "is not YAML: line 2: but found another document"),
    ],
)
def test_what_is_no_plain_document_is_refused_with_its_line(text: str, problem: str) -> None:
    assert refused(text).startswith(problem)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "- " * 5000 + "x", "? " * 5000])
def test_deep_nesting_is_refused_before_anything_recurses(text: str) -> None:
    # libyaml has a limit of its own for brackets.
    own = f"line 1: more than {MAX_DEPTH} levels of lists and mappings in each other"
    assert refused(text) in (own, "is not YAML: line 1: exceeded maximum nesting depth")


def test_an_enormous_text_is_refused_unread() -> None:
    assert refused("#" * (MAX_TEXT + 1)) == f"has {MAX_TEXT + 1:,} characters, expected at most {MAX_TEXT:,}"
