"""Whatever Python prints in a guarded process is printable: prints, warnings, log messages, tracebacks."""

from __future__ import annotations

import io
import logging
import sys
import warnings

import pytest
from rich.console import Console as RichConsole

from mock_scheduler.support.terminal_streams import (
    GuardedStream,
    MessageHandler,
    guarded_terminal,
    print_message,
    print_output,
)

EVIL = "\x1b[2J\x9b1m\u202e\ud800"
SHOWN = r"\x1b[2J\x9b1m\u202e\ud800"


def test_prints_of_other_code_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_terminal():
        print(f"{EVIL}\nnext")
        sys.stderr.write(f"{EVIL}\n")
    printed = capsys.readouterr()
    assert printed.out == f"{SHOWN}\nnext\n"
    assert printed.err == f"{SHOWN}\n"


def test_streams_warnings_and_log_messages_are_as_before_afterwards() -> None:
    before = sys.stdout, sys.stderr, warnings.showwarning, logging.lastResort
    with guarded_terminal(), guarded_terminal():
        assert isinstance(sys.stdout, GuardedStream)
        assert not isinstance(sys.stdout.rich_proxied_file, GuardedStream)
    assert before == (sys.stdout, sys.stderr, warnings.showwarning, logging.lastResort)


def test_a_warning_begins_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_terminal():
        warnings.showwarning(UserWarning(f"{EVIL}\nall is well"), UserWarning, "file.py", 3)
    assert capsys.readouterr().err == f"file.py:3: UserWarning: {SHOWN}\n  all is well\n"


def test_a_log_message_begins_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.Logger("own")
    logger.addHandler(MessageHandler())
    logger.warning("%s\nall is well", EVIL)
    assert capsys.readouterr().err == f"{SHOWN}\n  all is well\n"


def test_messages_and_output_need_no_guard(capsys: pytest.CaptureFixture[str]) -> None:
    print_message(f"{EVIL}\nall is well")
    print_output(f"{EVIL}\nnext")
    printed = capsys.readouterr()
    assert (printed.err, printed.out) == (f"{SHOWN}\n  all is well\n", f"{SHOWN}\nnext\n")


def test_a_closed_stream_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """``mock-scheduler config NAME >&-`` ended in an AttributeError."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with guarded_terminal():
        print("x")
        print_message("x")
        print_output("x")


def test_a_stream_of_another_encoding_gets_what_it_can_hold() -> None:
    raw = io.BytesIO()
    stream = GuardedStream(io.TextIOWrapper(raw, encoding="ascii"))  # type: ignore[arg-type]
    stream.write("é\n")
    stream.flush()
    assert raw.getvalue() == b"\\xe9\n"


def test_a_rich_console_keeps_its_colours(capsys: pytest.CaptureFixture[str]) -> None:
    with guarded_terminal():
        RichConsole(force_terminal=True, color_system="standard").print("[red]x[/red]")
    assert capsys.readouterr().out == "\x1b[31mx\x1b[0m\n"
