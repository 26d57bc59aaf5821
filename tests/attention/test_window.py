"""What a window hides, what it keeps, and that nothing else changes: attention against StreamingLLM's definition in
float64, and whole tiny models against themselves."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import cache_positions
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from tiny import fixed, tiny_module

from mlx_spec.architectures.context import prefill
from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.attention.choosing import attention_pass
from mlx_spec.attention.rotary import Rotary
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.engine import Decoding
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.kv import PAGE, PagePool, PageTable
from mlx_spec.settings import Sampling

SIZE = 40
Array = np.ndarray

# One layer of attention.


class Stream:
    """A table, and the un-rotated keys and values of all its positions: also of those that were dropped."""

    def __init__(
        self, pool: PagePool, heads: int, interleaved: bool, sinks: int, window: int | None, seed: int
    ) -> None:
        self.pool, self.heads, self.interleaved = pool, heads, interleaved
        self.rotary = Rotary(initialize_rope(pool.head_dim, cache_positions.THETA, interleaved), pool.head_dim)
        self.frequencies = cache_positions.default_frequencies(pool.head_dim)
        self.table = PageTable(pool, sinks, window)
        self.random = np.random.default_rng(seed)
        self.keys = self.values = np.zeros((pool.kv_heads, 0, pool.head_dim))

    def new_rows(self, rows: int) -> list[Array]:
        """Queries, keys and values."""
        counts = (self.heads, self.pool.kv_heads, self.pool.kv_heads)
        return [self.random.standard_normal((n, rows, self.pool.head_dim)).astype(np.float32) for n in counts]

    def remember(self, keys: Array, values: Array) -> None:
        """What was written; from INT8, what can be read again."""
        if self.pool.int8:
            first = self.keys.shape[1]
            slots = mx.array([self.table.slot(position) for position in range(first, self.table.length)])
            read_keys, read_values = (np.array(part[0], np.float64) for part in self.pool.read(0, slots, mx.float32))
            assert self.pool.divisors[0] is not None
            read_keys *= np.array(self.pool.divisors[0], np.float64)[:, None]
            positions = np.arange(first, self.table.length)
            keys = cache_positions.rotated(read_keys, -positions, self.frequencies, self.interleaved)
            values = read_values
        self.keys = np.concatenate([self.keys, keys], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)

    def rewind(self, length: int) -> None:
        self.table.rewind(length)
        self.keys, self.values = self.keys[:, :length], self.values[:, :length]


def step(streams: Sequence[Stream], rows: int) -> None:
    """One pass over `rows` new positions of each sequence, compared with the reference."""
    first = streams[0]
    for stream in streams:
        stream.table.append(rows)
    attention = attention_pass(first.pool, [stream.table for stream in streams], rows, first.rotary, first.heads)
    new = [stream.new_rows(rows) for stream in streams]
    scale = first.pool.head_dim**-0.5
    output = attention.attend(0, *(mx.array(np.stack(part)) for part in zip(*new, strict=True)), scale)
    assert output.shape == (len(streams), first.heads, rows, first.pool.head_dim)
    for index, (stream, (queries, keys, values)) in enumerate(zip(streams, new, strict=True)):
        stream.remember(keys, values)
        expected = cache_positions.attention(
            queries, stream.keys, stream.values, scale=scale, frequencies=stream.frequencies,
            sinks=stream.table.sinks, window=stream.table.window, interleaved=stream.interleaved,
        )
        np.testing.assert_allclose(np.array(output[index]), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("sinks", "window"), [(0, 65), (4, 65), (4, 100), (70, 70), (70, 128), (64, 65), (4, 1000)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "interleaved"), [(4, 2, 16, False), (3, 1, 8, True)])
def test_attention_is_streaming_attention(
    int8: bool, sinks: int, window: int, heads: int, kv_heads: int, head_dim: int, interleaved: bool
) -> None:
    pool = PagePool(layers=1, kv_heads=kv_heads, head_dim=head_dim, dtype=mx.float32, int8=int8)
    stream = Stream(pool, heads, interleaved, sinks, window, seed=sinks + window)
    chance = random.Random(sinks + window)
    step([stream], 60)
    while stream.table.length < 420:
        for rows in (*chance.sample(range(1, 8), 3), chance.choice([1, 40])):
            before = stream.table.length
            step([stream], rows)
            stream.rewind(chance.randint(before, stream.table.length))
            stream.table.settle(stream.table.length)
    assert (stream.table.dropped > 0) is (window < 300)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_batch_may_have_windows_of_its_own(int8: bool, rows: int) -> None:
    pool = PagePool(layers=1, kv_heads=2, head_dim=8, dtype=mx.float32, int8=int8)
    kinds = [(0, None, 90), (4, 65, 10), (4, 65, 300), (70, 80, 250), (0, 1000, 130)]
    streams = [Stream(pool, 4, False, sinks, window, seed) for seed, (sinks, window, _) in enumerate(kinds)]
    for stream, (_, _, length) in zip(streams, kinds, strict=True):
        step([stream], length)
        stream.table.settle(stream.table.length)
    for _ in range(4):
        step(streams, rows)
        for stream in streams:
            stream.table.settle(stream.table.length)
    assert [stream.table.dropped > 0 for stream in streams[:3]] == [False, False, True]
    assert [stream.table.hides for stream in streams] == [False, False, True, True, False]


@pytest.mark.parametrize("int8", [False, True])
def test_a_batch_in_which_nothing_is_hidden_equals_one_by_one(int8: bool) -> None:
    pool = PagePool(layers=1, kv_heads=2, head_dim=8, dtype=mx.float32, int8=int8)
    streams = [Stream(pool, 4, False, sinks, window, 0) for sinks, window in ((0, None), (4, 500), (70, 80))]
    for length, stream in zip((70, 5, 64), streams, strict=True):
        step([stream], length)
    for rows in (1, 3):
        step(streams, rows)
    assert not any(stream.table.hides for stream in streams)


# Tiny models.


def model_of(seed: int = 1, int8: bool = False, **changes: Any) -> PagedModel:
    return PagedModel(tiny_module(seed, 0.8, tie_word_embeddings=False, **changes), int8=int8)


def text(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, SIZE, length).tolist()


def fed(context: PagedContext, tokens: Sequence[int], chunk: int) -> Array:
    """The logits after each of the last 20 tokens, fed in chunks."""
    rows = []
    for start in range(0, len(tokens), chunk):
        rows.append(np.array(context.extend(tokens[start : start + chunk])))
        context.settle(context.length)
    return np.concatenate(rows)[-20:]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("sinks", "window"), [(0, 65), (4, 65), (70, 90), (4, 128)])
@pytest.mark.parametrize("chunk", [7, 32, 100, 512])
def test_chunks_equal_token_by_token(int8: bool, sinks: int, window: int, chunk: int) -> None:
    tokens = text(400)
    models = [model_of(int8=int8) for _ in range(2)]
    for model in models:
        context = model.new_context()  # both quantize alike
        context.extend(tokens[:50])
        context.close()
    single, chunked = (model.new_context(sinks, window) for model in models)
    np.testing.assert_allclose(fed(chunked, tokens, chunk), fed(single, tokens, 1), atol=2e-3 if int8 else 1e-4, rtol=0)
    assert single.table.dropped == chunked.table.dropped > 0


@pytest.mark.parametrize("int8", [False, True])
def test_nothing_is_hidden_until_sinks_and_window_are_full(int8: bool) -> None:
    tokens = text(100)
    models = [model_of(int8=int8) for _ in range(2)]
    whole, windowed = models[0].new_context(), models[1].new_context(4, 66)
    for start in range(0, 70, 10):
        a, b = (np.array(context.extend(tokens[start : start + 10])) for context in (whole, windowed))
        np.testing.assert_array_equal(a, b)
        windowed.settle(windowed.length)
    a, b = (np.array(context.extend(tokens[70:80])) for context in (whole, windowed))
    assert np.abs(a - b)[0].max() > 1e-3  # the first of them hides position 4


@pytest.mark.parametrize("int8", [False, True])
def test_a_window_larger_than_everything_is_none(int8: bool) -> None:
    tokens = text(300)
    models = [model_of(int8=int8) for _ in range(2)]
    logits = [fed(model.new_context(4, window), tokens, 32) for model, window in zip(models, (None, 4096), strict=True)]
    np.testing.assert_array_equal(*logits)


def test_a_forked_window_goes_on_like_the_other() -> None:
    tokens = text(400)
    parent, alone = model_of().new_context(4, 65), model_of().new_context(4, 65)
    for context in (parent, alone):
        prefill(context, tokens[:301])
    child = parent.fork()
    expected = np.array(alone.extend(tokens[300:310]))
    np.testing.assert_allclose(np.array(child.extend(tokens[300:310])), expected, atol=1e-5, rtol=0)
    child.settle(310)
    np.testing.assert_allclose(np.array(parent.extend(tokens[300:310])), expected, atol=1e-5, rtol=0)
    pool = parent.table.pool
    parent.close()
    np.testing.assert_allclose(
        np.array(child.extend(tokens[310:330])), np.array(alone.extend(tokens[310:330])), atol=1e-5, rtol=0
    )
    child.close()
    assert pool.pages_in_use == 0


@pytest.mark.parametrize("int8", [False, True])
def test_rewinding_across_an_eviction_border_is_exact(int8: bool) -> None:
    """Passes of 8 rows with 0 to 8 taken back; before a page is dropped, at the border, and after it."""
    tokens = text(700)
    model = model_of(int8=int8)
    context, chance, dropped = model.new_context(4, 65), random.Random(0), set()
    fed(context, tokens[:60], 60)
    while context.length < 400:
        length = context.length
        context.extend(text(8, seed=length))  # what is taken back is not what comes
        context.rewind(length)
        kept = chance.randint(1, 8)
        context.extend(tokens[length : length + kept])
        context.settle(context.length)
        dropped.add(context.table.dropped)
    assert len(dropped) > 3
    length = context.length
    straight = model.new_context(4, 65)
    fed(straight, tokens[:length], 1)
    a, b = (np.array(each.extend(tokens[length : length + 20])) for each in (context, straight))
    np.testing.assert_allclose(a, b, atol=2e-3 if int8 else 1e-4, rtol=0)


@pytest.mark.parametrize("int8", [False, True])
def test_a_hundred_thousand_positions_keep_their_size_and_their_sense(int8: bool) -> None:
    """What a row gives depends on the sinks and on the last window of each layer, wherever in the stream it is: so the
    end of a long stream equals that of a short one with the same end."""
    layers, sinks, window, chunk = 2, 4, 128, 250
    module = tiny_module(1, 0.2, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1)
    model = PagedModel(module, int8=int8)
    end = text(layers * window + 50, seed=1)
    stream = text(100_000 - len(end) - sinks, seed=2)
    beginning = text(sinks, seed=3)

    def last(middle: list[int], context: PagedContext) -> tuple[Array, set[int], set[int]]:
        tokens, sizes, pages = [*beginning, *middle, *end], set(), set()
        for start in range(0, len(tokens) - 10, chunk):
            context.extend(tokens[start : min(start + chunk, len(tokens) - 10)], rows=0)
            context.evaluate()
            context.settle(context.length)
            if start > 2 * chunk:
                sizes.add(context.nbytes)
                pages.add(model.pool.pages_in_use)
        return np.array(context.extend(tokens[-10:])), sizes, pages

    context = model.new_context(sinks, window)
    far, sizes, pages = last(stream, context)
    assert context.length == 100_000
    assert len(sizes) == 1
    assert max(pages) <= 1 + -(-window // PAGE) + 1
    context.close()
    near, _, _ = last(stream[:300], model.new_context(sinks, window))
    np.testing.assert_allclose(far, near, atol=(5e-2 if int8 else 1e-5) * np.abs(near).max(), rtol=0)


# With a draft.

LIMIT = 90

SETTINGS = [
    pytest.param(False, 0, None, id="plain"),
    pytest.param(True, 0, None, id="int8"),
    pytest.param(False, 4, 65, id="window"),
    pytest.param(True, 4, 65, id="int8-window"),
    pytest.param(True, 70, 80, id="int8-many-sinks"),
]


def decode(
    target: PagedModel, draft: PagedModel | None, k: int, prompt: Sequence[int], limit: int, sinks: int,
    window: int | None, draft_window: int | None = None,
) -> tuple[list[int], int, int]:
    """Greedy tokens, and how many were drafted and accepted."""
    tokens, sampling = list(prompt), Sampling()
    contexts = [target.new_context(sinks, window)]
    drafting = None
    if draft is not None:
        contexts.append(draft.new_context(sinks, draft_window or window))
        drafting = Drafting([DraftModel(contexts[1], sampling, SIZE)], FixedSchedule(0))
    decoding = Decoding(tokens, contexts[0], drafting, sampling=sampling, seed=0, vocabulary_size=SIZE)
    decoding.prefill()
    rounds = list(fixed(decoding, k).rounds(limit=limit))
    if window is not None:
        for context in contexts:
            held = len(context.table.pages) * PAGE
            assert held <= -(-sinks // PAGE) * PAGE + window + 2 * PAGE
    for model, context in zip((target, draft), contexts, strict=False):
        assert model is not None
        context.close()
        assert model.pool.pages_in_use == 0
    return tokens[len(prompt) :], sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)


@pytest.mark.parametrize(("int8", "sinks", "window"), SETTINGS)
@pytest.mark.parametrize(("seed", "prompt_length"), [(1, 20), (2, 110), (3, 150)])
def test_speculation_changes_nothing(int8: bool, sinks: int, window: int | None, seed: int, prompt_length: int) -> None:
    prompt = text(prompt_length, seed)
    plain, _, _ = decode(model_of(seed, int8), None, 0, prompt, LIMIT, sinks, window)
    fast, drafted, accepted = decode(model_of(seed, int8), model_of(seed + 10), 4, prompt, LIMIT, sinks, window)
    assert fast == plain
    assert accepted < drafted  # so there were rewinds
    same, drafted, accepted = decode(model_of(seed, int8), model_of(seed, int8), 4, prompt, LIMIT, sinks, window)
    assert same == plain
    assert accepted == drafted > 0
    assert len(set(plain)) > 5


def test_a_draft_may_see_less_than_its_target() -> None:
    prompt = text(200)
    plain, _, _ = decode(model_of(), None, 0, prompt, 100, 4, 128)
    fast, drafted, accepted = decode(model_of(), model_of(), 4, prompt, 100, 4, 128, draft_window=65)
    assert fast == plain
    assert 0 < accepted < drafted


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("k", [0, 4])
def test_a_generator_closed_early_leaves_only_what_is_committed(int8: bool, k: int) -> None:
    target, draft = model_of(1, int8), model_of(2, int8)
    contexts = [model.new_context(4, 65) for model in (target, draft)]
    tokens, sampling = text(150), Sampling()
    for rounds in (1, 3, 20):
        drafting = Drafting([DraftModel(contexts[1], sampling, SIZE)], FixedSchedule(0))
        decoding = Decoding(tokens, contexts[0], drafting, sampling=sampling, seed=0, vocabulary_size=SIZE)
        decoding.prefill()
        generator = fixed(decoding, k).rounds(limit=None)
        for _ in range(rounds):
            next(generator)
        generator.close()
        assert contexts[0].length == len(tokens) - 1
        assert contexts[1].length < len(tokens)
        for model, context in zip((target, draft), contexts, strict=True):
            assert model.pool.pages_in_use == len(context.table.pages) <= 4
    for model, context in zip((target, draft), contexts, strict=True):
        context.close()
        assert model.pool.pages_in_use == 0
