"""Tables on stdout: drawn by rich on a terminal, aligned text elsewhere. Knows strings; not what they say."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_spec.cli.console import is_plain, write

_WIDEST = 100
"""Columns of prose."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, long_text: bool = True) -> None:
    """Show a table, cells to the left. long_text: the last column holds long text, perhaps several lines.

    On a terminal that stands below its row, since an ordinary window has no room beside it. In plain text each
    row is one line, for grep.
    """
    if is_plain(sys.stdout):
        write(aligned(columns, rows))
        return
    from rich.console import Console
    from rich.text import Text

    beside = len(columns) - long_text
    heading, *lines = aligned(columns[:beside], [row[:beside] for row in rows]).splitlines()
    screen = Console(highlight=False)
    with screen.capture() as captured:
        screen.print(Text(heading, "bold"))
        for line, row in zip(lines, rows, strict=True):
            screen.print(Text(line))
            for below in "\n".join(row[beside:]).splitlines():
                screen.print(Text(f"  {below}", "dim"))
    write(captured.get())


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], *, figures: bool = False) -> str:
    """Text, one row a line; the lines of a cell are joined by ` + `. figures: all but the first column to the right."""
    lines = [[*columns], *([" + ".join(cell.splitlines()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        [cell.rjust(width) if figures and index else cell.ljust(width)
         for index, (cell, width) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    )  # fmt: skip
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)


def wrapped(text: str) -> str:
    """Prose for stdout, broken between words: to the width of its terminal, but never wider than can be read well."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = min(_WIDEST, shutil.get_terminal_size().columns if terminal else _WIDEST)
    return textwrap.fill(text, max(1, width), break_long_words=False, break_on_hyphens=False)


def figure(value: float | None, form: str) -> str:
    """A figure in a form such as ".2f", or what stands where there is none."""
    return "-" if value is None else format(value, form)


@dataclass(frozen=True)
class Table:
    """A table of figures, between a title and notes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell names the row."""
    notes: Sequence[str] = ()

    @property
    def heading(self) -> str:
        return "\n".join(wrapped(line) for line in self.title.splitlines())


def show_figures(tables: Sequence[Table]) -> None:
    """Show them one below the other."""
    if is_plain(sys.stdout):
        write("\n".join(
            f"{table.heading}\n{aligned(table.columns, table.rows, figures=True)}"
            + "".join(f"{wrapped(note)}\n" for note in table.notes)
            for table in tables
        ))  # fmt: skip
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Drawn
    from rich.text import Text

    # In a narrow window the terminal breaks lines; rich would cut figures off.
    screen = Console(highlight=False, width=max(shutil.get_terminal_size().columns, 120))
    with screen.capture() as captured:
        for table in tables:
            drawn = Drawn(box=SIMPLE_HEAD, header_style="bold", padding=(0, 1, 0, 0))
            for index, column in enumerate(table.columns):
                drawn.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
            for row in table.rows:
                drawn.add_row(*(Text(cell) for cell in row))
            screen.print(Text(table.heading, "bold"))
            screen.print(drawn)
            for note in table.notes:
                screen.print(Text(wrapped(note), "dim"))
            if table.notes:
                screen.print()
    write(captured.get())
