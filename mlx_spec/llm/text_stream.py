"""Text as it comes: tokens decoded one by one, and where a stop string ends it. Knows no model and no template."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mlx_spec.errors import BadConfig

if TYPE_CHECKING:
    from mlx_spec.loading.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_CONTINUATION = range(0x80, 0xC0)
"""Bytes of UTF-8 that begin no character."""
_INCOMPLETE_BYTES = 3
"""A UTF-8 character has at most four bytes, so at most three of an unfinished one can be there."""
_WINDOW, _KEEP, _CUTS = 16, 8, 4
"""Tokens decoded at once at most (normally), tokens kept when the window moves, places tried for the cut."""


class TextStream:
    """Decodes token by token. All pieces and `finish()`, joined, equal `Tokenizer.decode` of all tokens.

    No piece ends inside a character. A window of recent tokens is decoded at each step, so a token costs the
    same however long the text is. Byte tokens of a sentencepiece vocabulary (`<0x0A>`) give each character as soon
    as it is whole. There is one difference from `decode`: there, a byte that is not UTF-8 turns the whole run of
    bytes around it into U+FFFD, long after a line break in it should have been shown and met a stop string; here
    only the bytes of the broken character become U+FFFD, one each.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokens = {value: token for token, value in tokenizer._byte_values.items()}
        self._replacement = [tokens[value] for value in _REPLACEMENT.encode()] if tokens else []
        """The byte tokens of U+FFFD. Written in place of a broken byte, they keep its run valid."""
        self._unfinished: list[int] = []
        """Byte tokens of a character that is not whole yet, at most three."""
        self._window: list[int] = []
        self._emitted = 0
        """Characters of the decoded window that were handed out."""

    def add(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        if token in self._tokenizer._skipped:
            return ""
        self._append(token)
        if not self._window:
            return ""
        text = self._tokenizer.decode(self._window)
        certain = len(text)
        if not self._replacement:  # then a token may end inside a character, whose beginning looks like this
            while text[:certain].endswith(_REPLACEMENT) and len(text) - certain < _INCOMPLETE_BYTES:
                certain -= 1
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if len(self._window) >= _WINDOW:
            self._move_window(text)
        return piece

    def finish(self) -> str:
        """What was held back. The stream is then empty again."""
        self._replace_unfinished()
        piece = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    def _append(self, token: int) -> None:
        """Put a token into the window; a byte token waits for its character to be whole."""
        values = self._tokenizer._byte_values
        if token not in values:
            self._replace_unfinished()
            self._window.append(token)
            return
        for waiting in ([*self._unfinished, token], [token]):
            try:
                whole, _ = codecs.utf_8_decode(bytes(values[each] for each in waiting), "strict", False)
            except UnicodeDecodeError:
                self._replace_unfinished()  # the byte that follows may begin a character of its own
                continue
            if whole:
                self._window += waiting
            self._unfinished = [] if whole else waiting
            return
        self._window += self._replacement

    def _replace_unfinished(self) -> None:
        self._window += self._replacement * len(self._unfinished)
        self._unfinished = []

    def _move_window(self, text: str) -> None:
        # A cut is good when the rest decodes to the end of the same text. The first character of the rest may
        # differ (a leading space is stripped at the start of a text), so it must be one already handed out.
        for keep in range(_KEEP, _KEEP + _CUTS):
            if self._tokenizer._byte_values.get(self._window[-keep]) in _CONTINUATION:
                continue  # never inside a character
            rest = self._tokenizer.decode(self._window[-keep:])
            emitted = self._emitted - (len(text) - len(rest))
            if emitted > 0 and text.endswith(rest):
                self._window, self._emitted = self._window[-keep:], emitted
                return


class StopScanner:
    """Cuts a text, arriving in pieces, before the first stop string.

    The first one is the one completed first, as a reader going character by character would meet it; of two
    completed by the same character, the longer. What could still become a stop string is held back, so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not isinstance(stop, str | Iterable):
            raise BadConfig(f"stop is {stop!r}; give a list of texts, empty for none.")
        self._stop = (stop,) if isinstance(stop, str) else tuple(stop)
        for string in self._stop:
            if not isinstance(string, str) or not string:
                raise BadConfig(f"stop string {string!r} is empty or no text; give at least one character.")
        self._held = ""
        self._stopped = False

    def add(self, text: str) -> tuple[str, bool]:
        """The text that can be shown, and whether a stop string was met; after that there is no more text."""
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(start + len(string), start) for string in self._stop if (start := text.find(string)) >= 0]
        if found:
            self._held, self._stopped = "", True
            return text[: min(found)[1]], True
        held = max((_overlap(text, string) for string in self._stop), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown], False

    def finish(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class Answer:
    """The text of an answer, and where it ends."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], end_tokens: frozenset[int]) -> None:
        self._stream, self._scanner = TextStream(tokenizer), StopScanner(stop)
        self.end_tokens = end_tokens
        self._ready = ""
        self.stopped = False
        """Whether a stop string was met."""

    def keep(self, tokens: Sequence[int]) -> int | None:
        """How many of these tokens to keep if they complete a stop string. The end token has no text."""
        for index, token in enumerate(tokens):
            if token not in self.end_tokens:
                shown, self.stopped = self._scanner.add(self._stream.add(token))
                self._ready += shown
                if self.stopped:
                    return index + 1
        return None

    def take(self) -> str:
        """The text that became certain since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        if self.stopped:
            return ""
        shown, self.stopped = self._scanner.add(self._stream.finish())
        return shown + self._scanner.finish()
