"""Text in, text out: a target, perhaps its draft, and their tokenizer. Knows nothing of layers or rounds."""

from __future__ import annotations

import functools
import secrets
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, Self

import mlx.core as mx

from mlx_spec.attention.window import IN_PASSING, sinks_of
from mlx_spec.calibration.calibrations import Calibrations
from mlx_spec.decoding.drafters.building import Drafters
from mlx_spec.decoding.engine import Decoding
from mlx_spec.errors import BadConfig, MLXSpecError
from mlx_spec.llm.completion import Completion
from mlx_spec.llm.evaluation import logits_of
from mlx_spec.llm.generation import Generation
from mlx_spec.llm.request import (
    PrefillProgress,
    Prompt,
    Request,
    check_options,
    checked_prompt,
    checked_prompt_ids,
    checked_stop_tokens,
)
from mlx_spec.llm.text_stream import Answer
from mlx_spec.llm.worker import Worker
from mlx_spec.loading import loader
from mlx_spec.loading.language_models import language_models
from mlx_spec.loading.loader import LoadedModel, Source, wired_limit
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.machine.memory import check_cache_fits
from mlx_spec.settings import KVConfig, Sampling, Speculation

Draft = str | Path | Literal[False] | None


def load(model: str | Path, draft: Draft = None, *, kv: KVConfig | None = None) -> LLM:
    """Load a target and, if there is one, its draft.

    model, draft: a name of the catalogue, org/name on the hub, a directory, or a .gguf file. draft None is the
    catalogue's draft for `model`, False none at all. kv: how keys and values are kept; None is the catalogue's way.
    Raises ModelNotFound, IncompatiblePair, BadConfig or DoesNotFit.
    """
    _check_kv(kv)
    worker = Worker()
    target, loaded_draft, entry = loader.load_pair(
        model, draft, lambda source: worker.run(lambda: loader.load(source))
    )
    llm = LLM(target, loaded_draft, kv if kv is not None or entry is None else entry.kv, worker)
    if entry is not None:
        llm.sampling, llm.speculation = entry.sampling, entry.speculation
        llm.template_arguments = dict(entry.template)
    return llm


