"""An LLM and threads: any one at a time, never two."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from directories import write_model

import mlx_spec
from mlx_spec import LLM, MLXSpecError, Speculation

PROMPT = list(range(1, 90))


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return mlx_spec.load(write_model(tmp_path / "target"), write_model(tmp_path / "draft", seed=5))


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` gives, or raises, in a thread of its own."""
    results: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            results.append((work(), None))
        except BaseException as error:
            results.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [(value, error)] = results
    if error is not None:
        raise error
    return value


def test_a_generation_may_run_in_any_thread(llm: LLM) -> None:
    first = in_a_thread(lambda: llm.generate(PROMPT, max_tokens=40).tokens)
    assert llm.generate(PROMPT, max_tokens=40).tokens == first
    assert in_a_thread(lambda: llm.generate(PROMPT, max_tokens=40).tokens) == first
    assert llm.logits(PROMPT[:5]).shape[0] == 5


@pytest.mark.parametrize("k", [0, 4])
def test_a_second_thread_is_refused_and_harms_nothing(llm: LLM, k: int) -> None:
    speculation = Speculation(draft_tokens=k)
    expected = llm.generate(PROMPT, max_tokens=40, speculation=speculation).tokens
    chunks = llm.stream(PROMPT, max_tokens=40, speculation=speculation)
    tokens = [*next(chunks).tokens]
    with pytest.raises(MLXSpecError, match="another thread"):
        in_a_thread(lambda: llm.generate(PROMPT, max_tokens=4))
    assert tokens + [token for chunk in chunks for token in chunk.tokens] == expected


def test_a_generation_stays_in_its_thread(llm: LLM) -> None:
    chunks = llm.stream(PROMPT, max_tokens=40)
    next(chunks)
    with pytest.raises(MLXSpecError, match="stay in one"):
        in_a_thread(lambda: next(chunks))
    assert llm.generate(PROMPT, max_tokens=1).statistics.completion_tokens == 1
