"""How options are declared and their values read, and those of several commands. Each complaint names the value. Knows
no command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from mlx_spec.errors import BadConfig
from mlx_spec.settings import DEFAULT_SINKS

# The parser of an option cannot give None.
UNLIMITED = -1


_Value = TypeVar("_Value")


def _reader(read: Callable[[str], _Value], complaint: str) -> Callable[[str], _Value]:
    """`read`, whose ValueErrors become a mistake in the call."""

    def parse(text: str) -> _Value:
        try:
            return read(text)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is {complaint}") from None

    return parse


def _limit(text: str) -> int:
    if text == "unlimited":
        return UNLIMITED
    if (limit := int(text)) < 0:
        raise ValueError
    return limit


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    return int(token), float(value)


whole = _reader(int, "not a whole number")
number = _reader(float, "not a number")
token_limit = _reader(_limit, "neither a whole number of 0 or more nor 'unlimited'")
"""A number of tokens, or UNLIMITED for the word."""
bias = _reader(_bias, "not TOKEN=VALUE, such as 1234=-5")
"""Token id and what is added to its logit."""


def whole_or(word: str) -> Callable[[str], int | str]:
    return _reader(lambda text: text if text == word else int(text), f"neither a whole number nor {word!r}")


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
