"""The round loop on tiny models: exact stops, the invariant after every kind of exit, penalties, log-probabilities."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from reference import TableModel, count, exact_distribution
from tiny import fixed, tiny_model

from mlx_spec.architectures.context import Context, prefill
from mlx_spec.architectures.paged import PagedContext, PagedModel
from mlx_spec.decoding import engine
from mlx_spec.decoding.drafters.draft_model import DraftModel
from mlx_spec.decoding.drafters.lookup import Lookup
from mlx_spec.decoding.drafting import Drafting
from mlx_spec.decoding.engine import Decoding, Round
from mlx_spec.decoding.schedule.schedule import FixedSchedule
from mlx_spec.decoding.verification import verify_block, verify_tokenwise
from mlx_spec.errors import MLXSpecError
from mlx_spec.kv import PageTable
from mlx_spec.settings import Sampling

SIZE = 40
PROMPT = [3, 17, 8, 25, 3]
GREEDY = Sampling()


def _model(seed: int, **changes: Any) -> PagedModel:
    return tiny_model(seed, 0.8, tie_word_embeddings=False, **changes)


TARGET, SAME, OTHER = _model(1), _model(1), _model(2)


class Run:
    """A Decoding, its contexts and models, and what it gave."""

    def __init__(
        self,
        target: Any = TARGET,
        draft: Any = OTHER,
        sampling: Sampling = GREEDY,
        *,
        prompt: Sequence[int] = PROMPT,
        size: int = SIZE,
        seed: int = 0,
        draft_context_length: int | None = None,
    ) -> None:
        self.models = target, draft
        self.sampling, self.size = sampling, size
        self.tokens, self.start = list(prompt), len(prompt)
        self.target = target.new_context()
        self.draft = draft and DraftModel(draft.new_context(), sampling, size, draft_context_length)
        self.drafting = self.draft and Drafting([self.draft], FixedSchedule(0))
        self.rounds: list[Round] = []
        self.begin(seed)

    def begin(self, seed: int = 0) -> None:
        """A new Decoding on the same contexts and tokens."""
        self.decoding = Decoding(
            self.tokens, self.target, self.drafting, sampling=self.sampling, seed=seed, vocabulary_size=self.size
        )
        self.decoding.prefill()

    def go(self, k: int = 3, limit: int | None = 40, **options: Any) -> list[int]:
        """Generate to the end; the tokens made since the prompt."""
        for finished in fixed(self.decoding, k).rounds(limit=limit, **options):
            self.rounds.append(finished)
        return self.made

    def some(self, k: int, rounds: int, limit: int | None = None) -> None:
        """Generate so many rounds, then close the generator."""
        generator = fixed(self.decoding, k).rounds(limit=limit)
        for _ in range(rounds):
            self.rounds.append(next(generator))
        generator.close()

    @property
    def made(self) -> list[int]:
        return self.tokens[self.start :]

    def check(self) -> None:
        """The invariant: both contexts hold what a fresh context holds after the committed tokens."""
        assert self.target.length == len(self.tokens) - 1
        _assert_holds(self.models[0], self.target, self.tokens)
        if self.draft is not None:
            assert self.draft.context.length < len(self.tokens)
            _assert_holds(self.models[1], self.draft.context, self.tokens)


def _keys_and_values(context: PagedContext) -> np.ndarray:
    """(2, layers, kv_heads, length, head_dim)"""
    pool, slots = context.table.pool, mx.array([context.table.slot(i) for i in range(context.length)], mx.int32)
    return np.array([[np.array(mx.take(array[0], slots, axis=1)) for array in arrays]
                     for arrays in (pool.keys, pool.values)])  # fmt: skip


def _assert_holds(model: Any, context: Any, tokens: Sequence[int]) -> None:
    held = list(tokens[: context.length])
    if isinstance(model, TableModel):
        assert context.tokens == held
        return
    if not held:
        return
    fresh = model.new_context()
    fresh.extend(held, rows=1)
    np.testing.assert_allclose(_keys_and_values(context), _keys_and_values(fresh), atol=2e-4, rtol=1e-3)
    fresh.close()


def _logits(model: PagedModel, tokens: Sequence[int]) -> np.ndarray:
    """(n, columns), from one pass."""
    context = model.new_context()
    rows = np.array(context.extend(list(tokens)))
    context.close()
    return rows


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    rows = rows - rows.max(-1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


def _reference(model: PagedModel, sampling: Sampling, length: int) -> list[int]:
    """Greedy tokens one by one, without engine, cache or MLX's sampling."""
    tokens = list(PROMPT)
    for _ in range(length):
        row = _logits(model, tokens)[-1]
        tokens.append(int(np.argmax(exact_distribution(row, sampling, SIZE, count(tokens, SIZE)))))
    return tokens[len(PROMPT) :]


