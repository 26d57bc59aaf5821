"""Text to token ids and back: chat template, incremental decoding, stop strings.

Wraps the tokenizer mlx-lm loads. Knows nothing of models, files or sampling.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_spec.errors import BadConfig

_log = logging.getLogger("mlx_spec")

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_INCOMPLETE_BYTES = 3
"""A UTF-8 character has at most four bytes, so at most three of an unfinished one can be there."""
_WINDOW, _KEEP, _CUTS = 16, 8, 4
"""Tokens decoded at once at most (normally), tokens kept when the window moves, places tried for the cut."""


class Tokenizer:
    """One model's tokenizer, as the runtime and the pair check see it."""

    def __init__(self, wrapper: Any) -> None:
        """`wrapper`: an `mlx_lm.tokenizer_utils.TokenizerWrapper`, its end tokens already united."""
        self._wrapper = wrapper
        self._vocabulary: dict[str, int] = wrapper.get_vocab()
        self.vocabulary_size: int = max(self._vocabulary.values(), default=-1) + 1
        self.end_tokens: frozenset[int] = frozenset(wrapper.eos_token_ids)
        self.has_chat_template: bool = bool(wrapper.has_chat_template)
        self._byte_tokens = frozenset(
            token for string, token in self._vocabulary.items() if _BYTE_TOKEN.fullmatch(string)
        )
        # Asked of decode() itself: the list of special tokens and what decode() skips may differ.
        named = {*wrapper.all_special_ids, *wrapper.added_tokens_decoder}
        self._skipped = frozenset(
            token for token in named if not self.decode([token]) and self._decode_all([token])
        )
        self._start = self._start_tokens("a")
        self._told_of_folding = False

    def vocabulary(self) -> dict[str, int]:
        """Token string -> id, added tokens included."""
        return dict(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands, after a BOS token where the tokenizer adds one (never a second one)."""
        tokens = self._encode_plain(text)
        return tokens if tokens[: len(self._start)] == self._start else [*self._start, *tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`: special tokens skipped, spaces as they are, broken UTF-8 as U+FFFD."""
        return str(
            self._wrapper.decode(
                [int(token) for token in tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def chat(self, messages: Sequence[Mapping[str, str]], **template_arguments: Any) -> list[int]:
        """Ids of a conversation through the chat template, up to where the model is to answer.

        A template that refuses the system role, or drops its text without a word, gets the system text at the
        head of the next user turn instead, and that is logged once. Raises BadConfig for malformed messages,
        for a model without a template, and for a template that raises.
        """
        checked = _checked(messages)
        if not self.has_chat_template:
            raise BadConfig("the model has no chat template; give the prompt as it is: --raw (raw=True).")
        rendered: str | None = None
        failure: Exception | None = None
        try:
            rendered = self._render(checked, template_arguments)
        except Exception as error:  # a template is a program: it may raise anything
            failure = error
        if any(message["role"] == "system" for message in checked) and (
            rendered is None or self._drops_system(checked, template_arguments)
        ):
            try:
                rendered = self._render(_fold_system(checked), template_arguments)
            except Exception as error:
                failure = failure or error
                rendered = None
            else:
                self._tell_of_folding()
        if rendered is None:
            reason = " ".join(str(failure).split()) or type(failure).__name__
            raise BadConfig(
                f"the model's chat template refused the messages: {reason.rstrip('.')}; change them, "
                "or give the prompt as it is: --raw (raw=True)."
            ) from failure
        # The template writes the BOS token itself where the model wants one.
        return self._encode_plain(rendered)

    def token_text(self, token: int) -> str:
        """Text of one token inside a text: its leading space kept, special tokens by name."""
        anchor = self._encode_plain("a")[-1:]
        return self._decode_all([*anchor, int(token)])[len(self._decode_all(anchor)) :]

    def stream(self) -> TextStream:
        """A fresh incremental decoder."""
        return TextStream(self)

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._wrapper.encode(text, add_special_tokens=False))

    def _decode_all(self, tokens: list[int]) -> str:
        return str(
            self._wrapper.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def _start_tokens(self, probe: str) -> list[int]:
        """Tokens the tokenizer puts before every text. Those it may put after it would end the prompt."""
        plain, full = self._encode_plain(probe), list(self._wrapper.encode(probe))
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def _render(self, messages: list[dict[str, str]], template_arguments: Mapping[str, Any]) -> str:
        return str(
            self._wrapper.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_arguments
            )
        )

    def _drops_system(self, messages: list[dict[str, str]], template_arguments: Mapping[str, Any]) -> bool:
        """Whether a marker put in place of each system text is missing from the rendered conversation."""
        marked, markers = [], []
        for index, message in enumerate(messages):
            if message["role"] == "system":
                markers.append(f"sentinel{index}sentinel")
                message = {**message, "content": markers[-1]}
            marked.append(message)
        try:
            rendered = self._render(marked, template_arguments)
        except Exception:  # it looks into the text and wants the real one, which it did take
            return False
        return not all(marker in rendered for marker in markers)

    def _tell_of_folding(self) -> None:
        if not self._told_of_folding:
            _log.warning("the model's chat template has no system role: the system text opens the user turn")
            self._told_of_folding = True


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if not messages:
        raise BadConfig("messages is empty; give at least one, such as {'role': 'user', 'content': '...'}.")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str) or (key == "role" and not value):
                raise BadConfig(
                    f"message {index} is {message!r}, whose {key} is no text; give each one as "
                    "{'role': 'user', 'content': '...'}."
                )
    return [dict(message) for message in messages]


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The same conversation with each system text at the head of the user turn after it."""
    folded: list[dict[str, str]] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
        elif message["role"] == "user" and waiting:
            folded.append({**message, "content": "\n\n".join([*waiting, message["content"]])})
            waiting = []
        else:
            folded.append(message)
    if waiting:
        folded.append({"role": "user", "content": "\n\n".join(waiting)})
    return folded


class TextStream:
    """Decodes token by token. All pieces and `finish()`, joined, equal `Tokenizer.decode` of all tokens.

    No piece ends inside a character. A window of recent tokens is decoded at each step, so a token costs the
    same however long the text is. Byte tokens of a sentencepiece vocabulary (`<0x0A>`) wait for the end of
    their run: one invalid byte turns the whole run into U+FFFD, so none of it is certain before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted = 0
        """Characters of the decoded window that were handed out."""

    def add(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        if token in self._tokenizer._skipped:
            return ""
        self._window.append(token)
        if token in self._tokenizer._byte_tokens:
            return ""
        text = self._tokenizer.decode(self._window)
        certain = len(text)
        while text[:certain].endswith(_REPLACEMENT) and len(text) - certain < _INCOMPLETE_BYTES:
            certain -= 1
        piece = text[self._emitted : certain]
        self._emitted = max(self._emitted, certain)
        if len(self._window) >= _WINDOW:
            self._move_window(text)
        return piece

    def finish(self) -> str:
        """What was held back. The stream is then empty again."""
        piece = self._tokenizer.decode(self._window)[self._emitted :]
        self._window, self._emitted = [], 0
        return piece

    def _move_window(self, text: str) -> None:
        # A cut is good when the rest decodes to the end of the same text. The first character of the rest may
        # differ (a leading space is stripped at the start of a text), so it must be one already handed out.
        for keep in range(_KEEP, _KEEP + _CUTS):
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
