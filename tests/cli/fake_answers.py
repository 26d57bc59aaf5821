"""A stand-in for the runtime whose answers are known. Imports little: processes of their own begin with it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_spec.decoding.engine import TokenLogprobs
from mlx_spec.errors import BadConfig, DoesNotFit, IncompatiblePair, MLXSpecError, ModelNotFound
from mlx_spec.llm.completion import Chunk
from mlx_spec.llm.statistics import Drafted, Statistics
from mlx_spec.settings import KVConfig, Sampling, Speculation

FIGURES = Statistics(prompt_tokens=7, completion_tokens=3, target_passes=2, drafted=4, accepted=1, drafter="model",
                     draft_tokens=2, verification="block", by_drafter={"model": Drafted(2, 4, 1)},
                     passes_by_draft_tokens={2: 2}, accepted_by_position=[(2, 1), (1, 0)], parked_passes=0,
                     prefill_seconds=0.5, decode_seconds=2.0, kv_bytes=1024,
                     peak_memory_bytes=2_000_000_000, seed=11)
WORDS = {"endless": ["word "] * 100_000, "newline": ["a\n"], "nothing": [""]}
LOAD_ERRORS = {
    "absent": ModelNotFound("no model 'absent'; see\nmlx-spec models"), "pair": IncompatiblePair("other ids"),
    "large": DoesNotFit("too large"), "other": MLXSpecError("not you"), "bad": BadConfig("bad file"),
    "crash": ZeroDivisionError(), "disk": OSError(5, "Input/output error"),
}


class FakeTokenizer:
    def token_text(self, token: int) -> str:
        return f"<{token}>"


class FakeLLM:
    """Follows the runtime's contract; the model's name says how it behaves."""

    def __init__(self, name: str, draft: str | bool | None, kv: KVConfig | None) -> None:
        self.name, self.kv = name, kv
        self.draft_name = "small" if draft is None else draft or None
        self.tokenizer = FakeTokenizer()
        self.sampling = Sampling(temperature=0.6, top_p=0.9)
        self.speculation = Speculation(draft_tokens=2)
        self.calls: list[dict[str, Any]] = []
        self.closed = False

    def stream(self, prompt: Any, **arguments: Any) -> Iterator[Chunk]:
        self.calls.append({"prompt": prompt, **arguments})
        return self._chunks(arguments["prefill_progress"], arguments["sampling"].top_logprobs)

    def _chunks(self, progress: Callable[[int, int], None] | None, top: int | None) -> Iterator[Chunk]:
        try:
            if progress:
                progress(0, 7)
                progress(7, 7)
            if self.name == "hang-prefill":
                _hang()
            if self.name == "broken":
                raise RuntimeError("first line\nsecond line")
            if self.name == "noted":
                logging.getLogger("mlx_spec").warning("speculation is off")
            for index, word in enumerate(WORDS.get(self.name, ["Grüße", " ", "you"])):
                likeliest = [(index, -0.5), (9, -float("inf"))]
                logprobs = None if top is None else [TokenLogprobs(index, -0.5, likeliest)]
                yield Chunk(word, [index], logprobs, None, None)
                if self.name == "hang-decode" and index == 1:
                    _hang()
            yield Chunk("", [99], None if top is None else [], "stop", FIGURES)
        finally:
            self.closed = True


def _hang() -> None:
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)


def fake_load(model: str, draft: str | bool | None = None, kv: KVConfig | None = None) -> FakeLLM:
    if model in LOAD_ERRORS:
        raise LOAD_ERRORS[model]
    if model == "hang-load":
        _hang()
    return FakeLLM(model, draft, kv)
