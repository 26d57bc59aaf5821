"""The tokenizer on small vocabularies built here: streaming, stop strings, chat templates."""

from __future__ import annotations

import codecs
import logging
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece, wrapped
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from mlx_spec.errors import BadConfig
from mlx_spec.llm.text_stream import StopScanner, TextStream
from mlx_spec.loading.tokenizer import Tokenizer

TOKENIZERS = {
    "byte level": byte_level(),
    "sentencepiece, fused": sentencepiece(fused=True),
    "sentencepiece, metaspace": sentencepiece(fused=False),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


codecs.register_error("each byte", lambda error: ("\ufffd" * (error.end - error.start), error.end))


def _expected(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """What `decode` gives where only the bytes of broken characters become U+FFFD, not the run they are in."""
    values = tokenizer._byte_values
    token_of = {value: token for token, value in values.items()}
    mended: list[int] = []
    for are_bytes, run in groupby((t for t in tokens if t not in tokenizer._skipped), values.__contains__):
        if are_bytes:
            text = bytes(values[token] for token in run).decode("utf-8", "each byte")
            mended += [token_of[value] for value in text.encode()]
        else:
            mended += run
    return tokenizer.decode(mended)


def _pieces(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*(stream.add(token) for token in tokens), stream.finish()]


@every_tokenizer
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_stream_equals_decode(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    any_token = st.integers(0, tokenizer.vocabulary_size - 1)
    # Few distinct tokens make long runs of the same awkward ones.
    few = data.draw(st.lists(any_token, min_size=1, max_size=5))
    tokens = data.draw(st.lists(st.one_of(any_token, st.sampled_from(few)), max_size=120))
    text = "".join(_pieces(TextStream(tokenizer), tokens))
    assert text == _expected(tokenizer, tokens)
    if "\ufffd" not in text:
        assert text == tokenizer.decode(tokens)


@every_tokenizer
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80))
def test_stream_never_cuts_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = text.replace("\ufffd", "")
    pieces = _pieces(TextStream(tokenizer), tokenizer._encode_plain(text))
    expected = tokenizer.decode(tokenizer._encode_plain(text))
    assert "".join(pieces) == expected
    if "\ufffd" not in expected:
        assert not any("\ufffd" in piece for piece in pieces)


@every_tokenizer
@pytest.mark.parametrize("kind", ["text", "same", "broken", "cut"])
def test_stream_costs_the_same_at_any_length(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS[name]
    vocabulary = tokenizer.vocabulary()
    byte = (lambda value: vocabulary[f"<0x{value:02X}>"]) if "<0x00>" in vocabulary else (
        lambda value: tokenizer._encode_plain(bytes([value]).decode("latin-1"))[-1] if value < 128
        else vocabulary[{0x80: "Ģ", 0xE4: "ä", 0xBD: "½"}[value]])
    tokens = {
        "text": tokenizer._encode_plain("the a, b the 日 " * 200),
        "same": [vocabulary["a"]] * 2000,
        "broken": [byte(0x80)] * 2000,
        "cut": [byte(0xE4), byte(0xBD)] * 1000,
    }[kind]
    expected = tokenizer.decode(tokens)
    decoded = 0
    original = Tokenizer.decode

    def counting(self: Tokenizer, some: list[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return original(self, some)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    assert "".join(_pieces(TextStream(tokenizer), tokens)) == expected
    assert decoded <= 25 * len(tokens)


def test_stream_gives_words_as_they_come() -> None:
    tokenizer = TOKENIZERS["byte level"]
    stream = TextStream(tokenizer)
    assert [stream.add(token) for token in tokenizer.encode(" the")] == [" the"]
    smile = [stream.add(token) for token in tokenizer.encode("b😀b")]
    assert smile == ["b", "", "", "😀", "b"]


@pytest.mark.parametrize("fused", [True, False])
def test_stream_gives_the_characters_of_byte_tokens_as_they_come(fused: bool) -> None:
    tokenizer = sentencepiece(fused=fused)
    vocabulary = tokenizer.vocabulary()
    stream = TextStream(tokenizer)
    values = ["▁a", 0x0A, 0x0A, *"é".encode(), *"😀".encode(), 0xE4, 0x0A, 0xFF, 0x0A, "b"]
    tokens = [vocabulary[value if isinstance(value, str) else f"<0x{value:02X}>"] for value in values]
    given = ["a", "\n", "\n", "", "é", "", "", "", "😀", "", "\ufffd\n", "\ufffd", "\n", "b"]
    assert [stream.add(token) for token in tokens] == given


def test_strings_like_byte_tokens_may_be_no_bytes() -> None:
    strings = sorted({*pre_tokenizers.ByteLevel.alphabet(), *(f"<0x{byte:02X}>" for byte in range(256))})
    backend = Backend(models.BPE({string: token for token, string in enumerate(strings)}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = wrapped(backend)
    tokens = [tokenizer.vocabulary()[string] for string in ("<0xE4>", "<0x41>", "a")]
    assert _pieces(TextStream(tokenizer), tokens) == ["<0xE4>", "<0x41>", "a", ""]


def _naive(text: str, stop: list[str]) -> tuple[str, bool]:
    for end in range(1, len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(max_examples=1000, deadline=None)
@given(pieces=st.lists(st.text("abc", max_size=6), max_size=12),
       stop=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
def test_stop_scanner_equals_naive_search(pieces: list[str], stop: list[str]) -> None:
    scanner = StopScanner(stop)
    shown, stopped = "", False
    for piece in pieces:
        part, stopped = scanner.add(piece)
        shown += part
        if stopped:
            break
    shown += scanner.finish()
    assert (shown, stopped) == _naive("".join(pieces), stop)


def test_stop_scanner_holds_back_no_more_than_needed() -> None:
    scanner = StopScanner(["</end>", "</e"])
    assert scanner.add("x<") == ("x", False)
    assert scanner.add("/") == ("", False)
    assert scanner.add("p") == ("</p", False)
    assert scanner.add("y</e") == ("y", True)
    assert scanner.add("more") == ("", True)
    assert scanner.finish() == ""


@pytest.mark.parametrize("stop", [["a", "ab"], ["ab", "a"]])
def test_stop_string_that_begins_another_wins(stop: list[str]) -> None:
    assert StopScanner(stop).add("xaby") == ("x", True)


@pytest.mark.parametrize("stop", [None, 5, [3], [b"x"]])
def test_what_is_no_stop_string_is_refused(stop: Any) -> None:
    with pytest.raises(BadConfig, match="stop"):
        StopScanner(stop)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadConfig, match="''"):
        StopScanner(["x", ""])


def test_sizes_and_specials() -> None:
    tokenizer = TOKENIZERS["byte level"]
    vocabulary = tokenizer.vocabulary()
    assert tokenizer.vocabulary_size == max(vocabulary.values()) + 1
    assert tokenizer.end_tokens == {vocabulary["</s>"]}
    assert tokenizer.decode([vocabulary["<s>"], vocabulary["he"], vocabulary["<think>"]]) == "he<think>"
    assert tokenizer.token_text(vocabulary["</s>"]) == "</s>"
    assert tokenizer.token_text(vocabulary["Ġthe"]) == " the"
    assert TOKENIZERS["sentencepiece, fused"].token_text(
        TOKENIZERS["sentencepiece, fused"].vocabulary()["▁a"]) == " a"


@pytest.mark.parametrize("ends", [False, True])
def test_encode_adds_one_start_token_and_no_end_token(ends: bool) -> None:
    tokenizer = sentencepiece(fused=False, ends=ends)
    vocabulary = tokenizer.vocabulary()
    assert tokenizer.encode("a")[0] == vocabulary["<s>"]
    assert tokenizer.encode("a").count(vocabulary["</s>"]) == 0
    assert tokenizer.encode("<s>a").count(vocabulary["<s>"]) == 1
    assert tokenizer.encode("") == [vocabulary["<s>"]]


PLAIN = ("{{ bos_token }}{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}\n{% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}")
REFUSES = ("{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No system role') }}"
           "{% endif %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
DROPS = ("{% for m in messages %}{% if m.role != 'system' %}{{ m.role }}:{{ m.content }}\n{% endif %}"
         "{% endfor %}")
RAISES = "{{ raise_exception('Conversation roles must alternate') }}"
IGNORES = "Hello!"
ARGUMENT = "{% for m in messages %}{{ m.content }}{% endfor %}{% if shout %}!{% endif %}"


def _all(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return tokenizer._decode(tokens, skip=False)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_chat_adds_the_generation_prompt_and_one_start_token() -> None:
    tokenizer = sentencepiece(fused=True, chat_template=PLAIN)
    tokens = tokenizer.chat([_message("user", "a")])
    assert tokens.count(tokenizer.vocabulary()["<s>"]) == 1
    assert _all(tokenizer, tokens).endswith("assistant:")


def test_chat_hands_arguments_to_the_template() -> None:
    tokenizer = byte_level(ARGUMENT)
    assert _all(tokenizer, tokenizer.chat([_message("user", "hi")], shout=True)) == "hi!"


@pytest.mark.parametrize("template", [REFUSES, DROPS])
def test_chat_folds_the_system_text_and_says_so_once(template: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level(template)
    messages = [_message("system", "be brief"), _message("user", "hi"), _message("assistant", "yo")]
    with caplog.at_level(logging.WARNING, "mlx_spec"):
        text = _all(tokenizer, tokenizer.chat(messages))
        tokenizer.chat(messages)
    assert text == "user:be brief\n\nhi\nassistant:yo\n"
    assert [record.message for record in caplog.records if "no system role" in record.message] == [
        "the model's chat template has no system role: the system text opens the user turn"]


def test_chat_folds_a_system_text_without_user_turn_after_it() -> None:
    tokenizer = byte_level(DROPS)
    assert _all(tokenizer, tokenizer.chat([_message("system", "s")])) == "user:s\n"


def test_chat_keeps_the_system_turn_where_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_level(PLAIN)
    text = _all(tokenizer, tokenizer.chat([_message("system", "s"), _message("user", "u")]))
    assert "system:s\n" in text
    assert not caplog.records


@pytest.mark.parametrize("roles", [("user",), ("system", "user")])
def test_a_template_that_raises_is_one_line_with_a_way_out(roles: tuple[str, ...]) -> None:
    tokenizer = byte_level(RAISES)
    with pytest.raises(BadConfig, match=r"Conversation roles must alternate.*--raw") as caught:
        tokenizer.chat([_message(role, "x") for role in roles])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("system",), ("user", "assistant")])
def test_a_template_that_leaves_the_messages_out(roles: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadConfig, match=r"leaves out what the (user|assistant) says; .*--raw"):
        byte_level(IGNORES).chat([_message(role, "How are you?") for role in roles])
    assert not caplog.records


def test_a_template_may_change_how_a_text_is_written() -> None:
    tokenizer = byte_level("{% for m in messages %}{{ m.content | replace('\n', ' ') | trim }}{% endfor %}")
    assert _all(tokenizer, tokenizer.chat([_message("user", " a\nb\n")])) == "a b"


def test_chat_without_template_is_refused() -> None:
    with pytest.raises(BadConfig, match="leave --system out"):
        byte_level().chat([_message("system", "s"), _message("user", "x")])


def test_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"the text has '.ud800' at character 1"):
        byte_level().encode("a\ud800b")
    with pytest.raises(BadConfig, match=r"the content of message 0 has '.udcff' at character 0"):
        byte_level(PLAIN).chat([_message("user", "\udcff")])


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "", "content": "x"}], ["text"],
                                      [{"role": "user", "content": ["parts"]}], [{"content": "x"}]])
def test_malformed_messages_are_refused(messages: list[Any]) -> None:
    with pytest.raises(BadConfig, match=r"message"):
        byte_level(PLAIN).chat(messages)
