"""The runtime on tiny models: how keys and values are kept, what is refused, and what is left after a failure."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from directories import write_tokenizer
from external_models import module_of
from mlx_lm.utils import load_tokenizer
from tiny import tiny_module

from mlx_spec.architectures.paged import PagedModel
from mlx_spec.attention.window import sinks_of
from mlx_spec.errors import BadConfig, DoesNotFit
from mlx_spec.kv import PAGE, pool
from mlx_spec.llm import llm as runtime
from mlx_spec.llm.llm import LLM
from mlx_spec.loading import catalog, loader
from mlx_spec.loading.loader import LoadedModel, Source
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.settings import KVConfig, Sampling, Speculation

CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}<assistant>"
)
PROMPT = np.random.default_rng(0).integers(0, 250, 200).tolist()
PLAIN, DRAFTED = Speculation(draft_tokens=0), Speculation(draft_tokens=4, drafter="model")
Make = Callable[..., LLM]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """Without and with a chat template."""
    found = []
    for options in ({}, {"chat_template": TEMPLATE}):
        directory: Path = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(directory, **options)
        found.append(Tokenizer(load_tokenizer(directory)))
    return found[0], found[1]


@pytest.fixture
def make(tokenizers: tuple[Tokenizer, Tokenizer]) -> Make:
    def model(name: str, seed: int, context: int = CONTEXT) -> LoadedModel:
        module = tiny_module(seed, 0.5, vocab_size=272, tie_word_embeddings=False)
        return LoadedModel(name, module, tokenizers[1], {}, context)

    def made(
        kv: KVConfig | None = None, *, draft: int | None = None, context: int = CONTEXT, draft_context: int = CONTEXT
    ) -> LLM:
        return LLM(model("large", 1, context), None if draft is None else model("small", draft, draft_context), kv)

    return made


def pools_of(llm: LLM) -> list[pool.PagePool]:
    found = [model for model in (llm._target, llm._draft) if model is not None]
    assert all(isinstance(model, PagedModel) for model in found)
    return [model.pool for model in found]  # type: ignore[union-attr]


def in_use(llm: LLM) -> int:
    return sum(each.pages_in_use for each in pools_of(llm))


def allocated(each: pool.PagePool) -> int:
    arrays = [*each.keys, *each.values, *(each.key_scales or []), *(each.value_scales or [])]
    return sum(array.nbytes for array in arrays)


# What is kept.


@pytest.mark.parametrize("kv", [
    KVConfig(), KVConfig("int8"), KVConfig("int8", "int8"), KVConfig(window=65), KVConfig("int8", window=65, sinks=65),
], ids=str)
def test_every_way_decodes_and_reports_what_is_allocated(make: Make, kv: KVConfig) -> None:
    plain = make(kv).generate(PROMPT, max_tokens=60, speculation=PLAIN)
    llm = make(kv, draft=2)
    fast = llm.generate(PROMPT, max_tokens=60, speculation=DRAFTED)
    assert fast.tokens == plain.tokens
    assert fast.statistics.drafted > 0
    assert fast.statistics.kv_bytes == sum(allocated(each) for each in pools_of(llm))
    assert in_use(llm) == 0
    same = make(kv, draft=1)
    if kv.storage == kv.draft_storage:
        again = same.generate(PROMPT, max_tokens=60, speculation=DRAFTED)
        assert again.tokens == plain.tokens
        assert again.statistics.acceptance_rate == 1


def test_int8_takes_half_and_only_where_it_is_asked_for(make: Make) -> None:
    sizes = {}
    for kv in (KVConfig(), KVConfig("int8"), KVConfig("model", "int8"), KVConfig("int8", "int8")):
        llm = make(kv, draft=2)
        llm.generate(PROMPT, max_tokens=4)
        sizes[kv] = [each.nbytes for each in pools_of(llm)]
        assert [each.int8 for each in pools_of(llm)] == [kv.storage == "int8", kv.draft_storage == "int8"]
    whole, target, draft, both = sizes.values()
    small = whole[0] * (8 + 16 / 8) / 32  # of float32 with heads of 8 channels
    assert target == [small, whole[1]]
    assert draft == [whole[0], small]
    assert both == [small, small]


def test_the_default_keeps_everything_as_the_model_computes(make: Make) -> None:
    llm = make()
    assert llm.kv == KVConfig() == KVConfig("model", "model", None, None)
    assert not pools_of(llm)[0].int8


@pytest.mark.parametrize(("name", "kv", "expected"), [
    ("llama-3.3-70b", None, KVConfig("int8")),
    ("llama-3.3-70b", KVConfig(), KVConfig()),
    ("llama-3.1-8b", None, KVConfig()),
])
def test_a_model_of_the_catalogue_is_kept_as_it_says(
    monkeypatch: pytest.MonkeyPatch, tokenizers: tuple[Tokenizer, Tokenizer], name: str, kv: KVConfig | None,
    expected: KVConfig,
) -> None:
    def read(source: Source) -> LoadedModel:
        return LoadedModel(source.name, tiny_module(1, vocab_size=272), tokenizers[1], {}, CONTEXT)

    monkeypatch.setattr(loader, "resolve", lambda name: Source(name, Path(), catalog.find(name)))
    monkeypatch.setattr(loader, "load", read)
    llm = runtime.load(name, kv=kv)
    assert llm.kv == expected
    assert [each.int8 for each in pools_of(llm)] == [expected.storage == "int8", False]
    assert len(llm.generate(PROMPT, max_tokens=4, sampling=Sampling()).tokens) == 4


# Windows.


@pytest.mark.parametrize("draft", [None, 2])
def test_an_unlimited_answer_with_a_window_goes_past_the_context(make: Make, draft: int | None) -> None:
    context = 150
    llm = make(KVConfig(window=65), draft=draft, context=context, draft_context=context)
    endless = Sampling(logit_bias=dict.fromkeys(llm.tokenizer.end_tokens, -math.inf))
    chunks = llm.stream(PROMPT, max_tokens=None, speculation=Speculation(4), sampling=endless)
    tokens: list[int] = []
    sizes = set()
    for chunk in chunks:
        tokens += chunk.tokens
        assert chunk.finish_reason is None
        if len(tokens) > 100:
            sizes.add(sum(each.nbytes for each in pools_of(llm)))
        if len(tokens) > context + 100:
            break
    chunks.close()
    assert len(tokens) > context + 100
    assert len(sizes) == 1
    assert in_use(llm) == 0


def test_a_prompt_longer_than_the_context_needs_a_window(make: Make) -> None:
    prompt = np.random.default_rng(1).integers(0, 250, CONTEXT + 88).tolist()
    with pytest.raises(BadConfig, match=r"600 tokens and large takes 512 at most.*--window"):
        make().generate(prompt)
    answer = make(KVConfig(window=100), draft=2).generate(prompt, max_tokens=20, speculation=DRAFTED)
    assert answer.tokens == make(KVConfig(window=100)).generate(prompt, max_tokens=20, speculation=PLAIN).tokens
    assert answer.statistics.prompt_tokens == 600


def test_without_a_window_an_unlimited_answer_ends_with_the_context(make: Make) -> None:
    answer = make().generate(PROMPT, max_tokens=None)
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == CONTEXT - len(PROMPT)


@pytest.mark.parametrize(("sinks", "window", "fits"), [
    (4, 508, True), (4, 509, False), (256, 256, True), (0, 513, False),
])
def test_sinks_and_window_stay_within_the_context(make: Make, sinks: int, window: int, fits: bool) -> None:
    llm = make(KVConfig(window=window, sinks=sinks))
    if fits:
        llm.generate([1, 2, 3], max_tokens=2)
    else:
        with pytest.raises(BadConfig, match=rf"{sinks} sinks .* {window} .* 512 .* --window of {512 - sinks} at most"):
            llm.stream([1, 2, 3])


def test_a_window_has_four_sinks_unless_it_names_others(make: Make) -> None:
    answers = {}
    for sinks in (None, 0, 4):
        llm = make(KVConfig(window=65, sinks=sinks))
        answers[sinks] = llm.generate(PROMPT, max_tokens=60).tokens
    assert answers[None] == answers[4] != answers[0]
    with pytest.raises(BadConfig, match=r"4 sinks and a window of 509 are more than"):
        make(KVConfig(window=509)).stream([1, 2, 3])


def seen_sinks(llm: LLM, prompt: Any) -> tuple[int, list[int]]:
    """How many sinks a generation has, and the prompt's tokens."""
    tokens = llm._prompt_tokens(prompt, raw=False)
    encode = functools.partial(llm._prompt_tokens, raw=False)
    return sinks_of(llm.kv, llm.name, llm.context_length, prompt, tokens, encode), tokens


