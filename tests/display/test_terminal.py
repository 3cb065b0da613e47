"""Tables on the terminal: what goes first where it is narrow, and that nothing is cut off."""

from __future__ import annotations

import pytest
from rich.text import Text

from mock_scheduler.display.terminal import FittedTable, TextColumn, print_table
from tests.report.recordings import make_console

COLUMNS = [
    TextColumn(header="step", cells=["0", "10"]),
    TextColumn(header="mean\nreward", cells=["0.5", "-"], drop_order=1),
    TextColumn(header="stale", cells=["0..2", "0"], drop_order=2),
    TextColumn(header="age", cells=["1", "2"], drop_order=2),
    TextColumn(header="size", cells=["1 KiB", "20 KiB"]),
]


def lines_of(width: int, columns: list[TextColumn]) -> list[str]:
    console, text = make_console(width)
    print_table(columns, console)
    return text.getvalue().splitlines()


def test_columns_stand_side_by_side_on_one_base_line() -> None:
    assert lines_of(80, COLUMNS) == [
        "          mean",
        "  step  reward  stale  age    size",
        "     0     0.5   0..2    1   1 KiB",
        "    10       -      0    2  20 KiB",
    ]


@pytest.mark.parametrize(
    ("width", "header"),
    [
        (34, "  step  reward  stale  age    size"),
        (33, "  step reward stale age   size"),
        (30, "  step reward stale age   size"),
        (29, "  step reward stale   size"),
        (25, "  step reward   size"),
        (20, "  step reward   size"),
        (19, "  step   size"),
        (12, "  step"),
        (3, "  s"),
    ],
)
def test_gaps_shrink_first_and_then_columns_go_the_first_never(width: int, header: str) -> None:
    lines = lines_of(width, COLUMNS)
    assert next(line for line in lines if line.lstrip().startswith("s")) == header
    assert all(line == line.rstrip() and len(line) <= width for line in lines)


def test_a_column_folds_down_to_its_least_width_before_another_goes() -> None:
    columns = [
        TextColumn(header="name", cells=["a" * 12 + "b" * 8], least_width=12, justify="left"),
        TextColumn(header="verdict", cells=[Text("diverged", "red")]),
        TextColumn(header="ratio", cells=["9×"], drop_order=1),
    ]
    assert lines_of(34, columns) == [
        "  name              verdict  ratio",
        "  aaaaaaaaaaaabbb  diverged     9×",
        "  bbbbb",
    ]
    narrow = lines_of(20, columns)
    assert "ratio" not in narrow[0]
    assert "".join(line[2:11].strip() for line in narrow[1:]) == "a" * 12 + "b" * 8


def test_lines_can_stand_between_rows_and_brackets_are_no_markup() -> None:
    console, text = make_console(40)
    table = FittedTable([TextColumn(header="name", cells=["[red]x[/]", "y"], justify="left")], console, indent=1)
    table.print_header()
    table.print_row(0)
    console.print("between")
    table.print_row(1, "bold")
    assert text.getvalue() == " name\n [red]x[/]\nbetween\n y\n"
