"""Text in, text out: a target, perhaps its draft, and their tokenizer. Knows nothing of layers or rounds."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from mlx_spec.architectures.context import LanguageModel
from mlx_spec.attention.window import IN_PASSING, sinks_of
from mlx_spec.calibration.calibrations import Calibrations
from mlx_spec.decoding.engine import Decoding, Round
from mlx_spec.errors import BadConfig
from mlx_spec.llm.completion import Chunk, Completion, FinishReason
from mlx_spec.llm.drafters import Drafters
from mlx_spec.llm.progress import Progress, RoundTotals, counted
from mlx_spec.llm.request import Prompt, check_options, checked_prompt, checked_prompt_ids, checked_stop_tokens
from mlx_spec.llm.statistics import Statistics
from mlx_spec.llm.text_stream import Answer
from mlx_spec.llm.threads import OneThread
from mlx_spec.loading.language_models import language_models
from mlx_spec.loading.loader import LoadedModel, load_pair, wired_limit
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.machine.memory import check_cache_fits
from mlx_spec.settings import KVConfig, Sampling, Speculation


def load(
    model: str | Path, draft: str | Path | Literal[False] | None = None, *, kv: KVConfig | None = None
) -> LLM:
    """Load a target and, if there is one, its draft.

    model, draft: a name of the catalogue, org/name on the hub, a directory, or a .gguf file. draft None is the
    catalogue's draft for `model`, False none at all. kv: how keys and values are kept; None is the catalogue's way.
    Raises ModelNotFound, IncompatiblePair, BadConfig or DoesNotFit.
    """
    if kv is not None and not isinstance(kv, KVConfig):
        raise BadConfig(f"kv is {kv!r}; give a KVConfig, such as KVConfig(window=4096).")
    target, loaded_draft, entry = load_pair(model, draft)
    llm = LLM(target, loaded_draft, kv if kv is not None or entry is None else entry.kv)
    if entry is not None:
        llm.sampling, llm.speculation = entry.sampling, entry.speculation
        llm.template_arguments = dict(entry.template)
    return llm


class LLM:
    """A model in memory, ready to generate.

    Several generations may run beside one another in one thread, whichever it is; a second thread is refused until
    the first one's generations have ended, since what MLX has in flight belongs to the thread that started it.
    """

    def __init__(self, target: LoadedModel, draft: LoadedModel | None = None, kv: KVConfig | None = None) -> None:
        """Raises IncompatiblePair if the draft's ids mean other strings than the target's, and BadConfig if a model
        cannot keep its keys and values as `kv` says."""
        self.name, self.draft_name = target.name, draft.name if draft else None
        self.tokenizer: Tokenizer = target.tokenizer
        self.context_length = target.context_length
        self.sampling, self.speculation = Sampling(), Speculation()
        self.template_arguments: dict[str, Any] = {}
        self.kv = kv = KVConfig() if kv is None else kv
        self._one_thread = OneThread(target.name)
        self._target, self._draft = language_models(target, draft, kv)
        self._drafters = Drafters(
            self._target,
            self._draft,
            draft_name=self.draft_name,
            draft_context_length=draft.context_length if draft else None,
            window=kv.window,
            calibrations=Calibrations(target, draft, kv),
        )
        self.bytes_per_pass = target.bytes_per_pass, draft.bytes_per_pass if draft else 0
        """Bytes of weights that a pass over one row reads, of the target and of the draft; None where that depends on
        the row, as in a mixture of experts."""
        with closing(self._target.new_context()) as context:
            self._columns = context.vocabulary_size
        self.vocabulary_size = min(self.tokenizer.vocabulary_size, self._columns)

    def stream(
        self,
        prompt: Prompt,
        *,
        sampling: Sampling | None = None,
        speculation: Speculation | None = None,
        max_tokens: int | None = 512,
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        raw: bool = False,
        prefill_progress: Progress | None = None,
    ) -> Generator[Chunk, None, None]:
        """Generate, one chunk per target pass. Arguments are checked at once, before the first chunk is asked for.

        prompt: a text (one user turn, if the model has a chat template and `raw` is not set), messages
        ({"role", "content"}), or token ids. max_tokens None is as far as the context reaches. stop: texts that end
        the answer and are not part of it; stop_tokens: ids that do, beside the model's own end tokens.
        prefill_progress(done, total) counts prompt tokens read, by both models.
        Raises BadConfig for an empty prompt, one that the context cannot hold, or values of the wrong type or out of
        range, and MLXSpecError, at the first chunk, where the model's logits are no numbers.
        """
        sampling = self.sampling if sampling is None else sampling
        speculation = self.speculation if speculation is None else speculation
        check_options(sampling, speculation, max_tokens, prefill_progress, self.vocabulary_size)
        drafter = self._drafters.chosen(speculation)
        stops = checked_stop_tokens(stop_tokens, self.vocabulary_size)
        answer = Answer(self.tokenizer, stop, self.tokenizer.end_tokens | stops)
        prompt = checked_prompt(prompt)
        tokens = self._prompt_tokens(prompt, raw)
        limit, planned, sinks = max_tokens, len(tokens) + (max_tokens or 0), 0
        if self.kv.window is not None:
            encode = functools.partial(self._prompt_tokens, raw=raw)
            templated = self.tokenizer.has_chat_template and not raw
            sinks = sinks_of(self.kv, self.name, self.context_length, prompt if templated else None, tokens, encode)
            held = sinks + self.kv.window + IN_PASSING
            planned = held if max_tokens is None else min(planned, held)
        elif self.context_length is not None:
            room = self.context_length - len(tokens)
            if room <= 0:
                raise BadConfig(
                    f"the prompt has {len(tokens)} tokens and {self.name} takes {self.context_length} at most, the "
                    "answer included; shorten it, or give a --window (KVConfig(window=))."
                )
            limit = room if limit is None else min(limit, room)
            planned = min(planned, self.context_length)
        check_cache_fits(planned, sum(model.bytes_to_allocate(planned) for model in self._models))
        return self._chunks(tokens, sampling, speculation, drafter, limit, sinks, answer, prefill_progress)

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer at once. Takes the options of `stream`."""
        return Completion.of(self.stream(prompt, **options))

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """The target's logits after each of `tokens`, (n, vocabulary columns), for evaluation."""
        checked = checked_prompt_ids(checked_prompt(tokens), self._columns)
        chunk, rows = 64, []
        with self._one_thread(), wired_limit(), closing(self._target.new_context()) as context:
            for start in range(0, len(checked), chunk):
                rows.append(context.extend(checked[start : start + chunk]))
                mx.eval(rows[-1])
                context.evaluate()
        return mx.concatenate(rows)

    @property
    def _models(self) -> list[LanguageModel]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def _prompt_tokens(self, prompt: Prompt, raw: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise BadConfig("the prompt is empty; give some text.")
            if raw or not self.tokenizer.has_chat_template:
                return checked_prompt_ids(self.tokenizer.encode(prompt), self._columns)
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) == 0:
            raise BadConfig("the prompt is empty; give at least one token or message.")
        if isinstance(prompt[0], Mapping):
            messages: list[Mapping[str, str]] = list(prompt)  # type: ignore[arg-type]
            prompt = self.tokenizer.chat(messages, **self.template_arguments)
        return checked_prompt_ids(prompt, self._columns)

    def _chunks(
        self,
        tokens: list[int],
        sampling: Sampling,
        speculation: Speculation,
        drafter: str,
        limit: int | None,
        sinks: int,
        answer: Answer,
        prefill_progress: Progress | None,
    ) -> Generator[Chunk, None, None]:
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        prompt_tokens = len(tokens)
        with self._one_thread() as check_thread, wired_limit():
            mx.reset_peak_memory()
            target, drafting = self._target.new_context(sinks, self.kv.window), None
            try:
                drafting = self._drafters.start(
                    drafter, speculation.verification, sampling, sinks, self.vocabulary_size
                )
                decoding = Decoding(
                    tokens, target, drafting, sampling=sampling, seed=seed, vocabulary_size=self.vocabulary_size
                )
                readers = 2 if drafting is not None and drafting.reads(prompt_tokens) else 1
                started = time.perf_counter()
                if limit != 0:
                    decoding.prefill(counted(prefill_progress, (prompt_tokens - 1) * readers))
                prefilled = time.perf_counter()
                if drafting is not None and limit != 0:
                    self._drafters.schedule(drafting, speculation, sampling, target)
                decoded_from = time.perf_counter()
                rounds = decoding.rounds(limit=limit, end_tokens=answer.end_tokens, keep=answer.keep)
                total = RoundTotals()
                try:
                    for finished in rounds:
                        total.add(finished)
                        if finished.ended or total.tokens == limit:
                            break
                        yield Chunk(answer.take(), finished.tokens, finished.logprobs, None, None)
                        check_thread()
                    else:
                        finished = Round([], 0, 0, None, False, None if sampling.top_logprobs is None else [], False)
                finally:
                    rounds.close()
                statistics = Statistics(
                    prompt_tokens=prompt_tokens,
                    completion_tokens=total.tokens,
                    target_passes=total.passes,
                    drafted=total.drafted,
                    accepted=total.accepted,
                    drafter="none" if drafting is None else drafting.name,
                    draft_tokens=speculation.draft_tokens,
                    verification=speculation.verification,
                    by_drafter=total.by_drafter,
                    passes_by_draft_tokens=dict(sorted(total.passes_by_draft_tokens.items())),
                    accepted_by_position=total.accepted_by_position,
                    parked_passes=total.parked,
                    prefill_seconds=prefilled - started,
                    decode_seconds=time.perf_counter() - decoded_from,
                    kv_bytes=target.nbytes + (drafting.nbytes if drafting else 0),
                    peak_memory_bytes=int(mx.get_peak_memory()),
                    seed=seed,
                )
            finally:
                try:
                    target.close()
                finally:
                    if drafting is not None:
                        drafting.close()
        text = answer.take() + answer.finish()
        reason: FinishReason = "stop" if finished.ended or answer.stopped else "length"
        yield Chunk(text, finished.tokens, finished.logprobs, reason, statistics)
