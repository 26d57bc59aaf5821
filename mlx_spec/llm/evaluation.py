"""Logits of a text, for evaluation: what generation computes, for tokens that are known. Knows one model; no rounds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import mlx.core as mx

from mlx_spec.architectures.context import LanguageModel
from mlx_spec.errors import DoesNotFit
from mlx_spec.machine.memory import available_memory, gigabytes, wired_limit

_ROWS = 64
"""Computed at once."""


def logits_of(model: LanguageModel, tokens: Sequence[int], sinks: int, window: int | None) -> mx.array:
    """The logits after each of `tokens`, (n, columns). Raises DoesNotFit where there is no memory for them."""
    result: mx.array | None = None  # written to in place
    with wired_limit(), closing(model.new_context(sinks, window)) as context:
        for start in range(0, len(tokens), _ROWS):
            rows = context.extend(tokens[start : start + _ROWS])
            if result is None:
                _check_fits(len(tokens), len(tokens) * rows.shape[1] * rows.dtype.size)
                result = mx.zeros((len(tokens), rows.shape[1]), rows.dtype)
            result[start : start + _ROWS] = rows
            mx.eval(result)
            context.evaluate()
            context.settle(context.length)
    assert result is not None
    return result


def _check_fits(count: int, needed: int) -> None:
    available = available_memory()
    if available is not None and needed > available:
        raise DoesNotFit(
            f"logits of {count} tokens need {gigabytes(needed)} and {gigabytes(max(available, 0))} is available; "
            "give fewer tokens."
        )
