"""Foreign text is shown, not obeyed: every character that acts, hides or moves is written out."""

from __future__ import annotations

import pytest

from mock_scheduler.support.text import MAX_LINES, is_hostile, printable, printable_lines, printable_message


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\tc\rd", r"a\nb\tc\rd"),
        ("\x00\x07\x7f", r"\x00\x07\x7f"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("a\u202etxt.exe", r"a\u202etxt.exe"),
        ("\u2066\u2069\u200e\u200f\u061c", r"\u2066\u2069\u200e\u200f\u061c"),
        ("\u200b\u200d\u2060\ufeff\u00ad", r"\u200b\u200d\u2060\ufeff\xad"),
        ("\u2028\u2029", r"\u2028\u2029"),
        ("\ud800\udcff", r"\ud800\udcff"),
        ("\ue000\U0010fffd\U000e0041", r"\ue000\U0010fffd\U000e0041"),
        ("\u3164\ufe0f\u115f\U000e0100", r"\u3164\ufe0f\u115f\U000e0100"),
    ],
)
def test_characters_that_act_or_hide_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


@pytest.mark.parametrize(
    "text", ["", "a name-1.x [y]", "Grüße", "漢字かな", "العربية", "हिन्दी", "a\u00a0b\u3000c", "e\u0301", "😀"]
)
def test_letters_marks_and_signs_of_every_language_stay(text: str) -> None:
    assert printable(text) == text


def test_an_enormous_text_is_cut() -> None:
    assert printable("A" * 5000, limit=10) == "A" * 9 + "…"
    assert printable("\x1b" * 5000, limit=10) == r"\x1b\x1b\…"


def test_lines_keep_their_breaks_alone() -> None:
    assert printable_lines("a\n\x1bb\r\n") == "a\n\\x1bb\\r\n"


def test_only_the_first_line_of_a_message_begins_a_line() -> None:
    assert printable_message("error: 'x\nall is well'") == "error: 'x\n  all is well'"
    assert printable_message("error:\n  - one\n  - two\n") == "error:\n  - one\n  - two"
    assert printable_message("write\nenvs:\n  A: 1") == "write\n  envs:\n    A: 1"
    assert printable_message("\n" * (MAX_LINES + 5) + "x").endswith("\n  and 6 more lines")


def test_no_control_is_ever_printable() -> None:
    assert all(
        map(is_hostile, map(chr, [*range(32), *range(127, 160), *range(0x2028, 0x202F), *range(0x2066, 0x206A)]))
    )
