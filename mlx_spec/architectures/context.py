"""The seam between engine and models: one token sequence being decoded. Token ids and logits; nothing of text.

Invariant of every user of a context: it holds a prefix of the committed tokens, never anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

Tokens = Sequence[int] | mx.array


def token_array(tokens: Tokens) -> mx.array:
    """Token ids as (n,) int32 on the device."""
    return tokens if isinstance(tokens, mx.array) else mx.array(list(tokens), dtype=mx.int32)


class Context(Protocol):
    """One sequence of tokens in a model's cache."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    @property
    def can_rewind(self) -> bool:
        """Whether `rewind` is exact. Where it is not, only `rewind(0)` and `rewind(length)` are allowed."""

    @property
    def chains_cheaply(self) -> bool:
        """Whether a pass may be built on one that is still in flight without a costly copy of the cache."""

    @property
    def vocabulary_size(self) -> int:
        """Columns of the logits."""

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values, those of other sequences in the same pool included."""

    @property
    def prefill_rows(self) -> int:
        """Rows of a prompt to read in one pass."""

    def reserve(self, tokens: int) -> None:
        """Allocate at once what `tokens` tokens in all will need, or as much of it as there is memory for: not having
        it is no error yet, and having it spares growing step by step."""

    def extend(self, tokens: Tokens, rows: int | None = None) -> mx.array:
        """Append n tokens, (n,) int32; logits (rows, vocabulary_size) of the last `rows` of them, all by default.

        Lazy: nothing is computed until the logits, or the cache (`evaluate`), are.
        Raises DoesNotFit where there is no memory for them; whatever ends it, the context is as it was before.
        """

    def evaluate(self) -> None:
        """Wait until the cache has been written. Raises DoesNotFit where there is no memory for a pass; `rewind`, and
        what else it left unwritten is written by the next one."""

    def rewind(self, length: int) -> None:
        """Forget everything from `length` on."""

    def settle(self, length: int) -> None:
        """Promise never to rewind to before `length`, except to 0: what only such a rewind needed is freed, and what
        MLX keeps for reuse is kept within bounds (`bound_cache`). To be called every round."""

    def fork(self) -> Context:
        """A second sequence with the same past."""

    def close(self) -> None:
        """Give the memory back. The context is empty afterwards."""


class LanguageModel(Protocol):
    """What makes contexts: weights and the memory for their keys and values."""

    @property
    def rewind_obstacle(self) -> str | None:
        """Why contexts cannot be rewound, or None if they can."""

    def bytes_to_allocate(self, tokens: int) -> int:
        """Memory that one more sequence of so many tokens would take beside what is allocated."""

    def trim(self) -> None:
        """Give back what no context uses, as between requests. Costs nothing where that is little."""

    @property
    def paging_obstacle(self) -> str | None:
        """Why keys and values cannot be INT8 or have a window, or None if they can."""

    def new_context(self, sinks: int = 0, window: int | None = None) -> Context:
        """An empty sequence. With a window, each row sees that many positions and the first `sinks`."""


def prefill(context: Context, tokens: Sequence[int], progress: Callable[[int], None] | None = None) -> None:
    """Bring `context`, which holds a prefix of `tokens`, up to all of them but the last, in chunks.

    `progress` is told how many tokens each chunk had. No logits are computed.
    """
    while (remaining := len(tokens) - 1 - context.length) > 0:
        size = min(context.prefill_rows, remaining)
        context.extend(tokens[context.length : context.length + size], rows=0)
        context.evaluate()
        context.settle(context.length)
        if progress is not None:
            progress(size)