@pytest.fixture(scope="module")
def plain() -> list[int]:
    """60 greedy tokens of TARGET after PROMPT."""
    made = Run(draft=None).go(0, 60)
    assert made == _reference(TARGET, GREEDY, 60)
    assert len(set(made)) > 15
    assert all(first != second for first, second in pairwise(made[:8]))
    return made


# -- the output --------------------------------------------------------------------------------------------------


PENALISED = Sampling(temperature=1, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.2)


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1), PENALISED], ids=["greedy", "temperature", "penalties"]
)
def test_a_draft_equal_to_the_target_is_always_accepted(sampling: Sampling) -> None:
    run = Run(draft=SAME, sampling=sampling)
    for finished in fixed(run.decoding, 4).rounds(limit=200):
        run.rounds.append(finished)
        assert finished.accepted == finished.drafted
        assert len(finished.tokens) == finished.drafted + 1
        run.check()
        assert run.draft.context.length >= len(run.tokens) - 2
    assert len(run.made) == 200
    assert len(run.rounds) == 40
    np.testing.assert_allclose(
        np.array(run.target.extend(run.tokens[-1:]))[0], _logits(TARGET, run.tokens)[-1], atol=1e-3
    )


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_greedy_equals_plain_decoding_whatever_the_draft(k: int, plain: list[int]) -> None:
    run = Run()
    assert run.go(k, 60) == plain
    assert sum(finished.accepted for finished in run.rounds) < sum(finished.drafted for finished in run.rounds)
    assert [token for finished in run.rounds for token in finished.tokens] == plain
    run.check()


def test_a_draft_sometimes_right_is_accepted_in_part() -> None:
    """Runs of every length from 0 to K: a table and a copy of it with a third of its rows replaced."""
    target = TableModel.random(1, SIZE)
    table = np.array(target.table)
    wrong = np.random.default_rng(0).random((SIZE, SIZE)) < 0.3
    table[wrong] = np.random.default_rng(1).standard_normal((int(wrong.sum()), SIZE))
    expected = Run(target, None).go(0, 150)
    run = Run(target, TableModel(table))
    for finished in fixed(run.decoding, 4).rounds(limit=150):
        run.rounds.append(finished)
        run.check()
    assert run.made == expected
    assert {finished.accepted for finished in run.rounds} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("draft", [None, SAME, OTHER], ids=["no draft", "same", "other"])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_limit_is_exact(k: int, draft: PagedModel | None, plain: list[int]) -> None:
    for limit in (0, 1, 2, 5, 13):
        run = Run(draft=draft)
        assert run.go(k, limit) == plain[:limit]
        assert sum(len(finished.tokens) for finished in run.rounds) == limit
        assert not any(finished.ended for finished in run.rounds)
        run.check()


@pytest.mark.parametrize("k", [0, 3])
def test_no_limit(k: int, plain: list[int]) -> None:
    run = Run()
    run.some(k, 30)
    assert len(run.made) >= 30
    assert run.made[:60] == plain[: len(run.made)]
    run.check()


def test_limit_of_none_ends_at_an_end_token(plain: list[int]) -> None:
    run = Run(draft=SAME)
    run.go(3, None, end_tokens={plain[20]})
    assert run.made == plain[: plain.index(plain[20]) + 1]


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("draft", [SAME, OTHER], ids=["same", "other"])
def test_an_end_token_stops_exactly_there(k: int, draft: PagedModel, plain: list[int]) -> None:
    for place in range(12):
        end = plain[place]
        run = Run(draft=draft)
        assert run.go(k, 40, end_tokens={end, 39 if 39 not in plain else 0}) == plain[: plain.index(end) + 1]
        assert [finished.ended for finished in run.rounds] == [False] * (len(run.rounds) - 1) + [True]
        run.check()


def test_an_end_token_inside_an_accepted_run_is_reported(plain: list[int]) -> None:
    run = Run(draft=SAME)
    run.go(5, 40, end_tokens={plain[2]})
    [only] = run.rounds
    assert only == Round(plain[:3], 5, 5, "model", False, None, True)


