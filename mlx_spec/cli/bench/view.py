"""Which tables show a benchmark's report, and what stands in them. Measures nothing; draws nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mlx_spec.cli.bench.figures import Spread, WayFigures
from mlx_spec.cli.bench.report import Report
from mlx_spec.cli.bench.runs import AUTO, PLAIN
from mlx_spec.cli.console import count
from mlx_spec.cli.tables import Table, figure, show_figures
from mlx_spec.settings import HYBRID, LOOKUP

_POSITIONS = 8
"""Columns of drafted tokens; more do not fit beside one another."""


def show(report: Report) -> None:
    """Writes the report to stdout."""
    show_figures(list(tables_of(report, report.figures())))


def tables_of(report: Report, figures: Sequence[WayFigures]) -> Iterator[Table]:
    """All that is shown. Plain decoding alone is compared with nothing."""
    yield Table(
        f"{report.heading}\n{_extent(report)}",
        ("WAY", "TOK/S", "RANGE", "TO PLAIN", "RANGE", "TOK/PASS", "ACCEPTED", "GB/S", "OF PEAK"),
        [
            (
                way.way,
                *_spread(way.tokens_per_second, _speed),
                *_spread(way.ratio_to_plain, "{:.2f}".format),
                figure(way.tokens_per_pass, ".2f"),
                figure(way.acceptance_rate, ".0%"),
                _speed(None if way.weights_read_per_second is None else way.weights_read_per_second / 1e9),
                figure(report.share_of_bandwidth(way), ".0%"),
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
            [(way.way, *(figure(_middle(way.ratio_to_plain_by_kind.get(kind)), ".2f") for kind in report.kinds))
             for way in compared],
        )  # fmt: skip
    if others:
        most = min(_POSITIONS, max(len(way.acceptance_by_position) for way in others))
        yield Table(
            "Tokens drafted per pass, passes parked, and how often each drafted token was accepted when reached",
            ("WAY", "DRAFTED", "PARKED", *(str(position + 1) for position in range(most))),
            [(way.way, figure(way.drafted_per_pass, ".2f"), figure(way.parked, ".0%"),
              *(figure(value, ".0%") for value in way.acceptance_by_position[:most]),
              *["-"] * (most - len(way.acceptance_by_position))) for way in others],
        )  # fmt: skip


def _extent(report: Report) -> str:
    repeats = "" if report.repeats == 1 else f", {report.repeats} times each"
    prompts = f"{count(report.prompts, 'prompt')}{repeats}"
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
        notes.append(
            f"Not in the figures: {count(left_out, 'run')} of the prompt at which not every way had its turn.")
    spreads = [way.repeat_spread for way in figures if way.repeat_spread is not None]
    if spreads:
        notes.append(f"Repeats of one prompt lie {max(spreads):.0%} apart: the median of the way that varies most.")
    return notes


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
