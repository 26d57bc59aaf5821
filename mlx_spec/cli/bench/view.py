"""How a benchmark's report is shown: tables drawn by rich on a terminal, aligned text elsewhere. Measures nothing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from mlx_spec.cli import console
from mlx_spec.cli.bench.figures import Spread, WayFigures
from mlx_spec.cli.bench.report import Report
from mlx_spec.cli.bench.runs import AUTO, PLAIN
from mlx_spec.settings import HYBRID, LOOKUP

_POSITIONS = 8
"""Columns of drafted tokens; more do not fit beside one another."""


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """The first cell names the row."""
    notes: Sequence[str] = ()


def show(report: Report) -> None:
    """Writes the report to stdout."""
    tables = list(tables_of(report, report.figures()))
    if console.is_plain(sys.stdout):
        console.write("\n".join(_as_text(table) for table in tables))
    else:
        console.write(_drawn(tables))


def tables_of(report: Report, figures: Sequence[WayFigures]) -> Iterator[Table]:
    """All that is shown. Plain decoding alone is compared with nothing."""
    yield Table(
        f"{report.heading}\n{_extent(report)}",
        ("WAY", "TOK/S", "RANGE", "TO PLAIN", "RANGE", "TOK/PASS", "ACCEPTED", "GB/S", "OF PEAK"),
        [
            (
                way.way,
                *_spread(way.tokens_per_second, _speed),
                *_spread(way.ratio_to_plain, _ratio),
                _ratio(way.tokens_per_pass),
                _share(way.acceptance_rate),
                _speed(None if way.weights_read_per_second is None else way.weights_read_per_second / 1e9),
                _share(report.share_of_bandwidth(way)),
            )
            for way in figures
        ],
        _notes(report, figures),
    )
    others = [way for way in figures if way.way != PLAIN]
    compared = [way for way in others if way.ratio_to_plain_by_kind]
    if compared and len(report.kinds) > 1:
        yield Table(
            "Speed relative to plain decoding, by kind of prompt",
            ("WAY", *report.kinds),
            [(way.way, *(_ratio(_middle(way.ratio_to_plain_by_kind.get(kind))) for kind in report.kinds))
             for way in compared],
        )  # fmt: skip
    if others:
        most = min(_POSITIONS, max(len(way.acceptance_by_position) for way in others))
        yield Table(
            "Tokens drafted per pass, passes parked, and how often each drafted token was accepted when reached",
            ("WAY", "DRAFTED", "PARKED", *(str(position + 1) for position in range(most))),
            [(way.way, _ratio(way.drafted_per_pass), _share(way.parked),
              *(_share(value) for value in way.acceptance_by_position[:most]),
              *["-"] * (most - len(way.acceptance_by_position))) for way in others],
        )  # fmt: skip


def _extent(report: Report) -> str:
    repeats = "" if report.repeats == 1 else f", {report.repeats} times each"
    prompts = f"{report.prompts} prompt{'' if report.prompts == 1 else 's'}{repeats}"
    if report.complete:
        return prompts
    return f"INCOMPLETE: {len(report.runs)} of {report.planned_runs} runs ({prompts})"


def _notes(report: Report, figures: Sequence[WayFigures]) -> list[str]:
    notes = []
    if any(way.way == HYBRID for way in figures):
        notes.append(f"{AUTO}, {LOOKUP} and {HYBRID} choose for each pass how many tokens are drafted, by the draft "
                     f"model, by lookup, or by whichever is better, as `generate` does by itself.")  # fmt: skip
    notes += [
        "TOK/S: median over runs. TO PLAIN: geometric mean over prompts, each beside its plain run.",
        "GB/S: weights read while decoding. OF PEAK: the share of the "
        f"{_speed(report.bandwidth.bytes_per_second / 1e9)} GB/s that memory delivers here, "
        f"measured by {report.bandwidth.how}.",
    ]
    if left_out := len(report.runs) - sum(way.runs for way in figures):
        runs = "1 run" if left_out == 1 else f"{left_out} runs"
        notes.append(f"Not in the figures: {runs} of the prompt at which not every way had its turn.")
    spreads = [way.repeat_spread for way in figures if way.repeat_spread is not None]
    if spreads:
        notes.append(f"Repeats of one prompt lie {max(spreads):.0%} apart: the median of the way that varies most.")
    return notes


def _as_text(table: Table) -> str:
    widths = [max(len(line[index]) for line in (table.columns, *table.rows)) for index in range(len(table.columns))]
    aligned = [
        [cell.rjust(width) if index else cell for index, (cell, width) in enumerate(zip(line, widths, strict=True))]
        for line in (table.columns, *table.rows)
    ]
    notes = "".join(f"{console.wrapped(note)}\n" for note in table.notes)
    return f"{_title(table)}\n{console.plain_table(aligned[0], aligned[1:])}{notes}"


def _title(table: Table) -> str:
    return "\n".join(console.wrapped(line) for line in table.title.splitlines())


def _drawn(tables: Sequence[Table]) -> str:
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
            screen.print(Text(_title(table), "bold"))
            screen.print(drawn)
            for note in table.notes:
                screen.print(Text(console.wrapped(note), "dim"))
            if table.notes:
                screen.print()
    return captured.get()


def _middle(spread: Spread | None) -> float | None:
    return None if spread is None else spread.middle


def _spread(spread: Spread | None, shown: Callable[[float], str]) -> tuple[str, str]:
    if spread is None:
        return "-", "-"
    return shown(spread.middle), f"{shown(spread.least)}-{shown(spread.most)}"


def _speed(value: float | None) -> str:
    """Three figures."""
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
