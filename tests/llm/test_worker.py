"""An LLM and threads: all that MLX computes runs on the LLM's own, whoever asks, and nobody is locked out."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from directories import write_model

import mlx_spec
from mlx_spec import LLM, BadConfig, KVConfig, MLXSpecError, Speculation
from mlx_spec.llm.worker import Worker

PROMPT = list(range(1, 90))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return write_model(folder / "target"), write_model(folder / "draft", seed=5)


@pytest.fixture
def llm(pair: tuple[Path, Path]) -> LLM:
    return mlx_spec.load(*pair)


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def answer(llm: LLM, **options: Any) -> list[int]:
    return llm.generate(PROMPT, max_tokens=40, **options).tokens


@pytest.mark.parametrize("k", [0, 4])
def test_one_answer_is_asked_for_in_many_threads(llm: LLM, k: int) -> None:
    """Each chunk by another thread, others having answers of their own meanwhile."""
    speculation = Speculation(draft_tokens=k)
    expected = answer(llm, speculation=speculation)
    chunks = llm.stream(PROMPT, max_tokens=40, speculation=speculation)
    tokens: list[int] = []
    while (chunk := in_a_thread(lambda: next(chunks, None))) is not None:
        tokens += chunk.tokens
        other = in_a_thread(lambda: llm.generate(PROMPT, max_tokens=3, speculation=speculation)).tokens
        assert other == expected[:3]
    assert tokens == expected
    assert in_a_thread(lambda: llm.logits(PROMPT[:5])).shape[0] == 5


def test_a_generation_that_waits_locks_nobody_out(llm: LLM) -> None:
    expected = answer(llm)
    waiting = [llm.stream(PROMPT, max_tokens=40) for _ in range(3)]
    for generation in waiting[1:]:
        next(generation)
    assert in_a_thread(lambda: answer(llm)) == expected
    for generation in waiting:
        generation.close()
    assert answer(llm) == expected


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_cancelled_from_another_thread(llm: LLM, chunks: int) -> None:
    generation = llm.stream(PROMPT, max_tokens=None)
    tokens = [token for _ in range(chunks) for token in next(generation).tokens]
    in_a_thread(generation.cancel)
    rest = list(generation)
    tokens += [token for chunk in rest for token in chunk.tokens]
    assert rest[-1].finish_reason == "cancelled"
    assert rest[-1].statistics is not None
    assert rest[-1].statistics.completion_tokens == len(tokens)
    assert tokens == llm.generate(PROMPT, max_tokens=400).tokens[: len(tokens)]


def test_what_an_answer_left_running_is_not_for_the_next_one_to_wait_for(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda *_: steps.append("waited"))
    for _ in range(2):
        llm.generate(PROMPT, max_tokens=3)
        steps.append("answered")
    assert steps == ["waited", "answered"] * 2


def test_cancelled_while_the_prompt_is_read(llm: LLM) -> None:
    """By whoever is told how far that is; `generate` would return as little."""
    told: list[tuple[int, int]] = []

    def stop(done: int, total: int) -> None:
        told.append((done, total))
        generation.cancel()

    generation = llm.stream([5] * 600, max_tokens=9, prefill_progress=stop)
    [last] = generation
    assert (last.finish_reason, last.tokens, last.text) == ("cancelled", [], "")
    assert len(told) == 1
    assert all(0 <= done < total for done, total in told)


def test_progress_never_says_that_nothing_is_to_be_done(llm: LLM) -> None:
    told: list[tuple[int, int]] = []
    llm.generate([5], max_tokens=2, prefill_progress=lambda done, total: told.append((done, total)))
    assert told == []
    llm.generate(PROMPT, max_tokens=2, prefill_progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1] > 0


def test_async_for(llm: LLM) -> None:
    expected = answer(llm)

    async def one() -> list[int]:
        return [token async for chunk in llm.stream(PROMPT, max_tokens=40) for token in chunk.tokens]

    async def several() -> list[list[int]]:
        return await asyncio.gather(*(one() for _ in range(4)))

    assert asyncio.run(several()) == [expected] * 4


def test_time_between_chunks_is_not_decoding_time(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that the caller moves."""
    away = 0.0
    clock = time.perf_counter
    monkeypatch.setattr("mlx_spec.llm.generation.time.perf_counter", lambda: clock() + away)
    statistics = None
    for chunk in llm.stream(PROMPT, max_tokens=12):
        away += 1000
        statistics = chunk.statistics
    assert statistics is not None
    assert 0 < statistics.prefill_seconds + statistics.decode_seconds < 1000


def test_an_exception_while_waiting_ends_the_generation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(llm)
    generation = llm.stream(PROMPT, max_tokens=40)
    next(generation)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "run", lambda self, function: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(generation)
    assert list(generation) == []
    assert answer(llm) == expected


def test_contexts_are_handed_on(llm: LLM) -> None:
    generation = llm.stream(PROMPT, max_tokens=10)
    generation.keeps_contexts = True
    tokens = [token for chunk in generation for token in chunk.tokens]
    decoding = generation.take_contexts()
    assert decoding.tokens == PROMPT + tokens
    assert decoding.target.length == len(decoding.tokens) - 1
    in_a_thread(lambda: llm._worker.run(decoding.target.close))
    with pytest.raises(MLXSpecError, match="keeps_contexts"):
        generation.take_contexts()