class LLM:
    """A model in memory, ready to generate.

    May be used from any thread: requests queue in order, and generations that overlap take turns, round by round. All
    that MLX computes runs on one worker thread. As a context manager it is closed at the end; dropping it frees the
    memory likewise, once none of its generations is held.
    """

    def __init__(
        self, target: LoadedModel, draft: LoadedModel | None = None, kv: KVConfig | None = None,
        worker: Worker | None = None,
    ) -> None:  # fmt: skip
        """worker: the one that loaded the models. Raises IncompatiblePair if the draft's ids mean other strings than
        the target's, and BadConfig if a model cannot keep its keys and values as `kv` says."""
        self.name = target.name
        self.tokenizer: Tokenizer = target.tokenizer
        self.context_length = target.context_length
        self.sampling, self.speculation = Sampling(), Speculation()
        self.template_arguments: dict[str, Any] = {}
        self._worker = Worker() if worker is None else worker
        self._lock = threading.Lock()
        """Held while a request is checked, or the models are changed."""
        self._closed = False
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()
        self._open, self._wired = 0, ExitStack()
        """Generations that have contexts; what is undone when there are none. Both are the worker's."""
        # What is lazy belongs to the thread that made it.
        mx.eval([
            value for model in (target, draft) if model is not None
            for module in model.module.modules() for value in module.values() if isinstance(value, mx.array)
        ])  # fmt: skip
        self._worker.run(functools.partial(self._set_up, target, draft, KVConfig() if kv is None else kv))

    def _set_up(self, target: LoadedModel, draft: LoadedModel | None, kv: KVConfig) -> None:
        """On the worker. Changes nothing where it raises."""
        models = language_models(target, draft, kv)
        self._drafters = Drafters(
            *models,
            draft_name=draft.name if draft else None,
            draft_context_length=draft.context_length if draft else None,
            window=kv.window,
        )
        self._calibrations = Calibrations(target, draft, kv)
        self._target, self._draft = models
        self._loaded, self._kv = (target, draft), kv
        self.draft_name = draft.name if draft else None
        self.bytes_per_pass = target.bytes_per_pass, draft.bytes_per_pass if draft else 0
        """Bytes of weights that a pass over one row reads, of the target and of the draft; None where that depends on
        the row, as in a mixture of experts."""
        with closing(self._target.new_context()) as context:
            self._columns = context.vocabulary_size
        self.vocabulary_size = min(self.tokenizer.vocabulary_size, self._columns)

    @property
    def kv(self) -> KVConfig:
        """How keys and values are kept; `reconfigure` changes it."""
        return self._kv

    def reconfigure(self, *, kv: KVConfig | None = None, draft: Draft | LoadedModel = None) -> None:
        """Keep keys and values in another way, or draft with another model, by the weights that are there.

        None leaves things as they are; draft False is no draft model. What is no longer used is freed. Raises what
        `load` does, and MLXSpecError while a generation has not ended; nothing has changed then.
        """
        _check_kv(kv)
        source = draft if draft is None or draft is False or isinstance(draft, LoadedModel) else loader.resolve(draft)
        with self._lock:
            self._check_open()
            if any(not generation.ended for generation in self._generations):
                raise MLXSpecError(f"{self.name} is generating; end its generations before it is reconfigured.")
            self._worker.run(functools.partial(self._change, self._kv if kv is None else kv, source))

    def _change(self, kv: KVConfig, draft: LoadedModel | Source | Literal[False] | None) -> None:
        target, before = self._loaded
        if isinstance(draft, Source):
            draft = loader.load(draft)
        self._set_up(target, before if draft is None else draft or None, kv)
        mx.clear_cache()

    def close(self) -> None:
        """End its generations, whose last chunk says "cancelled", and free the models. Twice does no harm."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._worker.run(self._tear_down)

    def _tear_down(self) -> None:
        for generation in list(self._generations):
            generation.finish()
        del self._target, self._draft, self._drafters, self._loaded
        mx.clear_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        prefill_progress: PrefillProgress | None = None,
    ) -> Generation:
        """Generate, one chunk per target pass. Arguments are checked at once, before the first chunk is asked for.

        prompt: a text (one user turn, if the model has a chat template and `raw` is not set), messages
        ({"role", "content"}), or token ids. max_tokens None is as far as the context reaches. stop: texts that end
        the answer and are not part of it; stop_tokens: ids that do, beside the model's own end tokens.
        prefill_progress(done, total) counts prompt tokens read, by both models, and is called in the thread that asks
        for the first chunk; not at all where there is nothing to read.
        Raises BadConfig for an empty prompt, one that the context cannot hold, or values of the wrong type or out of
        range; at the first chunk, DoesNotFit where memory has run out and MLXSpecError where the model's logits are no
        numbers.
        """
        with self._lock:
            self._check_open()
            sampling = self.sampling if sampling is None else sampling
            speculation = self.speculation if speculation is None else speculation
            max_tokens = check_options(sampling, speculation, max_tokens, prefill_progress, self.vocabulary_size)
            drafter = self._drafters.chosen(speculation)
            stops = checked_stop_tokens(stop_tokens, self.vocabulary_size)
            answer = Answer(self.tokenizer, stop, self.tokenizer.end_tokens | stops)
            prompt = checked_prompt(prompt)
            tokens = self._prompt_tokens(prompt, raw)
            limit, planned, sinks = self._limits(prompt, tokens, max_tokens, raw)
            models = [self._target] if self._draft is None else [self._target, self._draft]
            check_cache_fits(planned, sum(model.bytes_to_allocate(planned) for model in models))
            seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
            room = None if self._kv.window or not self.context_length else self.context_length - len(tokens)
            request = Request(tokens, sampling, speculation, drafter, limit, room, planned, sinks, seed)
            generation = Generation(
                request, answer, self._worker, begin=self._begin, end=self._end, progress=prefill_progress
            )
            self._generations.add(generation)
        return generation

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer at once. Takes the options of `stream`."""
        with self.stream(prompt, **options) as chunks:
            return Completion.of(chunks)

    def logits(self, tokens: Sequence[int]) -> mx.array:
        """The target's logits after each of `tokens`, (n, vocabulary columns), for evaluation: as generation computes
        them, behind a window where there is one. Raises what `stream` does, and DoesNotFit for too many tokens."""
        with self._lock:
            self._check_open()
            checked = checked_prompt_ids(checked_prompt(tokens), self._columns)
            _, planned, sinks = self._limits(checked, checked, 0, raw=True)
            check_cache_fits(planned, self._target.bytes_to_allocate(planned))
        return self._worker.run(lambda: logits_of(self._target, checked, sinks, self._kv.window))

    def _begin(self, request: Request) -> Decoding:
        """On the worker: open the contexts of a generation."""
        with ExitStack() as opened:
            self._open += 1
            opened.callback(self._end)
            if self._open == 1:
                self._wired.enter_context(wired_limit())
            target = self._target.new_context(request.sinks, self._kv.window)
            opened.callback(target.close)
            ahead = request.speculation.draft_tokens  # a fixed number is drafted past the limit too
            target.reserve(request.planned + (0 if ahead == "auto" else ahead))
            drafting = self._drafters.drafting(
                request.drafter, request.speculation, request.sampling, request.sinks, self.vocabulary_size,
                lambda drafting: self._calibrations.learner(
                    request.sampling, self.vocabulary_size, drafting=drafting
                ),
            )  # fmt: skip
            opened.pop_all()
        return Decoding(
            list(request.tokens), target, drafting, sampling=request.sampling, seed=request.seed,
            vocabulary_size=self.vocabulary_size,
        )  # fmt: skip

    def _end(self) -> None:
        """On the worker: the contexts of a generation have been closed."""
        self._open -= 1
        if self._open == 0:
            mx.synchronize()  # a pass that plain decoding left behind is not for the next one to wait for
            self._wired.close()
            for model in (self._target, self._draft) if not self._closed else ():
                if model is not None:
                    model.trim()

    def _limits(
        self, prompt: Prompt, tokens: list[int], max_tokens: int | None, raw: bool
    ) -> tuple[int | None, int, int]:
        """Tokens of the answer at most, positions held at the same time, and sinks. Raises BadConfig for more than the
        context holds."""
        count = len(tokens)
        if self._kv.window is not None:
            encode = functools.partial(self._prompt_tokens, raw=raw)
            templated = self.tokenizer.has_chat_template and not raw
            sinks = sinks_of(self._kv, self.name, self.context_length, prompt if templated else None, tokens, encode)
            held = sinks + self._kv.window + IN_PASSING
            return max_tokens, held if max_tokens is None else min(count + max_tokens, held), sinks
        planned = count + (max_tokens or 0)
        if self.context_length is None:
            return max_tokens, planned, 0
        room = self.context_length - count
        if room < (max_tokens != 0):
            raise BadConfig(
                f"the prompt has {count} tokens and {self.name} takes {self.context_length} at most, the "
                "answer included; shorten it, or give a --window (KVConfig(window=))."
            )
        return room if max_tokens is None else min(max_tokens, room), min(planned, self.context_length), 0

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

    def _check_open(self) -> None:
        if self._closed:
            raise MLXSpecError(f"{self.name} has been closed; load it again.")


def _check_kv(kv: object) -> None:
    if kv is not None and not isinstance(kv, KVConfig):
        raise BadConfig(f"kv is {kv!r}; give a KVConfig, such as KVConfig(window=4096).")
