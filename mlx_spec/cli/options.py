"""How options are declared and their values read. Each complaint names the value. Knows no command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import typer

# The parser of an option cannot give None.
UNLIMITED = -1


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number") from None


def token_limit(text: str) -> int:
    """A number of tokens, or UNLIMITED for the word."""
    if text == "unlimited":
        return UNLIMITED
    with contextlib.suppress(ValueError):
        if (limit := int(text)) >= 0:
            return limit
    raise typer.BadParameter(f"{text!r} is neither a whole number of 0 or more nor 'unlimited'")


def draft_count(text: str) -> int | str:
    """A number of tokens, or the word auto."""
    if text == "auto":
        return text
    with contextlib.suppress(ValueError):
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither a whole number nor 'auto'")


def window_size(text: str) -> int | str:
    """A number of tokens, or the word none."""
    if text == "none":
        return text
    with contextlib.suppress(ValueError):
        return int(text)
    raise typer.BadParameter(f"{text!r} is neither a whole number nor 'none'")


def sink_count(text: str) -> int | str:
    """A number of tokens, or the word system."""
    return text if text == "system" else whole(text)


def bias(text: str) -> tuple[int, float]:
    """Token id and what is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not TOKEN=VALUE, such as 1234=-5") from None


def option(name: str, *more: str, panel: str, help: str, metavar: str | None = None,
           parser: Callable[[str], Any] | None = None) -> Any:
    """An option in the help's panel `panel`, whose help text says the default where there is one."""
    return typer.Option(name, *more, help=help, rich_help_panel=panel, metavar=metavar or "", parser=parser,
                        show_default=False)
