"""What a generation gives back: chunks as they come, or one whole completion. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mlx_spec.decoding.engine import TokenLogprobs
from mlx_spec.llm.statistics import Statistics

FinishReason = Literal["stop", "length", "cancelled", "memory"]
"""An end token or a stop string; max_tokens or the context's end; `Generation.cancel`; no memory for more keys and
values."""


@dataclass(frozen=True)
class Chunk:
    """What one target pass added."""

    text: str
    """New text that is certain: never part of a character, never the beginning of a stop string. May be empty."""
    tokens: list[int]
    """The tokens of this pass. Text may lag behind them."""
    logprobs: list[TokenLogprobs] | None
    """One per token, if `Sampling.top_logprobs` asks for them."""
    finish_reason: FinishReason | None
    """In the last chunk."""
    statistics: Statistics | None
    """In the last chunk."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    tokens: list[int]
    """Every token emitted: an end token, and the token that completed a stop string, included."""
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    statistics: Statistics

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Completion:
        """All chunks of one generation, joined."""
        parts = list(chunks)
        last = parts[-1]
        assert last.finish_reason is not None
        assert last.statistics is not None
        return cls(
            "".join(part.text for part in parts),
            [token for part in parts for token in part.tokens],
            None if last.logprobs is None else [entry for part in parts for entry in part.logprobs or ()],
            last.finish_reason,
            last.statistics,
        )
