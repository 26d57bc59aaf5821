"""Prompt lookup against its definition, spelled out by brute force over small alphabets, and on bad kinds of text."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_spec.decoding.drafters.suffixes import Match, Suffixes

MANY = 100_000


def _ends(text: list[int], run: list[int]) -> list[int]:
    """Where `run` ends in `text`, with something following."""
    return [end for end in range(len(run), len(text)) if text[end - len(run) : end] == run]


def _by_definition(text: list[int], most: int, shortest: int) -> Match | None:
    for length in range(len(text) - 1, shortest - 1, -1):
        ends = start = _ends(text, text[len(text) - length :])
        if ends:
            break
    else:
        return None
    tokens, seen = [], 0
    while len(tokens) < most:
        ends = [end for end in ends if end < len(text)] or start
        following = [text[end] for end in ends]
        # The most frequent, of several the one that came last.
        token = max(following, key=lambda token: (following.count(token), ends[_last(following, token)]))
        seen = seen or following.count(token)
        tokens.append(token)
        ends = [end + 1 for end in ends if text[end] == token]
    return Match(length, tokens, seen)


def _last(items: list[int], item: int) -> int:
    return len(items) - 1 - items[::-1].index(item)


def _found(text: list[int], most: int = 8, shortest: int = 2) -> Match | None:
    lookup = Suffixes(shortest)
    lookup.extend(text)
    assert lookup.length == len(text)
    return lookup.find(most)


def _texts(most: int) -> st.SearchStrategy[list[int]]:
    """Over one to four tokens, with and without long repetitions."""
    letters = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=most))
    pieces = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=3).flatmap(
        lambda pieces: st.lists(st.sampled_from(pieces), max_size=most).map(
            lambda some: list(itertools.chain.from_iterable(some))[:most]
        )
    )
    return letters | pieces


# Up to this many tokens every suffix is counted.
@settings(max_examples=400, deadline=None)
@given(_texts(32), st.integers(1, 12), st.integers(1, 4))
def test_it_finds_what_the_definition_says_after_every_token(text: list[int], most: int, shortest: int) -> None:
    lookup = Suffixes(shortest)
    for length in range(len(text) + 1):
        assert lookup.find(most) == _by_definition(text[:length], most, shortest)
        lookup.extend(text[length : length + 1])
        assert lookup.length == min(length + 1, len(text))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size), min_size=100, max_size=300)))
def test_it_finds_what_the_definition_says_in_longer_text(text: list[int]) -> None:
    assert _found(text) == _by_definition(text, 8, 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(40, 80), _texts(12), st.integers(1, 3))
def test_text_that_repeats_itself_for_long_keeps_what_is_promised(
    piece: list[int], times: int, other: list[int], rest: int
) -> None:
    """Counts may be too low then; lengths are exact still, and every proposal did follow."""
    text = piece * times + other + piece * times + other + piece * rest
    found, exact = _found(text), _by_definition(text, 8, 2)
    assert found is not None
    assert exact is not None
    assert found.length == exact.length
    context = text[len(text) - found.length :]
    following = [text[end] for end in _ends(text, context)]
    assert 1 <= found.seen <= following.count(found.tokens[0])
    for token in found.tokens:
        ends = _ends(text, context)
        if not ends:  # only the end of the text is like that
            context = text[len(text) - found.length :]
            ends = _ends(text, context)
        assert token in [text[end] for end in ends]
        context = [*context, token]


@given(_texts(60), st.lists(st.integers(0, 60)))
def test_it_does_not_matter_in_which_pieces_tokens_come(text: list[int], cuts: list[int]) -> None:
    lookup = Suffixes()
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in zip(places, [*places[1:], len(text)], strict=True):
        lookup.extend(text[start:end])
        lookup.find(3)
    assert lookup.find(8) == _found(text)


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_a_long_match_gives_a_long_continuation() -> None:
    passage = list(range(100, 160))
    assert _found([*passage, 1, 2, *passage[:20]], most=30) == Match(20, passage[20:50], 1)


def test_the_most_frequent_continuation_comes_first_at_every_step() -> None:
    a, b, c, d, e = range(5)
    text = [a, b, c, d, 6, a, b, e, 7, a, b, c, e, 8, a, b, c, e, 9, a, b]
    assert _found(text, most=3) == Match(2, [c, e, 9], 3)


def test_of_equally_frequent_continuations_the_latest_comes_first() -> None:
    a, b, c, d = range(4)
    assert _found([a, b, c, a, b, d, a, b], most=1) == Match(2, [d], 1)
    assert _found([a, b, d, 9, a, b, c, 8, a, b, d, 7, a, b, c, 6, a, b], most=1) == Match(2, [c], 2)


def test_the_longest_match_goes_before_a_more_frequent_one() -> None:
    a, b, c, d, x = range(5)
    text = [x, a, b, c, *[a, b, d] * 5, x, a, b]
    assert _found(text, most=1) == Match(3, [c], 1)


def test_text_with_a_period_goes_on_in_it() -> None:
    assert _found([1, 2, 3, 1, 2, 3, 1], most=8) == Match(4, [2, 3, 1, 2, 3, 1, 2, 3], 1)


def test_a_match_too_short_is_none() -> None:
    text = [1, 2, 3, 7, 8, 1, 2, 3]
    assert _found(text, most=1, shortest=3) == Match(3, [7], 1)
    assert _found(text, most=1, shortest=4) is None


def test_nothing_is_proposed_where_nothing_is_asked_for() -> None:
    assert _found([1, 2, 1, 2, 1], most=0) is None
    assert _found([1, 2, 1, 2, 1], most=-1) is None


@pytest.mark.parametrize("text", [[], [5], [5, 6], [5, 6, 7, 8]])
def test_text_without_a_repetition_has_no_match(text: list[int]) -> None:
    assert _found(text, shortest=1) is None


# -- many tokens of a bad kind ----------------------------------------------------------------------------------------


def _fibonacci() -> list[int]:
    """The word with the most repetitions of another kind: every suffix was seen before, none is a plain period."""
    shorter, longer = [0], [0, 1]
    while len(longer) < MANY:
        shorter, longer = longer, longer + shorter
    return longer[:MANY]


def _without_pattern(size: int) -> list[int]:
    tokens, state = [], 1
    for _ in range(MANY):
        state = state * 6364136223846793005 % 2**64
        tokens.append((state >> 40) % size)
    return tokens


BAD = {
    "one token": [7] * MANY,
    "all distinct": list(range(MANY)),
    "a period": list(range(50)) * (MANY // 50),
    "no pattern, two tokens": _without_pattern(2),
    "no pattern, thousand tokens": _without_pattern(1000),
    "one context, a new continuation each time": [
        token for index in range(MANY // 3) for token in (0, 1, index + 2)
    ],
    "Fibonacci's word": _fibonacci(),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_memory_and_time_are_linear(name: str) -> None:
    text = BAD[name]
    lookup = Suffixes()
    began = time.perf_counter()
    lookup.extend(text)
    extended = time.perf_counter()
    found = lookup.find(16)
    ended = time.perf_counter()
    # Printed, not asserted: a busy machine is slow.
    print(f"{name}: {extended - began:.2f} s for {len(text)} tokens, {1e6 * (ended - extended):.0f} µs to find {found}")
    states, transitions = len(lookup._following), sum(map(len, lookup._following))
    assert states <= 2 * len(text)
    assert transitions <= 3 * len(text)
    assert lookup.length == len(text)


def test_many_equal_tokens_are_proposed_again() -> None:
    assert _found([7] * 5000, most=16) == Match(4999, [7] * 16, 1)


def test_a_context_with_many_continuations_gives_the_latest() -> None:
    text = [token for index in range(5000) for token in (0, 1, index + 2)]
    assert _found([*text, 0, 1], most=4) == Match(2, [5001, 0, 1, 5001], 1)