def test_the_first_end_token_wins_and_those_of_the_prompt_do_not_count(plain: list[int]) -> None:
    run = Run(draft=SAME)
    assert run.go(5, 40, end_tokens=[plain[4], plain[1], PROMPT[0]]) == plain[:2]


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("k", [0, 1, 5])
def test_keep_cuts_inside_a_run(k: int, penalty: float) -> None:
    """Also to nothing, and also where penalties count what was committed."""
    sampling = Sampling(presence_penalty=penalty)
    expected = Run(draft=None, sampling=sampling).go(0, 20)
    for cut in range(10):
        seen: list[int] = []

        def keep(tokens: Sequence[int], cut: int = cut, seen: list[int] = seen) -> int | None:
            left = cut - len(seen)
            seen.extend(tokens)
            return left if left < len(tokens) else None

        run = Run(draft=SAME, sampling=sampling)
        assert run.go(k, 40, keep=keep) == expected[:cut]
        assert seen == expected[: len(seen)]
        assert cut < len(seen) <= cut + k + 1
        assert run.rounds[-1].ended
        run.check()


def test_keep_sees_no_token_after_an_end_token(plain: list[int]) -> None:
    seen: list[int] = []
    run = Run(draft=SAME)
    run.go(5, 40, end_tokens={plain[2]}, keep=lambda tokens: seen.extend(tokens))
    assert seen == plain[:3]


def test_rounds_say_what_was_drafted_and_accepted(plain: list[int]) -> None:
    run = Run()
    run.go(3, 30)
    assert all(finished.accepted + 1 == len(finished.tokens) for finished in run.rounds)
    assert {finished.drafted for finished in run.rounds[:-3]} == {3}


# -- the invariant ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("cheap", [True, False])
def test_closing_at_any_yield(k: int, cheap: bool, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedContext, "chains_cheaply", property(lambda self: cheap))
    for draft in (SAME, OTHER):
        for rounds in range(7):
            run = Run(draft=draft)
            run.some(k, rounds)
            run.check()
            run.begin()
            run.go(k, 6)
            assert run.made == plain[: len(run.made)]
            run.check()


@pytest.mark.parametrize("cheap", [True, False])
@pytest.mark.parametrize("draft", [None, TableModel.random(2, SIZE)], ids=["no draft", "draft"])
def test_a_target_that_cannot_be_rewound(cheap: bool, draft: TableModel | None) -> None:
    """Nothing runs ahead and nothing is drafted, so there is never anything to take back."""
    table = np.array(TableModel.random(1, SIZE).table)
    expected = Run(TableModel(table), None).go(0, 12)
    for rounds in range(6):
        run = Run(TableModel(table, can_rewind=False, chains_cheaply=cheap), draft)
        run.some(3, rounds)
        run.check()
        assert run.target.passes == 1 + rounds
        run.begin()
        assert run.go(3, 12 - rounds) == expected


def test_a_draft_that_cannot_be_rewound_is_not_asked() -> None:
    table = np.array(TableModel.random(1, SIZE).table)
    run = Run(TableModel(table), TableModel(table[::-1], can_rewind=False))
    assert run.go(3, 12) == Run(TableModel(table), None).go(0, 12)
    assert sum(finished.drafted for finished in run.rounds) == 0


