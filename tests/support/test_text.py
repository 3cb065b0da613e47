"""Counts, sizes and lists read as people write them."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from mock_scheduler.support.text import bullet_list, count_of, format_bytes, join_words, list_some, shorten


@pytest.mark.parametrize(
    ("count", "plural", "text"),
    [(0, None, "0 rows"), (1, None, "1 row"), (12_800, None, "12,800 rows"), (2, "rös", "2 rös")],
)
def test_a_count_has_its_noun(count: int, plural: str | None, text: str) -> None:
    assert count_of(count, "row", plural) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KiB"),
        (1434, "1.4 KiB"),
        (300 << 30, "300 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_a_size_has_up_to_three_digits(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_a_text_is_cut_to_its_width() -> None:
    assert [shorten("abcde", width) for width in (6, 5, 4)] == ["abcde", "abcde", "abc…"]


def test_a_list_says_how_many_it_leaves_out() -> None:
    assert list_some([], 2) == ""
    assert list_some(["a", "b"], 2) == "a; b"
    assert list_some(["a", "b", "c"], 2, ", ") == "a, b, and 1 more"


def test_problems_stand_on_lines_of_their_own() -> None:
    assert bullet_list([]) == ""
    assert bullet_list(["a", "b", "c"], 2) == "\n  - a\n  - b\n  - and 1 more"
    assert bullet_list([str(number) for number in range(21)]).endswith("\n  - 19\n  - and 1 more")
    assert bullet_list([str(number) for number in range(21)], limit=None).endswith("\n  - 19\n  - 20")


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("max_steps=2", "max_steps=2"),
        ("a b", "'a b'"),
        ("trace.kinds=[score]", "'trace.kinds=[score]'"),
        ("align.baseline=['seed=7']", "\"align.baseline=['seed=7']\""),
        ("x='it\\'s'", "\"x='it\\'s'\""),
        ("it's $HOME", "'it'\"'\"'s $HOME'"),
        ("it's ${x}", "'it'\"'\"'s ${x}'"),
        ("it's `date`", "'it'\"'\"'s `date`'"),
        ("it's!", "'it'\"'\"'s!'"),
        ("it's \\\\", "'it'\"'\"'s \\\\'"),
        ("it's \\", "'it'\"'\"'s \\'"),
        ("'a\"b'", "''\"'\"'a\"b'\"'\"''"),
    ],
)
def test_a_word_has_the_quotes_that_read_best_and_the_shell_reads_it_back(word: str, quoted: str) -> None:
    """Overrides with quotes in them were printed as '...'"'"'...', which nobody reads."""
    assert join_words(["run", word]) == f"run {quoted}"
    assert shlex.split(quoted) == [word]
    printed = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True, check=True)
    assert printed.stdout == word
