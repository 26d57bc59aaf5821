"""One request on its way: the prompt read, rounds run, text cut, time and memory measured. Knows one answer; nothing of
how models are loaded, nor whose turn is next."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Self

import mlx.core as mx

from mlx_spec.decoding.engine import Decoding, Round
from mlx_spec.errors import DoesNotFit, MLXSpecError
from mlx_spec.llm.completion import Chunk, FinishReason
from mlx_spec.llm.request import PrefillProgress, Request
from mlx_spec.llm.statistics import RoundTotals, Statistics
from mlx_spec.llm.text_stream import Answer
from mlx_spec.llm.worker import Worker


class Generation:
    """An answer as it comes: an iterator of chunks, for `for` as for `async for`.

    Any thread may ask for the next chunk, cancel or close it. Models run on the LLM's worker, some of the prompt or one
    round at a time, in turn with other generations, and only while a chunk is asked for. An exception while waiting for
    one, such as Ctrl-C, ends the generation. A context manager closes it, and so does dropping it.
    """

    def __init__(
        self,
        request: Request,
        answer: Answer,
        worker: Worker,
        *,
        begin: Callable[[Request], Decoding],
        end: Callable[[], None],
        progress: PrefillProgress | None,
    ) -> None:
        """begin opens contexts, end is called once they are closed; both on the worker. progress is told in the thread
        that asks for chunks."""
        self.request = request
        self.keeps_contexts = False
        """To be set before the end by those who want to go on from there: `take_contexts`."""
        self.ended = False
        self._answer, self._worker, self._progress = answer, worker, progress
        self._hooks: tuple[Callable[[Request], Decoding], Callable[[], None]] | None = begin, end
        self._decoding: Decoding | None = None
        self._rounds: Generator[Round, None, None] | None = None
        self._kept: Decoding | None = None
        self._last: Chunk | None = None
        self._cancelled = False
        self._totals = RoundTotals()
        self._to_read, self._read, self._told = 0, 0, -1  # tokens of the prompt, by both models
        self._since = self._prefill_seconds = self._decode_seconds = 0.0
        self._peak_memory = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            while not self.ended:
                chunk = self._worker.run(self._step)
                self._tell_progress()
                if chunk is not None:
                    return chunk
        except BaseException:
            self._abandon()
            raise
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            while not self.ended:
                chunk = await self._worker.wait_for(self._step)
                self._tell_progress()
                if chunk is not None:
                    return chunk
        except BaseException:
            self._abandon()
            raise
        raise StopAsyncIteration

    def cancel(self) -> None:
        """End after what is being computed: the next chunk is the last, with finish_reason "cancelled", the text there
        is, and statistics."""
        self._cancelled = True

    def close(self) -> None:
        """End without a last chunk. The memory of its keys and values is free when this returns."""
        self.ended = True
        self._worker.run(self._release)

    async def aclose(self) -> None:
        self.ended = True
        await self._worker.wait_for(self._release)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if self._decoding is not None or self._kept is not None:
            self.ended, self.keeps_contexts = True, False
            self._worker.post(self._release)

    def take_contexts(self) -> Decoding:
        """What there is to go on from: the committed tokens, and contexts that hold all of them but the last.

        Once, and only where `keeps_contexts` was set before the end, of whatever kind that was; else they have been
        closed. Whoever takes them uses and closes them on the LLM's worker. Raises MLXSpecError where there are none.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            raise MLXSpecError("no contexts to hand on: set keeps_contexts before the end, and take them after it.")
        return kept

    def finish(self) -> None:
        """On the worker: end as if cancelled, and leave the last chunk to whoever asks for it. Keeps no contexts."""
        if self._last is None and not self.ended:
            self._last = self._finished("cancelled")
        self.keeps_contexts = False
        self._release()

    def _abandon(self) -> None:
        self.ended = True
        self._worker.post(self._release)  # not waited for: Ctrl-C is to be answered at once

    def _tell_progress(self) -> None:
        if self._progress is not None and self._told < self._read <= self._to_read:
            self._told = self._read
            if self._to_read > 0:
                self._progress(self._read, self._to_read)

    def _step(self) -> Chunk | None:
        """On the worker: read some of the prompt, or run a round. None where no chunk has come of it."""
        if self.ended:
            return None
        if self._last is None:
            self._since = time.perf_counter()
            mx.reset_peak_memory()
            try:
                chunk = self._advance()
            except BaseException as error:
                if not isinstance(error, DoesNotFit) or not self._totals.tokens:
                    self.ended = True
                    self._release()
                    raise
                chunk = self._finished("memory")
            self._tick()
            if chunk is None or chunk.finish_reason is None:
                return chunk
            self._last = chunk
        self.ended = True
        self._release()
        return self._last

    def _advance(self) -> Chunk | None:
        limit = self.request.limit
        if self._cancelled:
            return self._finished("cancelled")
        if self._decoding is None:
            assert self._hooks is not None
            self._decoding = decoding = self._hooks[0](self.request)
            count = len(decoding.tokens)
            readers = 2 if decoding.drafting is not None and decoding.drafting.reads(count) else 1
            self._to_read = (count - 1 - decoding.target.length) * readers if limit != 0 else 0
            if self._to_read > 0:
                return None
        if self._rounds is None:
            if self._read < self._to_read and self._read_prompt(self._decoding):
                return None
            self._tick()
            self._rounds = self._decoding.rounds(
                limit=limit, room=self.request.room, end_tokens=self._answer.end_tokens, keep=self._answer.keep
            )
        finished = next(self._rounds, None)
        if finished is None:
            return self._finished("length")
        self._totals.add(finished)
        if finished.ended or self._totals.tokens == limit:
            return self._finished("stop" if finished.ended else "length", finished)
        return Chunk(self._answer.take(), finished.tokens, finished.logprobs, None, None)

    def _read_prompt(self, decoding: Decoding) -> bool:
        """Read the next piece of the prompt; False once there is none. Prefill goes on where an exception ended it, so
        one is raised after each piece: others get their turn, and a cancelled prompt is not read to its end."""

        def pause(count: int) -> None:
            self._read += count
            raise _PauseError

        try:
            decoding.prefill(pause)
        except _PauseError:
            return True
        self._read = self._to_read
        return False

    def _finished(self, reason: FinishReason, finished: Round | None = None) -> Chunk:
        """The last chunk, with the tokens of the round that `finished` it."""
        self._tick()
        sampling, totals, decoding = self.request.sampling, self._totals, self._decoding
        text = self._answer.take() + self._answer.finish()
        if self._answer.stopped:
            reason = "stop"
        drafting = decoding.drafting if decoding is not None else None
        statistics = Statistics(
            prompt_tokens=len(self.request.tokens),
            completion_tokens=totals.tokens,
            target_passes=totals.passes,
            drafted=totals.drafted,
            accepted=totals.accepted,
            drafter="none" if drafting is None else drafting.name,
            draft_tokens=self.request.speculation.draft_tokens,
            verification=self.request.speculation.verification,
            by_drafter=totals.by_drafter,
            passes_by_draft_tokens=dict(sorted(totals.passes_by_draft_tokens.items())),
            accepted_by_position=totals.accepted_by_position,
            parked_passes=totals.parked,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            kv_bytes=0 if decoding is None else decoding.target.nbytes + (drafting.nbytes if drafting else 0),
            peak_memory_bytes=self._peak_memory,
            seed=self.request.seed,
        )
        logprobs = finished.logprobs if finished is not None else None if sampling.top_logprobs is None else []
        return Chunk(text, finished.tokens if finished is not None else [], logprobs, reason, statistics)

    def _tick(self) -> None:
        """Count the time since the last tick: before there are rounds, as prefill. And what memory was taken since."""
        now = time.perf_counter()
        if self._rounds is None:
            self._prefill_seconds += now - self._since
        else:
            self._decode_seconds += now - self._since
        self._since = now
        self._peak_memory = max(self._peak_memory, mx.get_peak_memory())

    def _release(self) -> None:
        """On the worker: close what is open, each whatever became of the others, and let go of the LLM."""
        hooks, decoding, rounds = self._hooks, self._decoding, self._rounds
        self._hooks = self._decoding = self._rounds = None
        with ExitStack() as stack:  # from the last to the first
            if hooks is not None and decoding is not None:
                stack.callback(hooks[1])
            if self.keeps_contexts:
                self._kept = decoding or self._kept
            else:
                for each in (decoding, self._kept):
                    if each is not None:
                        stack.callback(_close_contexts, each)
                self._kept = None
            if rounds is not None:
                stack.callback(rounds.close)


class _PauseError(Exception):
    """Raised after each piece of the prompt."""


def _close_contexts(decoding: Decoding) -> None:
    try:
        decoding.target.close()
    finally:
        if decoding.drafting is not None:
            decoding.drafting.close()
