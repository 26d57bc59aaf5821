"""Any other architecture through mlx-lm: its logits, what its caches can take back, and speculation with it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from directories import write_tokenizer
from external_models import BASE, COLUMNS, CONFIGS, module_of
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.utils import load_tokenizer
from tiny import fixed, randomise, tiny_model

from mlx_spec.architectures.context import LanguageModel, prefill
from mlx_spec.architectures.definitions import Decoder, model_classes
from mlx_spec.architectures.external import ExternalModel
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.engine import Decoding, Round
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.llm.llm import LLM
from mlx_spec.loading.loader import LoadedModel
from mlx_spec.loading.tokenizer import Tokenizer
from mlx_spec.settings import Sampling, Speculation

REWINDABLE = ("phi3", "qwen3_moe", "deepseek_v3")
"""Kinds of architecture whose past is nothing but keys and values."""
OBSTACLES = {"gemma3_text": "RotatingKVCache", "gpt_oss": "RotatingKVCache", "llama": "RotatingKVCache",
             "falcon_h1": "ArraysCache", "qwen3_next": "ArraysCache"}
"""What keeps the others from being rewound."""
TOKENS = [(i * 37 + 11) % COLUMNS for i in range(40)]


def full(module: Any, tokens: list[int]) -> np.ndarray:
    """mlx-lm's logits in one pass: (n, vocabulary)."""
    return np.array(module(mx.array([tokens]))[0])


