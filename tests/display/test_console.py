"""Our console: its styles act on a terminal, the texts that it is given do not."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.padding import Padding
from rich.progress import TextColumn as BarText
from rich.text import Text

from mock_scheduler.display.console import Console, ProgressBar, printable_text
from mock_scheduler.display.terminal import (
    TextColumn,
    print_labelled,
    print_lines,
    print_table,
    print_wrapped,
    show_progress,
)

EVIL = "\x1b[31m\x9b1m\u202e\ud800\n[red]x[/red] :smile:"
SHOWN = r"\x1b[31m\x9b1m\u202e\ud800\n[red]x[/red] :smile:"
_OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]|\r|\x1b\[[12][AK]")


def printed(*objects: object, is_terminal: bool = False) -> str:
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=is_terminal)
    for item in objects:
        console.print(item)
    return output.getvalue()


@pytest.mark.parametrize("made", [EVIL, Text(EVIL), Text.assemble(("a", "red"), EVIL), Padding(Text(EVIL), (0, 1))])
def test_a_text_is_one_printable_line(made: object) -> None:
    assert printed(made).strip().removeprefix("a") == SHOWN
    assert printed(made).count("\n") == 1


@pytest.mark.parametrize("made", [EVIL, Text(EVIL, "bold red")])
def test_on_a_terminal_only_our_own_styles_act(made: object) -> None:
    text = printed(made, is_terminal=True)
    assert "\x1b" in text
    assert _OWN.sub("", text).rstrip() == SHOWN


def test_a_text_of_several_lines_keeps_them_and_nothing_else_acts() -> None:
    output = io.StringIO()
    console = Console(file=output, width=10)
    print_lines(console, "")
    print_lines(console, "names what is used now:\n  - [red]\x1b[31m")
    assert output.getvalue() == "names what is used now:\n  - [red]\\x1b[31m\n"


def test_styles_stay_where_they_are() -> None:
    text = printable_text(Text.assemble("a\x1b", ("b\n", "red"), "c"))
    assert text.plain == "a\\x1bb\\nc"
    assert {text.plain[span.start : span.end] for span in text.spans if span.style == "red"} == {"b", "\\n"}


def test_tables_labels_and_wrapped_texts_are_printable() -> None:
    output = io.StringIO()
    console = Console(file=output, width=300)
    print_table([TextColumn(header="one\ntwo", cells=[EVIL, Text(EVIL)], justify="left")], console)
    print_labelled(console, [(EVIL, EVIL)])
    print_wrapped(console, Text(EVIL))
    lines = output.getvalue().split("\n")
    assert [line.strip() for line in lines] == ["one", "two", SHOWN, SHOWN, f"{SHOWN}  {SHOWN}", SHOWN, ""]


def test_progress_and_status_read_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    console = Console(file=output, width=300, force_terminal=True)
    with show_progress(EVIL, console=console, delay_s=0) as update:
        update(1, 2)
    with console.status(EVIL):
        pass
    assert _OWN.sub("", output.getvalue()).count(SHOWN) == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", _OWN.sub("", output.getvalue()))


def test_what_is_printed_above_a_bar_is_printable() -> None:
    output = io.StringIO()
    bar = ProgressBar(BarText("bar", markup=False), console=Console(file=output, width=300, force_terminal=True))
    with bar:
        print(f"\x1b[31mfake\x1b]8;;http://x\x1b\\\nmore")  # noqa: F541
        sys.stderr.write("\x9b1m\n")
    text = _OWN.sub("", output.getvalue())
    assert r"\x1b[31mfake\x1b]8;;http://x\x1b\ "[:-1] in text
    assert "\nmore" in text
    assert r"\x9b1m" in text
    assert "\x1b" not in text
