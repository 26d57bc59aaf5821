"""What a caller asks for, checked before anything is computed. Knows types and ranges; runs no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_spec.errors import BadConfig
from mlx_spec.settings import Sampling, Speculation, token_id

Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int]

PrefillProgress = Callable[[int, int], None]
"""Told (done, total) of the prompt's tokens, by both models."""

_KINDS = "a text, a list of messages, or a list of token ids"


@dataclass(frozen=True)
class Request:
    """What is to be generated, after all checks."""

    tokens: list[int]
    """The prompt."""
    sampling: Sampling
    speculation: Speculation
    drafter: str
    limit: int | None
    """Tokens of the answer at most."""
    room: int | None
    """Tokens after the prompt that the target's context holds; None where there is no end."""
    planned: int
    """Positions that it holds at the same time, as far as that is known."""
    sinks: int
    seed: int


def checked_prompt(prompt: Any) -> Prompt:
    """A text, or a sequence of messages or of what should be token ids; arrays become lists."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, Mapping):
        raise BadConfig("the prompt is one message alone; put it into a list.")
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray | memoryview):
        raise BadConfig(f"the prompt is of type {type(prompt).__name__}; give {_KINDS}.")
    return prompt


def checked_prompt_ids(tokens: Sequence[Any], vocabulary_size: int) -> list[int]:
    """`tokens` as a list of at least one id below `vocabulary_size`."""
    ids = [_checked_id(token, vocabulary_size, f"the prompt is neither {_KINDS}: it") for token in tokens]
    if not ids:
        raise BadConfig(
            "the prompt has no tokens; give at least one. Of a text, the model's tokenizer or chat template makes none."
        )
    return ids


def checked_stop_tokens(tokens: Any, vocabulary_size: int) -> frozenset[int]:
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise BadConfig(f"stop_tokens is {tokens!r}; give a list of token ids, empty for none.")
    return frozenset(_checked_id(token, vocabulary_size, "stop_tokens") for token in tokens)


def check_options(
    sampling: object, speculation: object, max_tokens: Any, prefill_progress: object, vocabulary_size: int
) -> int | None:
    """`max_tokens` as a number of Python's own. Raises BadConfig for settings of the wrong type, and for biases on a
    token that is never drawn or that leave none to draw."""
    if not isinstance(sampling, Sampling):
        raise BadConfig(f"sampling is {sampling!r}; give a Sampling, such as Sampling(temperature=0.7).")
    if not isinstance(speculation, Speculation):
        raise BadConfig(f"speculation is {speculation!r}; give a Speculation, such as Speculation(draft_tokens=3).")
    for token in sampling.logit_bias:
        _checked_id(token, vocabulary_size, "logit_bias")
    if sum(bias == -math.inf for bias in sampling.logit_bias.values()) >= vocabulary_size:
        raise BadConfig(f"logit_bias forbids all {vocabulary_size} tokens; leave at least one.", setting="logit_bias")
    if max_tokens is not None and token_id(max_tokens) is None:
        raise BadConfig(f"max_tokens is {max_tokens!r}; give a whole number of 0 or more, or None for no limit.")
    if prefill_progress is not None and not callable(prefill_progress):
        raise BadConfig(f"prefill_progress is {prefill_progress!r}; give a function of (done, total).")
    return None if max_tokens is None else token_id(max_tokens)


def _checked_id(token: object, vocabulary_size: int, name: str) -> int:
    checked = token_id(token)
    if checked is None or checked >= vocabulary_size:
        what = "no token id" if token_id(token) is None else "not in the vocabulary"
        raise BadConfig(f"{name} has {token!r}, which is {what}; give ids from 0 to {vocabulary_size - 1}.")
    return checked
