"""The command line: assembles the commands and turns every way of ending into an exit code.

Knows no models. Heavy imports happen inside the commands, so that help comes at once.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from mlx_spec.cli import calibrate, doctor, generate, models
from mlx_spec.cli.bench import command as bench
from mlx_spec.cli.console import write
from mlx_spec.cli.outcome import Outcome, exit_code, termination

app = typer.Typer(
    name="mlx-spec",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Runs a language model on this machine: a small draft model writes ahead, the large target model "
    "decides, and the answer is exactly the target's.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        write(f"mlx-spec {version('mlx-spec')}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, metavar="",
                           help="Show the version and end.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")
    else:
        context.ensure_object(Outcome).command = f"mlx-spec {context.invoked_subcommand}"


app.command("generate", help=generate.HELP)(generate.generate)
app.command("models", help=models.HELP)(models.models)
app.command("bench", help=bench.HELP)(bench.bench)
app.command("calibrate", help=calibrate.HELP)(calibrate.calibrate)
app.command("doctor", help=doctor.HELP)(doctor.doctor)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    0: done. 1: a failure. 2: a mistake in the call or its input; both come with one line on stderr. 130:
    Ctrl-C. 141: the reader of the output went away; 143: SIGTERM. The shell says the same of a program that SIGPIPE or
    SIGTERM ended.
    """
    _silence_libraries()
    outcome = Outcome()
    try:
        # Not app(): typer's own main swallows Ctrl-C and closed pipes, and draws errors as boxes.
        command = typer.main.get_command(app)
        listed = list(sys.argv[1:] if arguments is None else arguments)
        with termination(), command.make_context("mlx-spec", listed, obj=outcome) as context:
            command.invoke(context)
        code = 0
    except BaseException as error:
        code = exit_code(error, outcome)
    sys.exit(code)


def _silence_libraries() -> None:
    # transformers says that PyTorch is missing, and that a text is longer than its tokenizer's limit.
    # We need only its tokenizers, and check lengths ourselves. It reads the variable at its import.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
