"""Text to token ids and back, and the chat template.

Wraps the tokenizer mlx-lm loads. Knows nothing of models, files or sampling.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_spec.errors import BadConfig

_log = logging.getLogger("mlx_spec")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """One model's tokenizer, as the runtime and the pair check see it."""

    def __init__(self, wrapper: Any) -> None:
        """`wrapper`: an `mlx_lm.tokenizer_utils.TokenizerWrapper`, its end tokens already united."""
        self._wrapper = wrapper
        self._vocabulary: dict[str, int] = wrapper.get_vocab()
        self.vocabulary_size: int = max(self._vocabulary.values(), default=-1) + 1
        self.end_tokens: frozenset[int] = frozenset(wrapper.eos_token_ids)
        self.has_chat_template: bool = bool(wrapper.has_chat_template)
        named_bytes = {
            int(match[1], 16): token
            for string, token in self._vocabulary.items() if (match := _BYTE_TOKEN.fullmatch(string))
        }
        # Asked of decode(): in another vocabulary such a string may be just a string.
        are_bytes = len(named_bytes) == 256 and self.decode([named_bytes[ord("A")]]) == "A"
        self._byte_values = {token: value for value, token in named_bytes.items()} if are_bytes else {}
        """The byte tokens of a sentencepiece vocabulary, such as `<0x0A>`: id -> value."""
        # Asked of decode() itself: the list of special tokens and what decode() skips may differ.
        named = {*wrapper.all_special_ids, *wrapper.added_tokens_decoder}
        self._skipped = frozenset(
            token for token in named if not self.decode([token]) and self._decode([token], skip=False)
        )
        self._start = self._start_tokens("a")
        self._told_of_folding = False

    def vocabulary(self) -> dict[str, int]:
        """Token string -> id, added tokens included."""
        return dict(self._vocabulary)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` as it stands, after a BOS token where the tokenizer adds one (never a second one)."""
        check_unicode(text, "the text")
        tokens = self._encode_plain(text)
        return tokens if tokens[: len(self._start)] == self._start else [*self._start, *tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of `tokens`: special tokens skipped, spaces as they are, broken UTF-8 as U+FFFD."""
        return self._decode([int(token) for token in tokens], skip=True)

    def chat(self, messages: Sequence[Mapping[str, str]], **template_arguments: Any) -> list[int]:
        """Ids of a conversation through the chat template, up to where the model is to answer.

        A template that refuses the system role, or drops its text without a word, gets the system text at the
        head of the next user turn instead, and that is logged once. Raises BadConfig for malformed messages,
        for a model without a template, and for a template that raises or leaves the messages out.
        """
        checked = _checked(messages)
        if not self.has_chat_template:
            raise BadConfig("the model has no chat template; leave --system out, and give a text, not messages.")
        folded = False
        rendered, failure = self._try_to_render(checked, template_arguments)
        if any(message["role"] == "system" for message in checked) and (
            rendered is None or self._drops(checked, "system", template_arguments)
        ):
            checked, folded = _fold_system(checked), True
            rendered, second = self._try_to_render(checked, template_arguments)
            failure = failure or second
        if rendered is None:
            reason = " ".join(str(failure).split()) or type(failure).__name__
            raise BadConfig(
                f"the model's chat template refused the messages: {reason.rstrip('.')}; change them, "
                "or give the prompt as it is: --raw (raw=True)."
            ) from failure
        role = "user" if folded else checked[-1]["role"]
        suspect = folded or checked[-1]["content"].strip() not in rendered
        if suspect and self._drops(checked, role, template_arguments):
            raise BadConfig(
                f"the model's chat template leaves out what the {role} says; give the prompt as it is: --raw "
                "(raw=True)."
            )
        if folded:
            self._tell_of_folding()
        # The template writes the BOS token itself where the model wants one.
        return self._encode_plain(rendered)

    def token_text(self, token: int) -> str:
        """Text of one token inside a text: its leading space kept, special tokens by name."""
        anchor = self._encode_plain("a")[-1:]
        return self._decode([*anchor, int(token)], skip=False)[len(self._decode(anchor, skip=False)) :]

    def _encode_plain(self, text: str) -> list[int]:
        return list(self._wrapper.encode(text, add_special_tokens=False))

    def _decode(self, tokens: list[int], *, skip: bool) -> str:
        """skip: leave special tokens out."""
        return str(self._wrapper.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def _start_tokens(self, probe: str) -> list[int]:
        """Tokens the tokenizer puts before every text. Those it may put after it would end the prompt."""
        plain, full = self._encode_plain(probe), list(self._wrapper.encode(probe))
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start]
        return []

    def _try_to_render(
        self, messages: list[dict[str, str]], template_arguments: Mapping[str, Any]
    ) -> tuple[str | None, Exception | None]:
        """The conversation as text, or why there is none: a template is a program and may raise anything."""
        try:
            return str(self._wrapper.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **template_arguments
            )), None  # fmt: skip
        except Exception as error:
            return None, error

    def _drops(self, messages: list[dict[str, str]], role: str, template_arguments: Mapping[str, Any]) -> bool:
        """Whether a marker put in place of each text of `role` is missing from the rendered conversation."""
        marked, markers = [], []
        for index, message in enumerate(messages):
            if message["role"] == role:
                markers.append(f"sentinel{index}sentinel")
                message = {**message, "content": markers[-1]}
            marked.append(message)
        rendered, _ = self._try_to_render(marked, template_arguments)
        # None: the template looks into the text and wants the real one, which it did take.
        return rendered is not None and not all(marker in rendered for marker in markers)

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
            check_unicode(value, f"the {key} of message {index}")
    return [dict(message) for message in messages]


def check_unicode(text: str, name: str) -> None:
    """Raise BadConfig for half of a surrogate pair: such a text has no UTF-8 form, and so no tokens."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadConfig(
            f"{name} has {text[error.start]!r} at character {error.start}, half of a surrogate pair; decode it anew, "
            "or leave it out."
        ) from error


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
