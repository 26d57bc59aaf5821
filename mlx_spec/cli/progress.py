"""What is being done and how far it has come, drawn on stderr. Knows a terminal; no command, and nothing of models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from mlx_spec.cli import console

Progress = Callable[[str, int, int], None]
"""Is told what comes next, and how many of how many are done: of 0 where nobody knows how many."""


def untold(what: str, done: int, total: int) -> None:
    """The progress of those who ask for none."""


@contextlib.contextmanager
def progress(first: str = "", *, shown: bool = True, instead: str = "") -> Iterator[Progress]:
    """While this lasts, what it is told is drawn: a bar with the time left, or a spinner where there is no total. It
    clears itself once all is done and at the end, but stays where the program is ended from outside, and so says where.

    first: what is shown from the start. instead: the line that is said where nothing can be drawn, with {total} in it,
    when the first of them comes.
    """
    if not shown or console.is_plain(sys.stderr):

        def say(what: str, done: int, total: int) -> None:
            if shown and instead and done == 0:
                console.say(instead.format(total=total))

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Drawn
    from rich.progress import TimeRemainingColumn as TimeLeft

    text = TextColumn("{task.description}", markup=False)
    spinner: tuple[ProgressColumn, ...] = (SpinnerColumn(), text)
    bar = (BarColumn(20), MofNCompleteColumn(), TimeLeft(), text)
    drawn = Drawn(*spinner, console=Console(stderr=True, highlight=False), transient=True)
    task = drawn.add_task(first, total=None)

    def tell(what: str, done: int, total: int) -> None:
        drawn.columns = bar if total else spinner
        drawn.update(task, description=what, completed=done, total=total or None)
        if total and done >= total:
            drawn.stop()
        else:
            drawn.start()
            drawn.refresh()

    try:
        if first:
            tell(first, 0, 0)
        yield tell
    finally:
        drawn.stop()
