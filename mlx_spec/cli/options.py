"""How options are declared and their values read, and those of several commands. Each complaint names the value. Knows
no command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

import typer

from mlx_spec.errors import BadConfig
from mlx_spec.settings import DEFAULT_SINKS

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


def whole_or(word: str) -> Callable[[str], int | str]:
    """Reads a whole number, or `word`."""

    def read(text: str) -> int | str:
        if text == word:
            return text
        with contextlib.suppress(ValueError):
            return int(text)
        raise typer.BadParameter(f"{text!r} is neither a whole number nor {word!r}")

    return read


def bias(text: str) -> tuple[int, float]:
    """Token id and what is added to its logit."""
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not TOKEN=VALUE, such as 1234=-5") from None


# Options that are not called as the field of the configuration that they set.
_OPTIONS = {"storage": "--kv", "draft_storage": "--draft-kv", "verification": "--verify",
            "most_draft_tokens": "--draft-tokens-max"}  # fmt: skip


def named_by_option(error: BadConfig) -> str:
    """The message, which names the option where it would begin with a field of the configuration."""
    if error.setting is None:
        return str(error)
    option = _OPTIONS.get(error.setting, f"--{error.setting.replace('_', '-')}")
    return option + str(error).removeprefix(error.setting)


def option(name: str, *more: str, panel: str, help: str, metavar: str | None = None,
           parser: Callable[[str], Any] | None = None) -> Any:
    """An option in the help's panel `panel`, whose help text says the default where there is one."""
    return typer.Option(name, *more, help=help, rich_help_panel=panel, metavar=metavar or "", parser=parser,
                        show_default=False)


# What several commands take.

OUTPUT = "Output"
_MODELS, _MEMORY = "Models", "Memory"
Model = Annotated[str | None, option(
    "--model", "-m", panel=_MODELS, metavar="MODEL",
    help="Required: a name from `mlx-spec models` such as demo, org/name on the Hugging Face hub, a directory, or a "
    ".gguf file.")]
Draft = Annotated[str | None, option(
    "--draft", "-d", panel=_MODELS, metavar="MODEL",
    help="The small model that drafts, given like --model; none loads none. "
    "Default: the draft that `mlx-spec models` lists for the model.")]
Storage = Annotated[str | None, option(
    "--kv", panel=_MEMORY, metavar="STORAGE",
    help="How the model's keys and values are kept: model, in the type it computes in (usually 16 bits), or int8, in "
    "half of that. Default: the model's own, else model.")]
DraftStorage = Annotated[str | None, option(
    "--draft-kv", panel=_MEMORY, metavar="STORAGE",
    help="The same for the draft. Default: the model's own, else model.")]
Window = Annotated[Any, option(
    "--window", panel=_MEMORY, metavar="N", parser=whole_or("none"),
    help="Let each token see only the N before it and the sinks: memory stays constant, and the answer may be longer "
    "than the model's context. none lets it see everything. Default: the model's own, else none.")]
Sinks = Annotated[Any, option(
    "--sinks", panel=_MEMORY, metavar="N", parser=whole_or("system"),
    help="With a window: the first N tokens are always seen; system keeps the whole system prompt. "
    f"Default: the model's own, else {DEFAULT_SINKS}.")]
