"""How a command ended: exit code and the one line on stderr. Knows exceptions; knows no command."""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from mlx_spec.cli import console
from mlx_spec.cli.options import OUTPUT, named_by_option
from mlx_spec.errors import BadConfig, DoesNotFit, IncompatiblePair, MLXSpecError, ModelNotFound

FAILURE, MISTAKE, INTERRUPTED, CLOSED_PIPE, TERMINATED = 1, 2, 130, 141, 143
_MISTAKES = (ModelNotFound, IncompatiblePair, DoesNotFit)
# Newer versions of typer bring their own click; its base of BadParameter is the usage error in both.
UsageError: Any = typer.BadParameter.__mro__[1]


class Terminated(BaseException):
    """SIGTERM came, as from `timeout` or `kill`."""


@contextlib.contextmanager
def termination() -> Iterator[None]:
    """While this lasts, the first SIGTERM raises Terminated, so that what was measured is shown and a terminal gets its
    cursor back; a second one ends the program at once. In any thread but the main one nothing changes."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)
    except ValueError:
        before = None
    try:
        yield
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def _terminate(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


@dataclass
class Outcome:
    """What reporting needs to know of the command line; travels as the context's object."""

    traceback: bool = False
    command: str = "mlx-spec"


def _remember(context: typer.Context, wanted: bool) -> bool:
    context.ensure_object(Outcome).traceback = wanted
    return wanted


TracebackOption = Annotated[bool, typer.Option(
    "--traceback", is_eager=True, callback=_remember, rich_help_panel=OUTPUT, metavar="",
    help="When something fails, show where in the program; for a bug report.")]


def exit_code(error: BaseException, outcome: Outcome) -> int:
    """Says on stderr what went wrong, if anything did, and gives the exit code."""
    code, line = _judge(error, outcome)
    if code == INTERRUPTED:
        # A second Ctrl-C from here on ends the program at once, without a traceback.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with contextlib.suppress(console.ClosedPipeError, console.OutputError):
            console.leave_interrupted_line()
    if outcome.traceback and code in (FAILURE, MISTAKE):
        console.say_block("".join(traceback.format_exception(error)))
    if line:
        console.say(f"error: {line}")
    console.abandon_output()
    return code


def _judge(error: BaseException, outcome: Outcome) -> tuple[int, str]:
    # typer prints its help itself; rich makes a SystemExit of the pipe's error, older versions do not.
    if isinstance(error, console.ClosedPipeError | BrokenPipeError) or (
        isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
    ):
        return CLOSED_PIPE, ""
    if isinstance(error, typer.Exit):
        return error.exit_code, ""
    if isinstance(error, SystemExit):
        return (error.code if isinstance(error.code, int) else FAILURE if error.code else 0), ""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED, ""
    if isinstance(error, Terminated):
        return TERMINATED, ""
    if isinstance(error, UsageError):
        return MISTAKE, _usage(error, outcome)
    if isinstance(error, BadConfig):
        return MISTAKE, named_by_option(error)
    if isinstance(error, MLXSpecError):
        return MISTAKE if isinstance(error, _MISTAKES) else FAILURE, str(error)
    if isinstance(error, console.OutputError):
        return FAILURE, str(error)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return FAILURE, f"{what.rstrip('.')}; run again with --traceback to see where."


def _usage(error: Any, outcome: Outcome) -> str:
    message = " ".join(error.format_message().split()).rstrip(".")
    # Words after a dash that is no option's: a prompt such as "-5 + 3?".
    name = getattr(error, "option_name", "")
    is_prompt = type(error).__name__ == "NoSuchOption" and (not name.startswith("--") or " " in name)
    hint = "; put -- before a prompt that begins with -" if is_prompt and outcome.command.endswith(" generate") else ""
    return f"{message[:1].lower()}{message[1:]}{hint}; see `{outcome.command} --help`."
