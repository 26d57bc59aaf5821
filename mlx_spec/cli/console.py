"""What a person sees in the terminal: the answer on stdout, everything else on stderr.

Plain text when stderr is not a terminal or NO_COLOR is set. Knows figures and strings; runs no model.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from mlx_spec.settings import NO_DRAFTER

if TYPE_CHECKING:
    from rich.console import Console

    from mlx_spec.llm.statistics import Statistics

PrefillProgress = Callable[[int, int], None]
_WIDEST = 100
"""Columns of prose."""


class ClosedPipeError(Exception):
    """The reader of stdout or stderr went away, as `head` does."""


class OutputError(Exception):
    """The answer cannot be written, for instance to a full disk."""


def write(text: str) -> None:
    """Writes a part of the answer to stdout, at once. Raises ClosedPipeError or OutputError."""
    _write(sys.stdout, text, "standard output")


def say(line: str) -> None:
    """Writes one line to stderr, above whatever is being drawn there."""
    say_block(" ".join(line.splitlines()) + "\n")


def say_block(text: str) -> None:
    """Writes lines, such as a traceback, to stderr. Where that cannot be written, the answer is worth more."""
    try:
        _write(sys.stderr, text, "standard error")
    except (ClosedPipeError, OutputError):
        _abandon(sys.stderr)


def write_json(value: Any, *, indent: int | None = None) -> None:
    """Writes a value as JSON to stdout, in ASCII where stdout's encoding lacks a character of it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent)
    write(text + "\n")


def _write(stream: TextIO | None, text: str, name: str) -> None:
    if stream is None:
        raise OutputError(f"{name} is closed.")
    try:
        stream.write(text)
        stream.flush()
    except UnicodeEncodeError:
        # A terminal of another encoding: better a question mark than no answer.
        _write(stream, text.encode(stream.encoding, "replace").decode(stream.encoding), name)
    except BrokenPipeError as error:
        raise ClosedPipeError(name) from error
    except OSError as error:
        raise OutputError(f"cannot write to {name}: {error.strerror or error}.") from error


def leave_interrupted_line() -> None:
    """Puts the shell's prompt on a line of its own: a terminal shows ^C where the cursor was."""
    terminal = next((stream for stream in (sys.stderr, sys.stdout) if stream and stream.isatty()), None)
    if terminal:
        _write(terminal, "\n", "the terminal")


def abandon_output() -> None:
    """Lets go of what stdout and stderr still hold, so that Python's last flush does not fail once more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _abandon(stream)


def _abandon(stream: TextIO | None) -> None:
    with contextlib.suppress(OSError):
        if stream is not None:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def is_plain(stream: TextIO | None) -> bool:
    """Whether nothing but lines of text may be written to `stream`."""
    if stream is None or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return True
    return not stream.isatty()


def _rich_stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Notes(logging.Handler):
    """Shows what the runtime logs as `note: ...` lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"note: {record.getMessage()}")


@contextlib.contextmanager
def notes(*, shown: bool) -> Iterator[None]:
    """While this lasts, the log of mlx_spec goes to stderr as notes, or nowhere."""
    logger = logging.getLogger("mlx_spec")
    handler = Notes(logging.WARNING) if shown else logging.NullHandler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


@contextlib.contextmanager
def loading(name: str, *, shown: bool) -> Iterator[None]:
    """A spinner on stderr while a model is loaded; it clears itself."""
    if not shown or is_plain(sys.stderr):
        yield
        return
    from rich.markup import escape

    with _rich_stderr().status(f"loading {escape(name)}"):
        yield


@contextlib.contextmanager
def prefill(*, shown: bool) -> Iterator[tuple[PrefillProgress | None, Callable[[], None]]]:
    """A progress bar on stderr for reading the prompt: what to call with (done, total), and how to end it.

    The bar clears itself; ending it twice does no harm.
    """
    if not shown or is_plain(sys.stderr):
        yield None, lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"),
                   TimeRemainingColumn(), console=_rich_stderr(), transient=True)
    task = bar.add_task("prefill", total=None)

    def progress(done: int, total: int) -> None:
        if not bar.live.is_started:
            bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield progress, bar.stop
    finally:
        bar.stop()


def statistics_line(statistics: Statistics) -> str:
    """The figures of one generation as one line for people. A figure that does not exist is left out."""
    parts = [_count(statistics.completion_tokens, "token")]
    if statistics.tokens_per_second is not None:
        parts.append(f"{_figures(statistics.tokens_per_second)} tok/s")
    if statistics.tokens_per_pass is not None:
        parts.append(f"{statistics.tokens_per_pass:.2f} tokens per target pass")
    if statistics.acceptance_rate is not None:
        parts.append(f"{statistics.acceptance_rate:.0%} of {statistics.drafted} drafts accepted{_by(statistics)}")
    if statistics.drafter != NO_DRAFTER and (ks := statistics.passes_by_draft_tokens):
        parts.append(f"K {min(ks)} to {max(ks)}" if len(ks) > 1 else f"K {min(ks)}")
    if statistics.parked_passes:
        parts.append(f"{statistics.parked_passes} of {_count(statistics.target_passes, 'pass', 'passes')} parked")
    if statistics.calibration_seconds:
        parts.append(f"passes measured in {statistics.calibration_seconds:.2f} s")
    parts.append(f"prefill {statistics.prefill_seconds:.2f} s ({_count(statistics.prompt_tokens, 'token')})")
    parts.append(f"peak memory {size(statistics.peak_memory_bytes)}")
    return ", ".join(parts)


def size(number: int) -> str:
    """Bytes for people: 38 GB is 38 * 10**9 bytes, as on a disk's label and in Activity Monitor."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if number >= unit:
            return f"{_figures(number / unit)} {name}"
    return f"{number} B"


def _by(statistics: Statistics) -> str:
    """Whose drafts they were."""
    if len(statistics.by_drafter) < 2:
        return "".join(f" ({name})" for name in statistics.by_drafter)
    parts = [f"{name} {part.accepted} of {part.drafted}" for name, part in sorted(statistics.by_drafter.items())]
    return f" ({', '.join(parts)})"


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def _figures(value: float) -> str:
    """Two figures or more: 0.67, 6.5, 39."""
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout. The last column holds long text, perhaps several lines.

    On a terminal it stands below its row, since an ordinary window has no room beside it. In plain text each
    row is one line, for grep.
    """
    if is_plain(sys.stdout):
        write(plain_table(columns, rows))
        return
    from rich.console import Console
    from rich.text import Text

    heading, *short = plain_table(columns[:-1], [row[:-1] for row in rows]).splitlines()
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(Text(heading, "bold"))
        for line, row in zip(short, rows, strict=True):
            console.print(Text(line))
            for below in row[-1].splitlines():
                console.print(Text(f"  {below}", "dim"))
    write(captured.get())


def wrapped(text: str) -> str:
    """Prose for stdout, broken between words: to the width of its terminal, but never wider than can be read well."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    width = min(_WIDEST, shutil.get_terminal_size().columns if terminal else _WIDEST)
    return textwrap.fill(text, max(1, width), break_long_words=False, break_on_hyphens=False)


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text, one row a line; the lines of a cell are joined by ` + `."""
    lines = [[*columns], *([" + ".join(cell.splitlines()) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join("  ".join(line).rstrip() + "\n" for line in padded)
