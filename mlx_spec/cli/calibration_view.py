"""What `mlx-spec calibrate` shows: tables of measured times, the curve of V, and what speedup follows from them. Knows
calibrations and text; measures nothing."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mlx_spec.cli import console
from mlx_spec.cli.tables import figure, show_table, wrapped

if TYPE_CHECKING:
    from mlx_spec.calibration.calibrations import Calibration, LeftOut
    from mlx_spec.decoding.schedule.costs import Costs

ACCEPTANCE_RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
_HEIGHT = 10
_STEP = 4
_MARKS = "ox+*#%"
_STYLES = ("green", "yellow", "cyan", "magenta", "blue", "red")
_IDEAL = "-"


@dataclass
class Measured:
    """What one run of the command found; grows with each length."""

    machine: str
    model: str
    draft: str | None
    kv: dict[str, Any]
    filters: dict[str, float]
    """Those of sampling that passes were measured with."""
    calibrations: list[Calibration] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    complete: bool = False

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "calibrations": [_as_dict(calibration) for calibration in self.calibrations],
            "left_out": [asdict(left) for left in self.left_out],
        }


def best(costs: Costs, acceptance: float, draft: float) -> tuple[int, float]:
    """K with the largest speedup, each draft accepted with probability `acceptance` if those before it were and costing
    `draft` single-row passes; and that speedup. 0 and 1 where drafting does not pay."""
    speedups = [1.0, *costs.speedups([acceptance**k for k in range(1, costs.most_rows)], draft)]
    k = max(range(len(speedups)), key=speedups.__getitem__)
    return k, speedups[k]


def _as_dict(calibration: Calibration) -> dict[str, Any]:
    costs = calibration.costs()
    c = _c(calibration)
    return {
        "context_length": calibration.context_length,
        "target": [{"rows": rows, "seconds": seconds, "V": costs.verify(rows)} for rows, seconds in calibration.target],
        "draft_lazily": calibration.draft_lazily,
        "draft_synchronised": calibration.draft_synchronised,
        "draft_row": calibration.draft_row,
        "chains_lazily": calibration.chains_lazily,
        "c": c,
        "computed": [
            dict(zip(("acceptance_rate", "draft_tokens", "speedup"), (rate, *best(costs, rate, c or 0.0)), strict=True))
            for rate in ACCEPTANCE_RATES
        ],
        "measured_at": calibration.measured_at,
    }


def _c(calibration: Calibration) -> float | None:
    """A draft step in single-row passes of the target."""
    return None if calibration.draft_step is None else calibration.costs().draft


def show(found: Measured) -> None:
    """Writes all of it to stdout."""
    measured = found.calibrations
    # One that cannot take tokens back is not measured, as a note says.
    drafts = found.draft is not None and (not measured or _by_model(measured))
    pair = f"{found.model} with {found.draft} as draft" if drafts else found.model
    filters = "".join(f", {name} {value:g}" for name, value in found.filters.items())
    console.write(f"{pair} on {found.machine}{filters}\n")
    console.write("\n" if found.complete else "INCOMPLETE: longer texts are missing\n\n")
    if measured:
        _show_passes(measured)
        if drafts:
            _show_draft(measured)
        console.write("\nV over rows, ideally 1\n")
        _show_curve(measured)
        _show_computed(measured)
    for left in found.left_out:
        console.write(f"\n{wrapped(f'{left.context_length} tokens and more are left out: {left.reason}')}\n")


def _show_passes(measured: Sequence[Calibration]) -> None:
    heading = "A target pass over M rows, by tokens in context: milliseconds, and V, relative to one row, never falling"
    console.write(f"{wrapped(heading)}\n")
    columns = ["ROWS"]
    for calibration in measured:
        columns += [f"AT {calibration.context_length}", "V"]
    rows = []
    for count in sorted({count for calibration in measured for count, _ in calibration.target}):
        row = [str(count)]
        for calibration in measured:
            seconds = dict(calibration.target).get(count)
            row += ["-", "-"] if seconds is None else [_ms(seconds), f"{calibration.costs().verify(count):.2f}"]
        rows.append(row)
    show_table(columns, rows, long_text=False)


def _show_draft(measured: Sequence[Calibration]) -> None:
    console.write("\n")
    rows = [
        ["a step, each on the one in flight", *(_ms(calibration.draft_lazily) for calibration in measured)],
        ["a step, each token waited for", *(_ms(calibration.draft_synchronised) for calibration in measured)],
        ["one more row when catching up", *(_ms(calibration.draft_row) for calibration in measured)],
        ["c, the better step in passes", *(figure(_c(calibration), ".3g") for calibration in measured)],
    ]
    show_table(["DRAFT", *(f"AT {each.context_length}" for each in measured)], rows, long_text=False)


def _show_computed(measured: Sequence[Calibration]) -> None:
    drafts = "by the draft model" if _by_model(measured) else "that cost nothing, as by lookup"
    heading = f"Computed from these costs, not measured: best K and speedup over plain decoding, for drafts {drafts}"
    console.write(f"\n{wrapped(heading)}\n")
    columns = ["ACCEPTED"]
    for calibration in measured:
        columns += [f"K AT {calibration.context_length}", "SPEEDUP"]
    rows = []
    for rate in ACCEPTANCE_RATES:
        row = [f"{rate:.0%}"]
        for calibration in measured:
            k, gain = best(calibration.costs(), rate, _c(calibration) or 0.0)
            row += [str(k), f"{gain:.2f}"]
        rows.append(row)
    show_table(columns, rows, long_text=False)


def _by_model(measured: Sequence[Calibration]) -> bool:
    return any(calibration.draft_step is not None for calibration in measured)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _show_curve(measured: Sequence[Calibration]) -> None:
    lines = curve([[(rows, each.costs().verify(rows)) for rows, _ in each.target] for each in measured])
    legend = [f"{_MARKS[index]} {each.context_length} tokens" for index, each in enumerate(measured)]
    lines.append(f"{'':7}{', '.join([*legend, f'{_IDEAL} ideal'])}")
    if console.is_plain(sys.stdout):
        console.write("".join(line.rstrip() + "\n" for line in lines))
        return
    from rich.console import Console
    from rich.text import Text

    drawn = Console(highlight=False)
    with drawn.capture() as captured:
        for line in lines:
            text = Text(line)
            for mark in re.finditer(rf"(?<!\S)[{re.escape(_MARKS[: len(measured)])}](?!\S)", line):
                text.stylize(f"bold {_STYLES[_MARKS.index(mark[0])]}", *mark.span())
            drawn.print(text, soft_wrap=True)
    console.write(captured.get())


def curve(curves: Sequence[Sequence[tuple[int, float]]]) -> list[str]:
    """Points (rows, V) of up to six curves as lines of text, V upwards from 1, where the ideal line is."""
    most = max(value for points in curves for _, value in points)
    top = max(2.0, most)
    widest = max(rows for points in curves for rows, _ in points)
    cells = [[" "] * (widest * _STEP + 1) for _ in range(_HEIGHT + 1)]
    cells[0] = [_IDEAL] * len(cells[0])
    # From the last to the first, which so stays on top where two meet.
    for mark, points in reversed(list(zip(_MARKS, curves, strict=False))):
        for rows, value in points:
            cells[round((value - 1) / (top - 1) * _HEIGHT)][rows * _STEP - 1] = mark
    lines = []
    for level in range(_HEIGHT, -1, -1):
        label = f"{1 + (top - 1) * level / _HEIGHT:.1f}" if level % 2 == 0 else ""
        lines.append(f"{label:>5} |{''.join(cells[level])}")
    axis = "".join(f"{rows:>{_STEP}}" for rows in range(1, widest + 1))
    lines.append(f"{'':5} +{_IDEAL * (widest * _STEP + 1)}")
    lines.append(f"{'':7}{axis}  rows")
    return lines