@pytest.mark.parametrize("value", [mx.nan, mx.inf])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("k", [0, 3])
def test_logits_that_are_no_numbers_are_said(
    k: int, temperature: float, value: float, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, extend = Run(sampling=Sampling(temperature=temperature)), PagedContext.extend
    run.some(k, 2)
    before = list(run.tokens)

    def broken(self: PagedContext, *arguments: Any, **options: Any) -> mx.array:
        logits = extend(self, *arguments, **options)
        return logits.at[0, 7].add(value) if self is run.target else logits

    with monkeypatch.context() as patch:
        patch.setattr(PagedContext, "extend", broken)
        with pytest.raises(MLXSpecError, match=r"logits are not numbers.*download it again"):
            run.go(k)
    assert run.tokens == before
    run.check()
    if temperature == 0:
        assert run.go(k) == plain[:40 + len(before) - len(PROMPT)]


def test_logits_may_forbid_tokens_and_be_anything_past_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    extend = PagedContext.extend

    def odd(self: PagedContext, *arguments: Any, **options: Any) -> mx.array:
        logits = extend(self, *arguments, **options)
        return logits.at[:, 7].add(-mx.inf).at[:, 39].add(mx.nan)

    monkeypatch.setattr(PagedContext, "extend", odd)
    made = Run(size=39).go(3, 20)
    assert len(made) == 20
    assert not {7, 39} & set(made)


class Broken(Exception):
    pass


def _breaks(call: Callable[..., Any], at: int, after: bool) -> Callable[..., Any]:
    """`call`, but its call number `at` raises, before or after doing its work."""
    calls = 0

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise Broken
        result = call(*arguments, **options)
        if calls == at:
            raise Broken
        return result

    return broken


def _assert_recovers(run: Run, plain: list[int], k: int) -> None:
    run.check()
    assert run.made == plain[: len(run.made)]
    run.begin()
    length = len(run.made) + 10
    assert run.go(k, 10) == plain[:length]
    run.check()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("k", "where"), [(0, "target"), (1, "target"), (1, "draft"), (3, "target"), (3, "draft")]
)
def test_an_exception_inside_a_pass(
    k: int, where: str, after: bool, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for at in range(1, 8):
        for draft in (SAME, OTHER):
            run = Run(draft=draft)
            context = run.target if where == "target" else run.draft.context
            with monkeypatch.context() as patch:
                patch.setattr(context, "extend", _breaks(context.extend, at, after))
                with pytest.raises(Broken):
                    run.go(k, 60)
            _assert_recovers(run, plain, k)


@pytest.mark.parametrize("k", [0, 3])
def test_an_exception_between_two_layers(k: int, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for role in (0, 1):
        for at in (1, 2, 3, 6) if role == 0 or k else ():
            run = Run()
            second = run.models[role].module.model.layers[1]
            with monkeypatch.context() as patch:
                patch.setattr(type(second.mlp), "__call__", _breaks(type(second.mlp).__call__, at, False))
                with pytest.raises(Broken):
                    run.go(k, 60)
            _assert_recovers(run, plain, k)


@pytest.mark.parametrize(
    ("k", "name"),
    [
        *((0, name) for name in ("distribution", "draw", "log_probabilities", "_cut")),
        *((3, name) for name in ("distribution", "log_probabilities", "_seen_by_row", "_cut")),
    ],
)
def test_an_exception_while_verifying(k: int, name: str, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 5):
        run = Run(sampling=Sampling(top_logprobs=2))
        with monkeypatch.context() as patch:
            patch.setattr(engine, name, _breaks(getattr(engine, name), at, False))
            with pytest.raises(Broken):
                run.go(k, 60)
        _assert_recovers(run, plain, k)


@pytest.mark.parametrize("k", [0, 3])
def test_an_exception_from_keep_and_into_the_generator(k: int, plain: list[int]) -> None:
    for at in range(1, 5):
        run = Run(draft=SAME)
        with pytest.raises(Broken):
            run.go(k, 60, keep=_breaks(lambda tokens: None, at, False))
        _assert_recovers(run, plain, k)
        run = Run(draft=SAME)
        generator = fixed(run.decoding, k).rounds(limit=None)
        for _ in range(at):
            next(generator)
        with pytest.raises(Broken):
            generator.throw(Broken)
        _assert_recovers(run, plain, k)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("draft", [SAME, OTHER], ids=["same", "other"])
def test_ctrl_c_at_any_line(k: int, draft: PagedModel, plain: list[int]) -> None:
    """Everywhere in this package, but for the restoring itself."""
    lines = 0
    at = sys.maxsize

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        inside = "/mlx_spec/" in frame.f_code.co_filename.replace("\\", "/")
        if not inside or frame.f_code.co_name in ("_rewind", "rewind"):
            return None
        if event == "line":
            lines += 1
            if lines == at:
                raise KeyboardInterrupt
        return trace

    def interrupted(run: Run) -> None:
        nonlocal lines
        lines = 0
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            run.go(k, 12)
        finally:
            sys.settrace(before)

    interrupted(Run(draft=draft))
    total = lines
    assert total > 200
    for at in random.Random(k).sample(range(1, total + 1), 40):
        run = Run(draft=draft)
        try:
            interrupted(run)
        except KeyboardInterrupt:
            pass
        else:  # page allocation and first compilations take other lines each time
            assert lines < at
        _assert_recovers(run, plain, k)


def test_the_same_decoding_goes_on_after_an_interruption(plain: list[int]) -> None:
    """What was counted for penalties, too, is what was committed."""
    sampling = Sampling(frequency_penalty=0.7, repetition_penalty=1.2)
    expected = _reference(TARGET, sampling, 30)
    for first, second in ((0, 0), (0, 3), (3, 0), (3, 3)):
        for at in (1, 2, 4):
            run = Run(sampling=sampling)
            with pytest.raises(Broken):
                run.go(first, 60, keep=_breaks(lambda tokens: None, at, False))
            run.some(first, 2)
            assert run.go(second, 30 - len(run.made)) == expected
            run.check()


def test_a_draft_left_behind_catches_up(plain: list[int]) -> None:
    run = Run(draft=SAME)
    run.go(0, 20)
    assert run.draft.context.length == len(PROMPT) - 1
    run.go(3, 8)
    assert run.made == plain[:28]
    assert sum(finished.accepted for finished in run.rounds) == 6
    run.check()


# -- penalties, log-probabilities, seeds ---------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [SAME, OTHER], ids=["same", "other"])
@pytest.mark.parametrize("k", [0, 3, 5])
def test_penalties_that_forbid_repetition(k: int, draft: PagedModel) -> None:
    sampling = Sampling(presence_penalty=1e5)
    rest = SIZE - len(set(PROMPT))
    run = Run(draft=draft, sampling=sampling)
    made = run.go(k, rest)
    assert sorted(made + list(set(PROMPT))) == list(range(SIZE))
    assert made == _reference(TARGET, sampling, rest)
    if draft is SAME:
        assert all(finished.accepted == finished.drafted for finished in run.rounds)


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.8}, {"frequency_penalty": 0.6}, {"presence_penalty": -1.5, "logit_bias": {5: 2.0}},
     {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}],
    ids=str,
)  # fmt: skip
def test_penalties_see_the_prompt_and_what_was_committed(settings: dict[str, Any]) -> None:
    sampling = Sampling(**settings)
    expected = _reference(TARGET, sampling, 40)
    assert expected != _reference(TARGET, GREEDY, 40)
    for k, draft in ((0, None), (0, OTHER), (3, OTHER), (3, SAME)):
        run = Run(draft=draft, sampling=sampling)
        assert run.go(k, 40) == expected
        if draft is SAME:
            assert all(finished.accepted == finished.drafted for finished in run.rounds)


