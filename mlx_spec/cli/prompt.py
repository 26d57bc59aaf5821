"""Where a prompt comes from: an argument, stdin or a file, each checked. Knows no models."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_spec.cli import console
from mlx_spec.errors import BadConfig

_WAYS = 'give it as "TEXT", as - to read stdin, or with --prompt-file FILE'


def read_prompt(arguments: Sequence[str], file: str | None) -> str:
    """The one prompt that was given. A newline at the very end of a file or of stdin is left out.

    Raises BadConfig: none, several, empty, unreadable, or not UTF-8.
    """
    if len(arguments) > 1:
        raise BadConfig(f"{len(arguments)} prompts given ({arguments[0]!r}, {arguments[1]!r}...); give one, "
                        'in quotes: "..."')
    if arguments and file is not None:
        raise BadConfig(f"two prompts given, {arguments[0]!r} and --prompt-file {file!r}; give one of them.")
    if file is not None:
        name = "stdin" if file == "-" else f"prompt file {file!r}"
        text = _decode(_read_stdin() if file == "-" else read_file(file, name, "--prompt-file"), name)
    elif not arguments:
        raise BadConfig(f"no prompt; {_WAYS}.")
    elif arguments[0] == "-":
        name, text = "stdin", _decode(_read_stdin(), "stdin")
    else:
        name, text = "prompt", arguments[0]
        check_utf8(text, "the prompt")
    if not text.strip():
        raise BadConfig(f"the prompt is empty ({name}); {_WAYS}.")
    return text


def check_utf8(text: str, name: str) -> None:
    """Refuses an argument whose bytes were not UTF-8; Python hands those on as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadConfig(f"{name} is not UTF-8 at character {error.start}; set the terminal to it.") from error


def read_file(file: str, name: str, option: str) -> bytes:
    """Raises BadConfig, calling the file `name`, where `option` names none that can be read."""
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BadConfig(f"cannot read {name}: {reason}; check {option}.") from error


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise BadConfig(f"stdin is closed; {_WAYS}.")
    if sys.stdin.isatty():
        console.say("Type the prompt; end it with Ctrl-D on a line of its own.")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise BadConfig(f"cannot read stdin: {error.strerror}; {_WAYS}.") from error


def _decode(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadConfig(f"{name} is not UTF-8: byte {data[error.start]:#04x} at {error.start}; "
                        "convert it, for instance with iconv.") from error
    return text.removesuffix("\n").removesuffix("\r")
