"""Draws a benchmark's report as a PNG, with matplotlib. That is an optional dependency; nothing else needs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mlx_spec.cli.bench.report import Report
from mlx_spec.cli.bench.runs import PLAIN
from mlx_spec.errors import BadConfig, MLXSpecError

_SIZE = (11.0, 4.6)
_LABEL_CHARACTERS, _LONGEST_LABEL = 80, 24
"""As many fit beside one another below the left half, and in one label that leans."""


def check_plot(file: str) -> None:
    """Raises BadConfig where `file` could not be drawn: known before anything is measured."""
    path = Path(file)
    if path.suffix.lower() != ".png":
        raise BadConfig(f"--plot is {file!r}; give a file name that ends in .png.")
    try:
        missing = not path.parent.is_dir()
        taken = path.is_dir()
        locked = not os.access(path if path.exists() else path.parent, os.W_OK)
    except (OSError, ValueError):
        missing, taken, locked = True, False, False
    if missing:
        raise BadConfig(f"--plot is {file!r}, and there is no folder {str(path.parent)!r}; make it first.")
    if taken:
        raise BadConfig(f"--plot is {file!r}, which is a folder; give the name of a file.")
    if locked:
        raise BadConfig(f"--plot is {file!r}, which may not be written; choose another folder or name.")
    _figure_class()


def draw(report: Report, file: str) -> bool:
    """Write the plot: speed relative to plain decoding by kind, and acceptance by position.

    False if no way was measured beside plain decoding, so that there is nothing to draw. Raises MLXSpecError if the
    file cannot be written.
    """
    ways = [figures for figures in report.figures() if figures.way != PLAIN and figures.ratio_to_plain is not None]
    if not ways:
        return False
    figure = _figure_class()(figsize=_SIZE, layout="constrained")
    speed, acceptance = figure.subplots(1, 2, width_ratios=(3, 2))
    kinds = report.kinds
    width = 0.8 / len(ways)
    for index, way in enumerate(ways):
        assert way.ratio_to_plain is not None
        spreads = [way.ratio_to_plain, *(way.ratio_to_plain_by_kind.get(kind) for kind in kinds)]
        bars = [
            (place + (index - (len(ways) - 1) / 2) * width, spread)
            for place, spread in enumerate(spreads)
            if spread is not None
        ]
        middles = [spread.middle for _, spread in bars]
        whiskers = (
            [spread.middle - spread.least for _, spread in bars],
            [spread.most - spread.middle for _, spread in bars],
        )
        colour = f"C{index}"
        speed.bar([place for place, _ in bars], middles, width, color=colour, label=way.way, yerr=whiskers,
                  error_kw={"elinewidth": 0.8, "ecolor": "0.3"})  # fmt: skip
        positions = range(1, len(way.acceptance_by_position) + 1)
        if positions:
            acceptance.plot(positions, way.acceptance_by_position, "o-", color=colour, label=way.way, markersize=4)
    speed.axhline(1, color="0.2", linewidth=0.8, linestyle=":")
    labels = ["all", *(kind if len(kind) <= _LONGEST_LABEL else f"{kind[: _LONGEST_LABEL - 1]}…" for kind in kinds)]
    crowded = max(map(len, labels)) * len(labels) > _LABEL_CHARACTERS
    speed.set_xticks(range(len(labels)), labels, **({"rotation": 25, "ha": "right"} if crowded else {}))
    speed.set(ylabel="decoding speed relative to plain", title="Speed (lines: slowest to fastest prompt)")
    acceptance.set(
        xlabel="drafted token of a pass",
        ylabel="accepted, of those reached",
        title="Acceptance",
        ylim=(0, 1.02),
        xlim=(0.5, max(2, *(len(way.acceptance_by_position) for way in ways)) + 0.5),  # one token's axis would be 0.98
    )
    acceptance.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside lower center", ncols=8, fontsize="small")
    figure.suptitle(report.heading if report.complete else f"{report.heading} (incomplete)", fontsize="medium")
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise MLXSpecError(f"cannot write the plot {file!r}: {error.strerror or error}; check --plot.") from error
    return True


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadConfig(
            "--plot needs matplotlib, which is not installed: pip install 'mlx-spec[plot]', or leave --plot out."
        ) from error
    return Figure