@pytest.mark.parametrize("top", [0, 1, 5, 100])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_log_probabilities_are_the_models_own(top: int, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=30, presence_penalty=0.3, top_logprobs=top)
    for k, draft in ((0, None), (3, OTHER), (3, SAME)):
        run = Run(draft=draft, sampling=sampling)
        run.go(k, 25)
        entries = [entry for finished in run.rounds for entry in finished.logprobs or ()]
        assert [entry.token for entry in entries] == run.made
        values = _log_softmax(_logits(TARGET, run.tokens))[len(PROMPT) - 1 :]
        for entry, row in zip(entries, values, strict=False):
            assert entry.logprob == pytest.approx(row[entry.token], abs=1e-3)
            best = np.argsort(-row)[:top]
            assert len(entry.top) == min(top, SIZE)
            np.testing.assert_allclose([value for _, value in entry.top], row[best], atol=1e-3)
            for token, value in entry.top:
                assert value == pytest.approx(row[token], abs=1e-3)
            assert len({token for token, _ in entry.top}) == len(entry.top)


def test_log_probabilities_are_equal_with_and_without_speculation() -> None:
    def entries(k: int, draft: PagedModel | None) -> list[tuple[int, float, list[int], list[float]]]:
        run = Run(draft=draft, sampling=Sampling(top_logprobs=4))
        run.go(k, 40)
        return [(entry.token, entry.logprob, [token for token, _ in entry.top], [value for _, value in entry.top])
                for finished in run.rounds for entry in finished.logprobs or ()]  # fmt: skip

    without = entries(0, None)
    assert len(without) == 40
    assert all(entry[0] == entry[2][0] for entry in without)  # greedy
    for k, draft in ((3, OTHER), (5, SAME)):
        for ours, plain_one in zip(entries(k, draft), without, strict=True):
            assert ours[0] == plain_one[0]
            assert ours[2] == plain_one[2]
            assert [ours[1], *ours[3]] == pytest.approx([plain_one[1], *plain_one[3]], abs=1e-4)