# -- its life --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["answer", "suspended", "failed", "fixed"])
@pytest.mark.parametrize("drafted", [True, False])
def test_nothing_keeps_a_deleted_model(pair: tuple[Path, Path], use: str, drafted: bool) -> None:
    """Not even until the garbage collector runs."""

    def used() -> None:
        llm = mlx_spec.load(pair[0], pair[1] if drafted else False)
        generation = llm.stream(PROMPT, max_tokens=30, speculation=Speculation(3 if use == "fixed" else "auto"))
        next(generation)
        if use != "suspended":
            list(generation)
        if use == "failed":
            with pytest.raises(BadConfig):
                llm.generate("")
        del generation
        llm.generate(PROMPT, max_tokens=12)

    used()  # what is kept for good, such as compiled functions
    gc.collect()
    gc.disable()
    try:
        before = mx.get_active_memory()
        used()
        Worker().run(lambda: None)  # the thread that the deleted one used has come to rest
        assert mx.get_active_memory() == before
    finally:
        gc.enable()


def test_closed(pair: tuple[Path, Path]) -> None:
    before = mx.get_active_memory()
    with mlx_spec.load(*pair) as llm:
        running = llm.stream(PROMPT, max_tokens=30)
        next(running)
        assert mx.get_active_memory() > before
    assert mx.get_active_memory() <= before
    assert [chunk.finish_reason for chunk in running] == ["cancelled"]
    llm.close()
    for use in (lambda: llm.generate("a"), lambda: llm.logits([1]), lambda: llm.reconfigure(kv=KVConfig("int8"))):
        with pytest.raises(MLXSpecError, match="has been closed"):
            use()


def test_reconfigured(llm: LLM, pair: tuple[Path, Path]) -> None:
    expected = answer(llm)
    with pytest.raises(AttributeError):
        llm.kv = KVConfig("int8")  # type: ignore[misc]
    running = llm.stream(PROMPT, max_tokens=30)
    next(running)
    with pytest.raises(MLXSpecError, match="is generating"):
        llm.reconfigure(kv=KVConfig("int8"))
    running.close()
    llm.reconfigure(kv=KVConfig("int8"), draft=False)
    assert (llm.kv, llm.draft_name) == (KVConfig("int8"), None)
    assert llm._target.pool.int8  # type: ignore[attr-defined]
    with pytest.raises(BadConfig):
        llm.generate(PROMPT, speculation=Speculation(3, "model"))
    llm.reconfigure(kv=KVConfig(), draft=pair[1])
    assert llm.draft_name == str(pair[1])
    assert answer(llm) == expected
    with pytest.raises(BadConfig):
        llm.reconfigure(kv="int8")  # type: ignore[arg-type]


# -- processes of their own ------------------------------------------------------------------------------------------

_BEGINNING = "import sys, threading, mlx_spec; llm = mlx_spec.load(sys.argv[1]); P = list(range(1, 40));"


def run(program: str, pair: tuple[Path, Path]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"XDG_CACHE_HOME": str(pair[0].parent / "cache")}
    return subprocess.run([sys.executable, "-c", _BEGINNING + program, *map(str, pair)], capture_output=True, text=True,
                          timeout=120, env=environment, check=False)  # fmt: skip


def test_a_thousand_requests_of_a_hundred_threads(pair: tuple[Path, Path]) -> None:
    program = """
import os
from concurrent.futures import ThreadPoolExecutor
expected = llm.generate(P, max_tokens=3).tokens
def work(_):
    return [llm.generate(P, max_tokens=3).tokens for _ in range(10)]
with ThreadPoolExecutor(100) as pool:
    answers = [tokens for part in pool.map(work, range(100)) for tokens in part]
print(len(answers), all(tokens == expected for tokens in answers), len(os.listdir("/proc/self/task"))
      if os.path.isdir("/proc/self/task") else 0)
"""
    done = run(program, pair)
    assert (done.returncode, done.stderr) == (0, "")
    count, right, threads = done.stdout.split()
    assert (count, right) == ("1000", "True")
    assert int(threads) < 20


@pytest.mark.parametrize("program", [
    "g = llm.stream(P, max_tokens=None); next(g)",
    "g = llm.stream(P, max_tokens=None); threading.Thread(target=lambda: list(g), daemon=True).start()",
    "[mlx_spec.load(sys.argv[1]).generate(P, max_tokens=3) for _ in range(5)]; llm.close()",
], ids=["suspended", "generating", "several"])  # fmt: skip
def test_a_process_ends(program: str, pair: tuple[Path, Path]) -> None:
    done = run(program, pair)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told(pair: tuple[Path, Path]) -> None:
    program = """
import os
if os.fork() == 0:
    try:
        llm.generate(P, max_tokens=3)
    except mlx_spec.MLXSpecError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    done = run(program, pair)
    assert done.returncode == 0
    assert "forked" in done.stdout


def test_control_c_is_answered_at_once(pair: tuple[Path, Path]) -> None:
    program = """
import _thread, time
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    while True:
        llm.generate(P, max_tokens=400)
except KeyboardInterrupt:
    print("interrupted", len(llm.generate(P, max_tokens=3).tokens))
"""
    done = run(program, pair)
    assert (done.returncode, done.stdout) == (0, "interrupted 3\n")


def test_threads_are_taken_over() -> None:
    names: set[int] = set()
    for _ in range(20):
        worker = Worker()
        names.add(worker.run(threading.get_ident))
        del worker
    assert len(names) == 1
