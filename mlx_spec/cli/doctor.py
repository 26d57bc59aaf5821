"""`mlx-spec doctor`: a report on this installation that can be pasted in an issue. Shows what `diagnosis` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlx_spec.cli import console
from mlx_spec.cli.options import OUTPUT, option
from mlx_spec.cli.outcome import FAILURE, TracebackOption
from mlx_spec.cli.progress import progress
from mlx_spec.cli.tables import show_table

if TYPE_CHECKING:
    from mlx_spec.cli.diagnosis import Diagnosis

HELP = (
    "Check this installation: versions, memory, and every Metal kernel against plain operations, with timings.\n\n"
    "The report names no person, host or folder, and can be pasted in an issue. Ends with 1 if a kernel is wrong, "
    "which costs speed but no correctness: it is not used then."
)
_BEFORE = "checking and timing {total} things, about a minute"
_WAYS = ("dense", "scattered", "vector", "tile", "gather")


def doctor(
    as_json: Annotated[bool, option("--json", panel=OUTPUT, help="Write one JSON object instead of tables.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Shows the diagnosis; see HELP."""
    from mlx_spec.cli import diagnosis
    from mlx_spec.machine import remembered

    with console.notes(shown=True), progress(instead=_BEFORE) as tell:
        found = diagnosis.diagnose(tell)
    if as_json:
        console.write_json(found.as_dict(), indent=2)
    else:
        _show(found)
    if found.count("failed"):
        if any(kernel.error == diagnosis.ENDED for kernel in found.kernels):
            console.say(
                "note: a kernel that twice ended the program is not run again; to have it checked, remove "
                f"{_without_home(remembered.cache_folder())}kernels.json first."
            )
        raise typer.Exit(FAILURE)


def _without_home(folder: Path | None) -> str:
    """For a shell, and without the name of its user where that is part of it."""
    if folder is None:
        return ""
    home = Path.home()
    return f"~/{folder.relative_to(home)}/" if folder.is_relative_to(home) else f"{folder}/"


def _show(found: Diagnosis) -> None:
    title, *facts = _facts(found)
    show_table(title, facts, long_text=False)
    console.write("\n")
    show_table(["KERNEL", "VARIANTS", "RESULT", ""], _kernels(found))
    if found.timings:
        console.write("\nMilliseconds for one layer's attention; heads are query/kv heads x channels\n")
        show_table([*(way.upper() for way in _WAYS), "FASTEST", "SHAPE"], _timings(found))
    if found.note:
        console.write(f"\n{found.note}\n")


def _facts(found: Diagnosis) -> Iterator[tuple[str, str]]:
    """Names and values for people: sizes in GB."""
    for name, value in found.facts.items():
        if value is None:
            shown = "unknown"
        elif name.endswith("_bytes") and isinstance(value, int):
            shown = console.size(value)
        elif name == "wired_limit_megabytes":
            shown = f"{value} MB" if value else "macOS's own"
        else:
            shown = str(value)
        label = name.removesuffix("_bytes").removesuffix("_megabytes").replace("_", " ")
        yield {"mlx spec": "mlx-spec"}.get(label, label), shown
    for name, version in found.versions.items():
        yield name, version or "not installed"


def _kernels(found: Diagnosis) -> list[list[str]]:
    """A row per kernel and result, and one for each variant that failed."""
    counts = Counter((kernel.kernel, kernel.result) for kernel in found.kernels)
    rows = [[name, str(count), result, ""] for (name, result), count in counts.items()]
    return rows + [[k.variant, "1", k.result, k.error or ""] for k in found.kernels if k.result == "failed"]


def _timings(found: Diagnosis) -> list[list[str]]:
    rows = []
    for timing in found.timings:
        times = timing.milliseconds
        shown = [f"{times[way]:.3f}" if way in times else "-" for way in _WAYS]
        rows.append([*shown, min(times, key=lambda way: times[way]) if times else "-", timing.shape])
    return rows