def test_log_probabilities_stop_where_the_tokens_stop(plain: list[int]) -> None:
    run = Run(draft=SAME, sampling=Sampling(top_logprobs=1))
    run.go(5, 40, end_tokens={plain[2]})
    assert [entry.token for entry in run.rounds[0].logprobs or ()] == plain[:3]
    run = Run(draft=SAME, sampling=Sampling(top_logprobs=1))
    run.go(5, 40, keep=lambda tokens: 0)
    assert run.rounds == [Round([], 5, 5, "model", False, [], True)]


@pytest.mark.parametrize("k", [0, 3])
def test_the_seed_decides(k: int) -> None:
    sampling = Sampling(temperature=1.5)
    first = Run(sampling=sampling, seed=11).go(k)
    mx.random.seed(99)  # the global state plays no part
    assert Run(sampling=sampling, seed=11).go(k) == first
    assert Run(sampling=sampling, seed=12).go(k) != first
    assert Run(sampling=sampling, seed=2**64 - 1).go(k) != first


@pytest.mark.parametrize("k", [0, 3])
def test_generations_beside_one_another_do_not_touch(k: int) -> None:
    """In one pool per model, over several pages, so that neither one's pages stay consecutive."""
    sampling = Sampling(temperature=1, frequency_penalty=0.1)
    prompts = [[(7 * i + j) % SIZE for i in range(60)] for j in range(2)]
    alone = [Run(sampling=sampling, prompt=prompt, seed=5).go(k, 90) for prompt in prompts]
    runs = [Run(sampling=sampling, prompt=prompt, seed=5) for prompt in prompts]
    table = runs[0].target.table
    other = PageTable(table.pool)  # somebody else's, in the way
    other.pages = table.pool.free_pages(1, after=table.pages[-1])
    generators = [fixed(run.decoding, k).rounds(limit=90) for run in runs]
    open_ones = list(generators)
    while open_ones:
        for generator in list(open_ones):
            if next(generator, None) is None:
                open_ones.remove(generator)
    assert not runs[0].target.table.consecutive
    assert [run.made for run in runs] == alone
    for run in runs:
        run.check()


# -- vocabularies, the draft's context, passes ----------------------------------------------------------------------


