"""How many tokens at the beginning of a prompt stay visible beside a window. Token ids and messages; no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_spec.errors import BadConfig
from mlx_spec.kv import PAGE
from mlx_spec.settings import SMALLEST_WINDOW, KVConfig

Encode = Callable[[Any], list[int]]

IN_PASSING = 512 + 2 * PAGE
"""Tokens that a sequence behind a window holds for a while beside what it sees: a prompt's pass, and parts of pages."""


def sinks_of(
    kv: KVConfig, name: str, context_length: int | None, prompt: Any, tokens: Sequence[int], encode: Encode
) -> int:
    """The number of sinks that `kv` means for this prompt, whose ids are `tokens`.

    prompt: a text or messages that went through the chat template, or None if none did; encode gives the ids of other
    messages. Raises BadConfig where sinks and window do not go together, or are more than the model `name` takes.
    """
    window = kv.window
    assert window is not None
    sinks = kv.visible_sinks
    if sinks == "system":
        sinks = _system_tokens(prompt, tokens, encode)
    if sinks > window:
        raise BadConfig(
            f"the window of {window} tokens is smaller than the {sinks} sinks; give a --window of {sinks} or more."
        )
    if context_length is not None and sinks + window > context_length:
        largest = context_length - sinks
        step = f"give a --window of {largest} at most" if largest >= max(SMALLEST_WINDOW, sinks) else "use fewer sinks"
        raise BadConfig(
            f"{sinks} sinks and a window of {window} are more than the {context_length} tokens {name} was made for; "
            f"{step}."
        )
    return sinks


def _system_tokens(prompt: Any, tokens: Sequence[int], encode: Encode) -> int:
    """How many tokens the conversation's beginning has, up to the user's first character."""
    first = prompt[0] if isinstance(prompt, Sequence) and prompt else None
    if not isinstance(first, str | Mapping):
        raise BadConfig("sinks 'system' needs messages and a chat template; give a number of sinks.")
    system = [dict(first)] if isinstance(first, Mapping) and first.get("role") == "system" else []
    others = [encode([*system, {"role": "user", "content": text}]) for text in ("A", "b")]
    shared = zip(tokens, *others, strict=False)
    return next((i for i, same in enumerate(shared) if len(set(same)) > 1), min(map(len, others)))