def test_the_system_prompt_is_kept_whole(make: Make, tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    llm = make(KVConfig(window=100, sinks="system"))
    system, tokenizer = {"role": "system", "content": "Answer in verse."}, tokenizers[1]
    beginning = tokenizer._encode_plain("<system>Answer in verse.</system><user>")
    for user in ("A", "b", "hello there", "Answer"):
        messages = [system, {"role": "user", "content": user}]
        sinks, tokens = seen_sinks(llm, messages)
        assert tokens[:sinks] == beginning
        assert tokenizer.decode(tokens[:sinks]).startswith("<system>Answer in verse.</system>")
        assert tokenizer.decode(tokens[sinks:]).startswith(user)
        longer = [*messages, {"role": "assistant", "content": "yes"}, {"role": "user", "content": user}]
        assert seen_sinks(llm, longer)[0] == sinks
    assert seen_sinks(llm, [{"role": "system", "content": "No."}, {"role": "user", "content": "x"}])[0] < sinks
    sinks, tokens = seen_sinks(llm, "hello")
    assert tokenizer.decode(tokens[:sinks]) == "<user>"
    llm.generate([system, {"role": "user", "content": "hello " * 60}], max_tokens=3)


def test_too_many_sinks_for_the_context_do_not_ask_for_a_smaller_window(make: Make) -> None:
    with pytest.raises(BadConfig, match=r"400 sinks .* use fewer sinks"):
        make(KVConfig(window=400, sinks=400)).stream([1, 2, 3])


@pytest.mark.parametrize("options", [{"prompt": "hello", "raw": True}, {"prompt": [1, 2, 3]}])
def test_system_sinks_need_a_conversation(make: Make, options: dict[str, Any]) -> None:
    llm = make(KVConfig(window=100, sinks="system"))
    with pytest.raises(BadConfig, match=r"'system' needs messages and a chat template; give a number"):
        llm.stream(**options)


def test_a_system_prompt_longer_than_the_window_is_refused(make: Make) -> None:
    llm = make(KVConfig(window=65, sinks="system"))
    messages = [{"role": "system", "content": "verse " * 30}, {"role": "user", "content": "x"}]
    with pytest.raises(BadConfig, match=r"window of 65 tokens is smaller than the \d+ sinks; give a --window of"):
        llm.stream(messages)


@pytest.mark.parametrize(("draft_context", "window"), [(300, 120), (220, 120), (219, 119), (166, 66), (165, 65)])
def test_the_draft_sees_no_more_than_its_own_context(make: Make, draft_context: int, window: int) -> None:
    kv = KVConfig(window=120, sinks=100)
    llm = make(kv, draft=2, draft_context=draft_context)
    stream = llm.stream(PROMPT, max_tokens=130, speculation=DRAFTED)
    tokens: list[int] = []
    drafted = 0
    with mock.patch.object(llm._draft, "new_context", wraps=llm._draft.new_context) as opened:  # type: ignore[union-attr]
        for chunk in stream:
            tokens += chunk.tokens
            drafted = chunk.statistics.drafted if chunk.statistics else 0
    opened.assert_called_once_with(100, window)
    assert drafted > 0
    assert tokens == make(kv).generate(PROMPT, max_tokens=130, speculation=PLAIN).tokens


@pytest.mark.parametrize("draft_context", [164, 99, 1])
def test_a_draft_without_room_for_sinks_and_a_round_does_not_draft(
    make: Make, caplog: pytest.LogCaptureFixture, draft_context: int
) -> None:
    kv = KVConfig(window=120, sinks=100)
    llm = make(kv, draft=2, draft_context=draft_context)
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        answer = llm.generate(PROMPT, max_tokens=100, speculation=DRAFTED)
    expected = f"the draft's context of {draft_context} tokens has no room for 100 sinks and 65 more: no drafts by it"
    assert [record.message for record in caplog.records] == [expected]
    assert answer.statistics.drafted == 0
    assert answer.tokens == make(kv).generate(PROMPT, max_tokens=100, speculation=PLAIN).tokens
    caplog.clear()
    llm.generate(PROMPT, max_tokens=2, speculation=PLAIN)  # nobody asked for drafts
    assert not caplog.records
    assert in_use(llm) == 0


def test_whether_the_draft_has_room_is_decided_for_each_system_prompt(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    llm = make(KVConfig(window=120, sinks="system"), draft=2, draft_context=150)
    user = {"role": "user", "content": "hello " * 10}
    long = {"role": "system", "content": "verse " * 15}
    assert llm.generate([user], max_tokens=30, speculation=DRAFTED).statistics.drafted > 0
    assert not caplog.records
    assert llm.generate([long, user], max_tokens=30, speculation=DRAFTED).statistics.drafted == 0
    assert "no room" in caplog.text
    assert llm.generate([user], max_tokens=30, speculation=DRAFTED).statistics.drafted > 0


# Refusals.


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("kv", [KVConfig("int8", "int8"), KVConfig(window=100)])
def test_other_architectures_are_refused_with_the_list(
    tokenizers: tuple[Tokenizer, Tokenizer], role: str, kv: KVConfig
) -> None:
    external = LoadedModel("other", module_of("phi3"), tokenizers[0], {}, CONTEXT)
    native = LoadedModel("own", tiny_module(0, vocab_size=272), tokenizers[0], {}, CONTEXT)
    pair = (external, native) if role == "target" else (native, external)
    with pytest.raises(BadConfig, match=r"other \(phi3\) .* are llama, .*qwen2.*; leave --kv, --draft-kv") as caught:
        LLM(*pair, kv)
    assert "\n" not in str(caught.value)
    LLM(*pair, KVConfig())
    # What only concerns the other one does not matter.
    LLM(*pair, KVConfig("int8") if role == "draft" else KVConfig("model", "int8"))


# A pool that cannot grow.


@pytest.mark.parametrize("kv", [KVConfig(), KVConfig("int8")], ids=str)
@pytest.mark.parametrize("speculation", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_a_pool_that_cannot_grow_ends_one_request_only(
    make: Make, monkeypatch: pytest.MonkeyPatch, kv: KVConfig, speculation: Speculation
) -> None:
    expected = make(kv).generate(PROMPT[:20], max_tokens=100, speculation=PLAIN).tokens
    llm = make(kv, draft=2)
    living = llm.stream(PROMPT[:20], max_tokens=100, speculation=speculation)
    tokens = list(next(living).tokens)
    pages = in_use(llm)
    monkeypatch.setattr(pool, "available_memory", lambda: 1000)
    refused = r"no memory for \d+ more tokens .* GB\) beside [1-9].*--kv int8, or a --window"
    with pytest.raises(DoesNotFit, match=refused):
        llm.generate(PROMPT * 2, max_tokens=4, speculation=speculation)
    assert in_use(llm) == pages  # what the failed one had is free again
    for chunk in living:
        tokens += chunk.tokens
    assert tokens == expected
    assert llm.generate(PROMPT[:20], max_tokens=100, speculation=speculation).tokens == expected  # fits what is there
    monkeypatch.undo()
    assert len(llm.generate(PROMPT * 2, max_tokens=4, speculation=speculation).tokens) == 4
    assert in_use(llm) == 0


def test_an_allocation_that_fails_is_an_error_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    before = llm.generate(PROMPT[:20], max_tokens=8).tokens

    def fail(*_: Any, **__: Any) -> mx.array:
        raise RuntimeError("[malloc] Unable to allocate 123 bytes.")

    monkeypatch.setattr(pool.PagePool, "_blank", fail)
    with pytest.raises(DoesNotFit, match=r"no memory for \d+ more tokens"):
        llm.generate(PROMPT * 2, max_tokens=4)
    assert llm.generate(PROMPT[:20], max_tokens=8).tokens == before
    monkeypatch.undo()
    assert len(llm.generate(PROMPT * 2, max_tokens=4).tokens) == 4
    assert in_use(llm) == 0


@pytest.mark.parametrize("speculation", [PLAIN, DRAFTED], ids=["plain", "drafted"])
def test_memory_that_runs_out_in_the_middle_of_an_answer_keeps_what_was_said(
    make: Make, monkeypatch: pytest.MonkeyPatch, speculation: Speculation
) -> None:
    """Where the answer has no limit, so that there was no room to reserve."""
    expected = make().generate(PROMPT[:20], max_tokens=300, speculation=PLAIN).tokens
    llm = make(draft=2)
    stream = llm.stream(PROMPT[:20], max_tokens=None, speculation=speculation)
    tokens = list(next(stream).tokens)
    monkeypatch.setattr(pool, "available_memory", lambda: 0)
    chunks = list(stream)
    tokens += [token for chunk in chunks for token in chunk.tokens]
    assert (chunks[-1].finish_reason, chunks[-1].statistics.completion_tokens) == ("memory", len(tokens))
    assert PAGE - 20 - 4 < len(tokens) < 300  # what is on the way when a page is full is lost
    assert tokens == expected[: len(tokens)]
    assert in_use(llm) == 0
    with pytest.raises(DoesNotFit):  # before its first token there is nothing to keep
        llm.generate(PROMPT * 2, max_tokens=4, speculation=speculation)


@pytest.mark.parametrize("kv", [KVConfig(), KVConfig("int8", window=65)], ids=str)
@pytest.mark.parametrize("chunks", [0, 1, 10])
def test_a_stream_closed_early_leaks_no_pages(make: Make, kv: KVConfig, chunks: int) -> None:
    llm = make(kv, draft=2)
    stream = llm.stream(PROMPT, max_tokens=100, speculation=DRAFTED)
    for _ in range(chunks):
        next(stream)
    stream.close()
    assert in_use(llm) == 0


def test_int8_answers_do_not_depend_on_what_was_asked_before(make: Make) -> None:
    kv = KVConfig("int8")
    fresh = make(kv)
    expected = fresh.logits(PROMPT)
    used = make(kv)
    used.logits([3])
    used.generate([5, 6], max_tokens=3)
    assert mx.array_equal(used.logits(PROMPT), expected).item()


# What evaluation sees is what generation sees.


@pytest.mark.parametrize("kv", [KVConfig(window=65, sinks=4), KVConfig("int8", window=70), KVConfig()], ids=str)
def test_logits_are_those_of_generation(make: Make, kv: KVConfig) -> None:
    """One token after the other, behind the window that there is."""
    llm = make(kv)
    sinks = 0 if kv.window is None else 4
    context = llm._target.new_context(sinks, kv.window)
    expected = []
    for token in PROMPT[:200]:
        expected.append(np.array(context.extend([token]).astype(mx.float32))[0])
        context.evaluate()
        context.settle(context.length)
    context.close()
    found = np.array(llm.logits(PROMPT[:200]).astype(mx.float32))
    np.testing.assert_allclose(found, np.array(expected), atol=2e-3)
    if kv.window is not None:
        everything = np.array(make(KVConfig(kv.storage)).logits(PROMPT[:200]).astype(mx.float32))
        assert np.abs(found[150:] - everything[150:]).max() > 0.01
    assert in_use(llm) == 0


def test_logits_of_more_tokens_than_there_are_positions_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadConfig, match=f"takes {CONTEXT} at most"):
        make().logits([5] * (CONTEXT + 1))
    assert make().logits([5] * CONTEXT).shape[0] == CONTEXT
    assert make(KVConfig(window=65)).logits([5] * (CONTEXT + 100)).shape[0] == CONTEXT + 100
    monkeypatch.setattr("mlx_spec.llm.evaluation.available_memory", lambda: 1000)
    with pytest.raises(DoesNotFit, match="logits of 300 tokens need"):
        make().logits([5] * 300)


@pytest.mark.parametrize("speculation", [PLAIN, Speculation(8, "model"), Speculation(15, "lookup")], ids=str)
def test_room_for_an_answer_is_made_once(
    make: Make, monkeypatch: pytest.MonkeyPatch, speculation: Speculation
) -> None:
    """For the prompt, the answer and, with a fixed number of drafts, what its last round drafts past the limit."""
    llm = make(draft=2)
    grown: list[pool.PagePool] = []
    grow = pool.PagePool._grow
    monkeypatch.setattr(pool.PagePool, "_grow", lambda self, *a: (grown.append(self), grow(self, *a))[1])
    for count in (90, 91, 120):
        llm.generate(PROMPT[:count], max_tokens=2 * PAGE - count, speculation=speculation)
    assert grown.count(llm._target.pool) == 1  # type: ignore[attr-defined]