@pytest.mark.parametrize("columns", [(40, 30), (48, 44), (44, 48), (40, 64), (64, 40)])
def test_padded_vocabularies_of_different_size(
    columns: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt holds the largest ids either model knows; neither the draft's embedding nor the output is overrun."""
    target, draft = _model(1, vocab_size=columns[0]), _model(2, vocab_size=columns[1])
    prompt = [3, columns[0] - 1, 29, 39, 7]
    known: list[int] = []
    embedding = draft.module.model.embed_tokens
    original = type(embedding).__call__

    def watched(self: Any, tokens: mx.array) -> mx.array:
        if self is embedding:
            known.extend(tokens.flatten().tolist())
        return original(self, tokens)

    monkeypatch.setattr(type(embedding), "__call__", watched)
    made = Run(target, draft, prompt=prompt).go(3, 30)
    assert made == Run(target, None, prompt=prompt).go(0, 30)
    assert set(prompt[:-1]) - set(known) == {token for token in prompt[:-1] if token >= columns[1]}
    assert max(known) < columns[1]
    assert max(made) < SIZE


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temperature", [0, 5.0])
def test_padding_is_never_emitted(k: int, temperature: float) -> None:
    tables = [np.array(TableModel.random(seed, SIZE).table) for seed in (1, 2)]
    padded = [np.concatenate([table, np.full((SIZE, SIZE, extra), 99.0)], axis=-1)
              for table, extra in zip(tables, (8, 3), strict=True)]  # fmt: skip
    sampling = Sampling(temperature=temperature, top_logprobs=3)
    run = Run(*map(TableModel, padded), sampling=sampling)  # type: ignore[misc]
    made = run.go(k, 200)
    assert max(made) < SIZE
    assert all(token < SIZE for finished in run.rounds for entry in finished.logprobs or () for token, _ in entry.top)
    assert made == Run(*map(TableModel, tables), sampling=sampling).go(k, 200)  # type: ignore[misc]


def test_a_draft_with_a_smaller_embedding_still_helps() -> None:
    """It agrees wherever it knows the tokens."""
    table = np.array(TableModel.random(1, SIZE).table)
    table[:, :, 30:] -= 2  # rare
    run = Run(TableModel(table), TableModel(table[:30, :30, :30]), Sampling(temperature=1))
    run.go(3, 200)
    assert max(run.made) >= 30
    drafted = sum(finished.drafted for finished in run.rounds)
    assert 0.5 < sum(finished.accepted for finished in run.rounds) / drafted < 1


@pytest.mark.parametrize("context_length", [1, 5, 6, 7, 12, 24])
def test_a_draft_with_a_short_context_stops_and_says_so_once(
    context_length: int, plain: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(draft=SAME, draft_context_length=context_length)
    with caplog.at_level(logging.WARNING, logger="mlx_spec"):
        for finished in fixed(run.decoding, 3).rounds(limit=40):
            run.rounds.append(finished)
            assert run.draft.context.length <= context_length
    assert run.made == plain[:40]
    run.check()
    assert len(caplog.records) == 1
    assert f"{context_length} tokens" in caplog.text
    reached = len(PROMPT)
    for finished in run.rounds:
        assert finished.drafted == min(3, max(0, context_length - reached))
        reached += len(finished.tokens)


def test_a_prompt_longer_than_the_drafts_context_is_not_read_by_it() -> None:
    prompt = [i % SIZE for i in range(50)]
    run = Run(draft=SAME, prompt=prompt, draft_context_length=49)
    assert run.draft.context.length == 0
    assert run.go(3, 10) == Run(draft=None, prompt=prompt).go(0, 10)


def _counting(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("k", [0, 3])
def test_one_target_pass_per_round(k: int, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(draft=SAME)
    passes = _counting(monkeypatch, run.target, "extend")
    run.go(k, 24)
    assert len(passes) == len(run.rounds) == 24 // (k + 1)
    run.some(k, 3)
    ahead = k == 0
    assert len(passes) == len(run.rounds) + ahead


def test_plain_decoding_keeps_one_pass_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(draft=None)
    generator = fixed(run.decoding, 0).rounds(limit=4)
    lengths = []
    for _ in generator:
        lengths.append(run.target.length - len(run.tokens))
    assert lengths == [0, 0, 0, -1]
    monkeypatch.setattr(PagedContext, "chains_cheaply", property(lambda self: False))
    run = Run(draft=None)
    for _ in fixed(run.decoding, 0).rounds(limit=4):
        assert run.target.length == len(run.tokens) - 1


@pytest.mark.parametrize("cheap", [True, False])
def test_one_synchronisation_per_round(cheap: bool, plain: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And one more per drafted token where passes must not be chained."""
    monkeypatch.setattr(PagedContext, "chains_cheaply", property(lambda self: cheap))
    run = Run(draft=SAME)
    reads, waits = _counting(monkeypatch, Decoding, "_read"), _counting(monkeypatch, mx, "eval")
    assert run.go(3, 24) == plain[:24]
    assert len(reads) == len(run.rounds) == 6
    assert len(waits) == (0 if cheap else 18)


@pytest.mark.parametrize("length", [1, 2, 33, 64, 65, 150])
def test_prefill_in_chunks_is_prefill_one_by_one(length: int) -> None:
    tokens = [(11 * i) % SIZE for i in range(length)]
    whole, single, resumed = (TARGET.new_context() for _ in range(3))
    told: list[int] = []
    prefill(whole, tokens, told.append)
    for token in tokens[:-1]:
        single.extend([token], rows=0)
    resumed.extend(tokens[: length // 3], rows=0) if length >= 3 else None
    prefill(resumed, tokens)
    assert sum(told) == whole.length == single.length == resumed.length == length - 1
    rows = [np.array(context.extend(tokens[-1:]))[0] for context in (whole, single, resumed)]
    np.testing.assert_allclose(rows[0], rows[1], atol=2e-4)
    np.testing.assert_allclose(rows[0], rows[2], atol=2e-4)
    np.testing.assert_allclose(rows[0], _logits(TARGET, tokens)[-1], atol=2e-4)
    for context in (whole, single, resumed):
        context.close()


def test_prefill_reads_with_both_models_and_leaves_the_last_token() -> None:
    told: list[int] = []
    target: Context = TARGET.new_context()
    draft = DraftModel(OTHER.new_context(), GREEDY, SIZE)
    drafting = Drafting([draft], FixedSchedule(0))
    decoding = Decoding(list(PROMPT), target, drafting, sampling=GREEDY, seed=0, vocabulary_size=SIZE)
    decoding.prefill(told.append)
    assert target.length == draft.context.length == len(PROMPT) - 1
    assert sum(told) == 2 * (len(PROMPT) - 1)
    decoding.prefill(told.append)
    assert sum(told) == 2 * (len(PROMPT) - 1)


# -- what no token is left of, and draws that do not depend on the limit ----------------------------------------------


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("verify", [verify_block, verify_tokenwise])
def test_logits_and_biases_that_leave_no_token_end_the_answer(k: int, temperature: float, verify: Any) -> None:
    """The model allows two tokens after token 3 and the biases neither: seen in the first row and in a drafted one."""
    table = np.zeros((SIZE, SIZE, SIZE))
    table[:, 3] = -np.inf
    table[:, 3, [1, 2]] = 0
    allowed = {1: -np.inf, 2: -np.inf} | dict.fromkeys(range(4, SIZE), -np.inf)  # tokens 0 and 3 are left
    sampling = Sampling(temperature=temperature, logit_bias=allowed | ({} if temperature else {3: 1.0}))
    for prompt in ([5, 3], [5, 6]):
        run = Run(TableModel(table), TableModel(np.zeros((SIZE, SIZE, SIZE))), sampling, prompt=prompt)
        assert run.drafting is not None
        run.drafting.verify = verify
        with pytest.raises(MLXSpecError, match=r"^no token is left.*\.$"):
            run.go(k)
        assert run.made == ([] if prompt[-1] == 3 else run.made)
        run.check()


def test_a_draft_that_is_left_without_a_token_changes_nothing() -> None:
    table = np.array(TableModel.random(1, SIZE).table)
    for temperature in (0, 1):
        sampling = Sampling(temperature=temperature)
        for nothing in (-np.inf, np.nan):
            run = Run(TableModel(table), TableModel(np.full((SIZE,) * 3, nothing)), sampling, seed=1)
            made = run.go(3, 20)
            assert all(finished.accepted == 0 or temperature == 0 for finished in run.rounds)
            if temperature == 0:
                assert made == Run(TableModel(table), None, sampling).go(0, 20)


NEARLY = np.array(TableModel.random(1, SIZE).table)
NEAR = NEARLY + 0.5 * np.array(TableModel.random(2, SIZE).table)


def _beginning(seed: int, k: int, limit: int, verify: Any, kinds: str, **options: Any) -> list[int]:
    sampling = Sampling(temperature=1, top_k=8, repetition_penalty=1.1)
    drafters: list[Any] = [DraftModel(TableModel(NEAR).new_context(), sampling, SIZE)] if kinds != "lookup" else []
    drafters += [Lookup(SIZE, shortest=1)] if kinds != "model" else []
    tokens = PROMPT * 2
    decoding = Decoding(tokens, TableModel(NEARLY).new_context(), Drafting(drafters, FixedSchedule(k), verify=verify),
                        sampling=sampling, seed=seed, vocabulary_size=SIZE)  # fmt: skip
    decoding.prefill()
    for _ in decoding.rounds(limit=limit, **options):
        pass
    assert len(tokens) == 2 * len(PROMPT) + limit
    return tokens[2 * len(PROMPT) :]


@pytest.mark.parametrize("verify", [verify_block, verify_tokenwise])
@pytest.mark.parametrize(("k", "kinds", "seeds"), [
    (8, "model", 30), (1, "model", 10), (5, "model", 10), (0, "model", 5), (8, "lookup", 10), (6, "hybrid", 10),
])  # fmt: skip
def test_an_answer_begins_as_a_longer_one(k: int, kinds: str, seeds: int, verify: Any) -> None:
    answers = set()
    for seed in range(seeds):
        longest = _beginning(seed, k, 40, verify, kinds)
        answers.add(tuple(longest))
        for limit in (1, 2, 5, 17):
            assert _beginning(seed, k, limit, verify, kinds) == longest[:limit]
    assert len(answers) == seeds


def test_nothing_is_drafted_past_the_end_of_the_context() -> None:
    run = Run(TARGET, SAME)
    run.go(8, 10, room=10)
    assert len(run.made) == 10
    assert sum(finished.accepted + 1 for finished in run.rounds) == 10  # all are accepted, and none is cut
    run = Run(TARGET, SAME)
    run.go(8, 10)
    assert sum(finished.accepted + 1 for finished in run.rounds) == 18


def test_greedy_decoding_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("categorical", "uniform", "gumbel"):
        monkeypatch.setattr(mx.random, name, lambda *_, **__: pytest.fail("a draw"))
    for verify in (verify_block, verify_tokenwise):
        run = Run()
        assert run.drafting is not None
        run.drafting.verify = verify
        assert run.go(3, 20) == Run(TARGET, None).go(0, 20)