def check(actual: mx.array, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(np.array(actual), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_a_pass_reads_of_a_mixture_is_not_known(kind: str) -> None:
    model: Any = LoadedModel(kind, module_of(kind), None, {}, None)  # type: ignore[arg-type]
    assert (model.bytes_per_pass is None) == (kind in ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"))


# Contexts.


@pytest.mark.parametrize("kind", CONFIGS)
def test_pieces_equal_one_pass(kind: str) -> None:
    module = module_of(kind)
    context = ExternalModel(module).new_context()
    expected = full(module, TOKENS)
    assert (context.length, context.nbytes, context.vocabulary_size) == (0, 0, COLUMNS)
    start = 0
    for count in (5, 1, 1, 4, 14, 1, 3, 11):
        check(context.extend(TOKENS[start : start + count]), expected[start : start + count])
        context.evaluate()
        start += count
        assert context.length == start
    assert start == len(TOKENS)
    assert context.nbytes > 0


@pytest.mark.parametrize("kind", CONFIGS)
def test_prefill_and_rows(kind: str) -> None:
    module = module_of(kind)
    context = ExternalModel(module).new_context()
    prefill(context, TOKENS[:30])
    expected = full(module, TOKENS)
    assert context.length == 29
    check(context.extend(TOKENS[29:34], rows=2), expected[32:34])
    check(context.extend(mx.array(TOKENS[34:36], mx.int32), rows=0), expected[36:36])
    check(context.extend(TOKENS[36:38], rows=3), expected[36:38])
    check(context.extend(TOKENS[38:], rows=2), expected[38:])


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_fork_goes_its_own_way(kind: str) -> None:
    module = module_of(kind)
    parent = ExternalModel(module).new_context()
    check(parent.fork().extend(TOKENS[:3]), full(module, TOKENS[:3]))
    assert parent.length == 0
    parent.extend(TOKENS[:20])
    child = parent.fork()
    other = [7, 6, 5, 4]
    for index in range(4):
        check(child.extend(other[index : index + 1]), full(module, TOKENS[:20] + other)[20 + index : 21 + index])
        check(parent.extend(TOKENS[20 + index : 21 + index]), full(module, TOKENS)[20 + index : 21 + index])
    child.close()
    check(parent.extend(TOKENS[24:]), full(module, TOKENS)[24:])
    assert (child.length, child.nbytes) == (0, 0)


@pytest.mark.parametrize("kind", REWINDABLE)
def test_a_rewind_is_exact(kind: str) -> None:
    module = module_of(kind)
    model = ExternalModel(module)
    context = model.new_context()
    assert model.rewind_obstacle is None
    assert context.can_rewind
    context.extend(TOKENS)
    for kept in (39, 37, 37, 20, 1):
        context.rewind(kept)
        assert context.length == kept
        fresh = model.new_context()
        fresh.extend(TOKENS[:kept])
        for tokens in ([1], [2, 3, 4], [5]):
            np.testing.assert_array_equal(np.array(context.extend(tokens)), np.array(fresh.extend(tokens)))
        context.rewind(kept)
    context.rewind(0)
    check(context.extend(TOKENS), full(module, TOKENS))


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_cannot_be_rewound_says_so(kind: str) -> None:
    module = module_of(kind)
    model = ExternalModel(module)
    context = model.new_context()
    assert model.rewind_obstacle is not None
    assert OBSTACLES[kind] in model.rewind_obstacle
    assert f"({kind})" in model.rewind_obstacle
    assert not context.can_rewind
    context.extend(TOKENS[:20])
    for length in (1, 19):
        with pytest.raises(ValueError, match="cannot be rewound"):
            context.rewind(length)
    context.rewind(20)
    check(context.extend(TOKENS[20:22]), full(module, TOKENS)[20:22])
    context.rewind(0)
    assert context.length == 0
    check(context.extend(TOKENS[:5]), full(module, TOKENS)[:5])


@pytest.mark.parametrize("kind", ["phi3", "falcon_h1"])
@pytest.mark.parametrize("length", [-1, 11])
def test_rewinding_to_where_nothing_is(kind: str, length: int) -> None:
    context = ExternalModel(module_of(kind)).new_context()
    context.extend(TOKENS[:10])
    with pytest.raises(ValueError, match=f"cannot rewind 10 positions to {length}"):
        context.rewind(length)
    assert context.length == 10


def test_a_quantized_cache_can_be_rewound() -> None:
    class Quantized(type(module_of("phi3"))):  # type: ignore[misc]
        def make_cache(self) -> list[Any]:
            return [QuantizedKVCache(group_size=32, bits=8) for _ in self.layers]

    config = BASE | {"model_type": "phi3", "hidden_size": 128}
    module = randomise(Quantized(model_classes(config)[1].from_dict(config)), seed=1, scale=0.1)
    model = ExternalModel(module)
    context, fresh = model.new_context(), model.new_context()
    assert model.rewind_obstacle is None
    # 8 bits and a scale and a bias of 32 bits each in every 32: keys and values, 2 layers, 2 heads of 32.
    assert model.bytes_to_allocate(1) == 2 * 2 * 2 * (32 + 8)
    context.extend(TOKENS)
    context.rewind(20)
    fresh.extend(TOKENS[:20])
    np.testing.assert_allclose(np.array(context.extend([1, 2])), np.array(fresh.extend([1, 2])), atol=1e-5)


@pytest.mark.parametrize(("kind", "floats"), [
    ("phi3", 2 * 2 * 2 * 8),  # keys and values, layers, kv heads, head_dim
    ("qwen3_moe", 2 * 2 * 2 * 8),
    ("deepseek_v3", 2 * (16 + 8)),  # layers, latent and rotated part
    ("gemma3_text", 2 * 2 * 8),  # the window of the other layer does not grow
    ("gpt_oss", 2 * 2 * 8),
    ("falcon_h1", 2 * 2 * 2 * 8),
    ("qwen3_next", 2 * 2 * 8),  # the state of the other layer does not grow
])
def test_bytes_to_allocate(kind: str, floats: int) -> None:
    assert ExternalModel(module_of(kind)).bytes_to_allocate(3) == 3 * 4 * floats


@pytest.mark.parametrize("kind", ["phi3", "deepseek_v3", "gemma3_text", "falcon_h1"])
@pytest.mark.parametrize("length", [0, 15])
def test_an_exception_leaves_a_prefix(monkeypatch: pytest.MonkeyPatch, kind: str, length: int) -> None:
    """All that was there where the cache can be rewound, else nothing; never half a pass."""
    module = module_of(kind)
    context = ExternalModel(module).new_context()
    if length:
        context.extend(TOKENS[:length])
    last = type(module.layers[-1])
    call, calls = last.__call__, 0

    def interrupted(self: Any, *positional: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = call(self, *positional, **named)
        if self is module.layers[-1]:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(last, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        context.extend(TOKENS[length : length + 6])
    monkeypatch.undo()
    assert calls == 2
    assert context.length == (length if context.can_rewind else 0)
    check(context.extend(TOKENS[context.length : 25]), full(module, TOKENS[:25])[length if context.can_rewind else 0 :])


# Speculation.


def decode(
    target: LanguageModel, draft: LanguageModel | None, k: int, count: int = 30
) -> tuple[list[int], list[Round]]:
    """Greedy tokens after a prompt, and the rounds that gave them."""
    tokens = TOKENS[:12]
    drafter = DraftModel(draft.new_context(), Sampling(), COLUMNS) if draft else None
    decoding = Decoding(
        tokens, target.new_context(), drafter and Drafting([drafter], FixedSchedule(0)), sampling=Sampling(), seed=0,
        vocabulary_size=COLUMNS)
    decoding.prefill()
    rounds = list(fixed(decoding, k).rounds(limit=count))
    assert decoding.target.length == len(tokens) - 1
    if drafter is not None:
        assert drafter.context.length <= len(tokens) - 1
    return tokens[12:], rounds


def greedy(module: Any, count: int = 30, columns: int = COLUMNS) -> list[int]:
    """The likeliest of the first `columns` tokens, by mlx-lm's full passes alone."""
    tokens = TOKENS[:12]
    for _ in range(count):
        tokens.append(int(full(module, tokens)[-1, :columns].argmax()))
    return tokens[12:]


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize("kind", REWINDABLE)
def test_speculation_gives_the_plain_tokens(kind: str, k: int) -> None:
    target = ExternalModel(module_of(kind))
    plain, _ = decode(target, None, 0)
    assert plain == greedy(target.module)
    draft = ExternalModel(module_of(kind, seed=1))
    tokens, rounds = decode(target, draft, k)
    assert tokens == plain
    assert sum(finished.drafted for finished in rounds) > 0
    again, rounds = decode(target, target, k)
    assert again == plain
    assert all(finished.accepted == finished.drafted for finished in rounds)


def test_external_and_native_models_draft_for_each_other() -> None:
    native = tiny_model(seed=4, **{key: BASE[key] for key in ("vocab_size", "head_dim", "tie_word_embeddings")})
    external = ExternalModel(module_of("phi3"))
    for target, draft in ((native, external), (external, native)):
        plain, _ = decode(target, None, 0)
        tokens, rounds = decode(target, draft, 3)
        assert tokens == plain
        assert sum(finished.drafted for finished in rounds) > 0


@pytest.mark.parametrize("kind", OBSTACLES)
def test_plain_decoding_where_nothing_can_be_taken_back(kind: str) -> None:
    target = ExternalModel(module_of(kind))
    tokens, rounds = decode(target, None, 0)
    assert tokens == greedy(target.module)
    assert len(rounds) == 30


# The runtime.


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(load_tokenizer(directory))


def loaded(name: str, module: Any, tokenizer: Tokenizer) -> LoadedModel:
    return LoadedModel(name, module, tokenizer, {}, 4096)


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "falcon_h1"])
def test_the_runtime_decodes_plainly_and_says_why(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    target, draft = module_of(kind), module_of("phi3")
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        llm = LLM(loaded("large", target, tokenizer), loaded("small", draft, tokenizer))
    [message] = [record.getMessage() for record in caplog.records]
    assert f"the target ({kind}) keeps its past in {OBSTACLES[kind]}" in message
    assert "plain decoding" in message
    assert "\n" not in message
    options: dict[str, Any] = {"max_tokens": 12, "speculation": Speculation(draft_tokens=3)}
    completion = llm.generate(TOKENS[:12], **options)
    assert (completion.statistics.drafted, completion.statistics.target_passes) == (0, len(completion.tokens))
    assert completion.tokens == greedy(target, 12, tokenizer.vocabulary_size)[: len(completion.tokens)]
    assert len(completion.tokens) > 4
    again = llm.generate(TOKENS[:12], **options)
    assert again.tokens == completion.tokens


@pytest.mark.parametrize("kind", ["gemma3_text", "gpt_oss", "falcon_h1"])
def test_a_draft_that_cannot_take_tokens_back_leaves_lookup(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        llm = LLM(loaded("large", module_of("phi3"), tokenizer), loaded("small", module_of(kind), tokenizer))
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"no drafts by this draft model: it ({kind}) keeps its past in {OBSTACLES[kind]}")
    assert "\n" not in message
    answer = llm.generate(TOKENS[:12], max_tokens=30, speculation=Speculation(3))
    expected = greedy(module_of("phi3"), 30, tokenizer.vocabulary_size)
    assert answer.tokens == expected[: len(answer.tokens)]
    assert answer.statistics.drafter == "lookup"
    assert set(answer.statistics.by_drafter) <= {"lookup"}


@pytest.mark.parametrize("k", [1, 6, 15])
@pytest.mark.parametrize("kind", REWINDABLE)
def test_lookup_drafts_for_every_architecture_that_can_rewind(kind: str, k: int) -> None:
    """Tokens are favoured that came before, so that there is something to find."""
    target, sampling = ExternalModel(module_of(kind)), Sampling(presence_penalty=-4)
    runs = []
    for drafts in (None, Drafting([Lookup(COLUMNS)], FixedSchedule(k))):
        tokens = TOKENS[:12] * 2
        decoding = Decoding(tokens, target.new_context(), drafts, sampling=sampling, seed=0, vocabulary_size=COLUMNS)
        decoding.prefill()
        runs.append((tokens, list(decoding.rounds(limit=40))))
        assert decoding.target.length == len(tokens) - 1
    (plain, _), (looked_up, rounds) = runs
    assert looked_up == plain
    assert {finished.drafter for finished in rounds} >= {"lookup"}
    assert sum(finished.accepted for finished in rounds) > 0


def test_the_runtime_speculates_with_external_models(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    target, draft = module_of("qwen3_moe"), module_of("phi3")
    assert not isinstance(target, Decoder)
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        llm = LLM(loaded("large", target, tokenizer), loaded("small", draft, tokenizer))
    assert not caplog.records
    plain = llm.generate(TOKENS[:12], max_tokens=20, speculation=Speculation(draft_tokens=0))
    fast = llm.generate(TOKENS[:12], max_tokens=20, speculation=Speculation(draft_tokens=3))
    assert fast.tokens == plain.tokens == greedy(target, 20, tokenizer.vocabulary_size)[: len(plain.tokens)]
    assert len(plain.tokens) > 4
    assert fast.statistics.drafted > 0
    assert plain.statistics.drafted == 0
    assert fast.statistics.kv_bytes > plain.statistics.kv_bytes > 0


def test_the_runtime_evaluates_external_models(tokenizer: Tokenizer) -> None:
    llm = LLM(loaded("large", module_of("falcon_h1"), tokenizer))
    check(llm.logits(TOKENS), full(module_of("falcon_h1"), TOKENS))
