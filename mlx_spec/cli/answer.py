"""How an answer leaves `mlx-spec generate`: text as it comes, or one JSON object. Runs no model."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mlx_spec.cli import console

if TYPE_CHECKING:
    from mlx_spec.llm.completion import Chunk
    from mlx_spec.llm.llm import LLM
    from mlx_spec.llm.statistics import Statistics


def write_text(chunks: Iterator[Chunk], end_progress: Callable[[], None]) -> Statistics:
    """The answer as it comes, and one newline at its end. What is written stays when Ctrl-C ends it."""
    statistics, end = None, ""
    try:
        for chunk in chunks:
            end_progress()
            if chunk.text:
                end = chunk.text[-1]
                console.write(chunk.text)
            statistics = chunk.statistics or statistics
    except KeyboardInterrupt:
        if end not in ("", "\n") and not sys.stdout.isatty():
            console.write("\n")
        raise
    if end != "\n":
        console.write("\n")
    assert statistics is not None, "the last chunk carries the statistics"
    return statistics


def write_json(chunks: Iterator[Chunk], llm: LLM) -> Statistics:
    parts = list(chunks)
    last = parts[-1]
    assert last.statistics is not None, "the last chunk carries the statistics"
    answer = {
        "text": "".join(part.text for part in parts),
        "tokens": [token for part in parts for token in part.tokens],
        "finish_reason": last.finish_reason,
        **last.statistics.as_dict(),
        "model": llm.name,
        "draft": llm.draft_name,
    }

    def described(token: int, logprob: float) -> dict[str, Any]:
        # JSON has no infinities, which forbidden tokens have.
        return {"token": token, "text": llm.tokenizer.token_text(token),
                "logprob": logprob if math.isfinite(logprob) else None}  # fmt: skip

    if last.logprobs is not None:
        answer["logprobs"] = [
            described(entry.token, entry.logprob) | {"top": [described(*likely) for likely in entry.top]}
            for part in parts for entry in part.logprobs or ()
        ]  # fmt: skip
    console.write_json(answer)
    return last.statistics
