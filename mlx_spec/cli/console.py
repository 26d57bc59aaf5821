"""What a person reads: the answer and tables on stdout, notes and figures on stderr. Knows strings; runs no model."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from mlx_spec.llm.statistics import Statistics



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


def statistics_line(statistics: Statistics) -> str:
    """The figures of one generation as one line for people. A figure that does not exist is left out."""
    parts = [count(statistics.completion_tokens, "token")]
    if statistics.tokens_per_second is not None:
        parts.append(f"{_figures(statistics.tokens_per_second)} tok/s")
    if statistics.tokens_per_pass is not None:
        parts.append(f"{statistics.tokens_per_pass:.2f} tokens per target pass")
    if statistics.acceptance_rate is not None:
        parts.append(f"{statistics.acceptance_rate:.0%} of {statistics.drafted} drafts accepted{_by(statistics)}")
    if statistics.drafter != "none" and (ks := statistics.passes_by_draft_tokens):
        parts.append(f"K {min(ks)} to {max(ks)}" if len(ks) > 1 else f"K {min(ks)}")
    if statistics.parked_passes:
        parts.append(f"{statistics.parked_passes} of {count(statistics.target_passes, 'pass', 'passes')} parked")
    parts.append(f"prefill {statistics.prefill_seconds:.2f} s ({count(statistics.prompt_tokens, 'token')})")
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


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def _figures(value: float) -> str:
    """Two figures or more: 0.67, 6.5, 39."""
    return f"{value:.2f}" if value < 0.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"
