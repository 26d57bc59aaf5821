"""What followed the latest tokens where they were seen before.

Knows the committed tokens as numbers; nothing of models or text. The structure is a suffix automaton (Blumer et al.
1985, "The smallest automaton recognizing the subwords of a text"): one state per set of places where some run of tokens
ends, at most two states and three transitions per token. A state's suffix link leads to its longest suffix that ends at
more places; following links from the whole text visits every suffix that was seen before, the longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_COUNTED_LINKS = 32
"""For how many contexts a new token is counted, those of the longest suffixes; keeps a step's cost constant in text
that repeats itself, where every repetition adds another link."""

_ROOT = 0  # the state of the empty run


@dataclass(frozen=True)
class Match:
    """What may come next, judging by the longest suffix that was seen before."""

    length: int
    """Tokens of that suffix."""
    tokens: list[int]
    """Its continuation."""
    seen: int
    """How often the suffix was followed by the first of them."""


class Suffixes:
    """Every run of the tokens so far, and what followed it how often. Grows at the end only."""

    def __init__(self, shortest: int = 2) -> None:
        """shortest: a suffix of fewer tokens is no match."""
        self._shortest = max(shortest, 1)
        self._last = _ROOT
        # By state.
        self._following: list[dict[int, int]] = [{}]  # token -> the state of the run with that token added
        self._link = [-1]  # the state of the longest suffix that ends at more places
        self._longest = [0]  # tokens of the longest run
        self._seen = [0]  # how often its runs ended; not kept for runs of one token
        self._likeliest = [-1]  # the token that followed most often, of several the latest; -1 at the end of the text

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._longest[self._last]

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens. Time per token is constant on average over all tokens added, whatever they are."""
        following, link, longest = self._following, self._link, self._longest
        seen, likeliest, last = self._seen, self._likeliest, self._last
        for token in tokens:
            new = len(link)
            following.append({})
            link.append(_ROOT)
            longest.append(longest[last] + 1)
            seen.append(0)
            likeliest.append(-1)
            likeliest[last] = token
            state = last
            while state >= 0 and token not in following[state]:
                following[state][token] = new
                state = link[state]
            if state >= 0:
                link[new] = self._run(state, token, new + 1)
            state, counted = last, _ROOT
            for _ in range(_COUNTED_LINKS):
                if state <= _ROOT:
                    break
                ways = following[state]
                reached = ways[token]
                if reached != counted:  # several contexts may lead to one state: their runs end at the same places
                    seen[reached] += 1
                    counted = reached
                if seen[reached] >= seen[ways[likeliest[state]]]:
                    likeliest[state] = token
                state = link[state]
            last = new
        self._last = last

    def _run(self, state: int, token: int, unused: int) -> int:
        """The state of `state`'s longest run with `token` added, seen before and now again: split off as state
        `unused` where longer runs, which did not end here, shared its state."""
        following, link = self._following, self._link
        shared = following[state][token]
        length = self._longest[state] + 1
        if self._longest[shared] == length:
            return shared
        following.append(following[shared].copy())
        link.append(link[shared])
        self._longest.append(length)
        self._seen.append(self._seen[shared])
        self._likeliest.append(self._likeliest[shared])
        link[shared] = unused
        while state >= 0 and following[state].get(token) == shared:
            following[state][token] = unused
            state = link[state]
        return unused

    def find(self, most: int) -> Match | None:
        """The continuation, at most `most` tokens, of the longest suffix that was seen before; None if it is shorter
        than `shortest`. Earlier occurrences may overlap the suffix. Time is that of the result, plus a constant.

        Each token is the one that most often followed the suffix and the tokens proposed before it, of several the
        one that did so latest. Where only the end of the text is left to follow, that is continued as the text itself
        is, so that text with a period goes on in it, and a match always gives `most` tokens. Counts are exact as long
        as each token repeated at most some dozens of ever shorter suffixes with counts of their own (the constant of
        this module); past that the shortest suffixes miss occurrences: counts are then too low, at least 1, and the
        proposals still tokens that did follow.
        """
        link, likeliest, following = self._link, self._likeliest, self._following
        state = link[self._last]
        length = self._longest[state] if state > _ROOT else 0
        if length < self._shortest or most < 1:
            return None
        seen = self._seen[following[state][likeliest[state]]]
        tokens = []
        for _ in range(most):
            if likeliest[state] < 0:
                state = link[state]
            tokens.append(likeliest[state])
            state = following[state][likeliest[state]]
        return Match(length, tokens, seen)
