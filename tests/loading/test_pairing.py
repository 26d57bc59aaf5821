"""Which drafts are accepted: judged by ids and encodings, never by sizes."""

from __future__ import annotations

import pytest
from directories import SPECIAL, byte_level
from tokenizers import Tokenizer, models, processors

from mlx_spec.errors import IncompatiblePair
from mlx_spec.loading.pairing import compare_tokenizers


def compare(
    target: Tokenizer, draft: Tokenizer,
    target_vocabulary: dict[str, int] | None = None, draft_vocabulary: dict[str, int] | None = None,
) -> list[str]:
    def encode(tokenizer: Tokenizer, text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    return compare_tokenizers(
        "big", target_vocabulary or target.get_vocab(), lambda text: encode(target, text),
        "small", draft_vocabulary or draft.get_vocab(), lambda text: encode(draft, text),
    )


def large(**changes: int) -> dict[str, int]:
    """The tokenizer's vocabulary and 5000 tokens that no text has, with `changes` to string -> id."""
    return {**byte_level().get_vocab(), **{f"<rare {i}>": 1000 + i for i in range(5000)}, **changes}


def test_equal_tokenizers_pass_silently() -> None:
    assert compare(byte_level(), byte_level()) == []


def test_padding_of_either_side_passes_silently() -> None:
    padded = {**large(), **{f"[PAD{i}]": 6000 + i for i in range(300)}}
    assert compare(byte_level(), byte_level(), padded, large()) == []
    assert compare(byte_level(), byte_level(), large(), padded) == []


def test_equal_sizes_with_other_ids_are_refused_and_three_differences_named() -> None:
    other = byte_level((("l", "l"), ("h", "e"), ("Ġ", "t"), ("Ġt", "he")))
    assert other.get_vocab_size() == byte_level().get_vocab_size()
    with pytest.raises(IncompatiblePair) as caught:
        compare(byte_level(), other)
    message = str(caught.value)
    assert "\n" not in message
    assert "4 of 263 ids" in message
    assert "id 256 is 'he' in the target and 'll' in the draft (where 'he' is 257)" in message
    assert message.count("in the target and") == 3
    assert "mlx-spec models" in message


def test_equal_ids_with_other_merges_are_refused() -> None:
    vocabulary = byte_level().get_vocab()
    backend = byte_level()
    plain = {string: token for string, token in vocabulary.items() if string not in SPECIAL}
    backend.model = models.BPE(plain, [("l", "l"), ("Ġ", "t")])
    assert backend.get_vocab() == vocabulary
    with pytest.raises(IncompatiblePair, match="split the same text differently"):
        compare(byte_level(), backend)


def test_a_rare_difference_only_warns_and_names_the_token() -> None:
    draft = large()
    draft["<other>"] = draft.pop("<rare 7>")
    warnings = compare(byte_level(), byte_level(), large(), draft)
    assert len(warnings) == 1
    assert "'<rare 7>'" in warnings[0]
    assert "'<other>'" in warnings[0]
    assert "1 token" in warnings[0]


def test_tokens_that_one_side_was_given_later_warn() -> None:
    warnings = compare(byte_level(), byte_level(), large(**{"<think>": 9000, "</think>": 9001}), large())
    assert warnings == ["small does not know 2 tokens of the other model: '<think>', '</think>'. "
                        "Drafting stops short there."]


def test_a_string_under_another_free_id_is_a_difference() -> None:
    warnings = compare(byte_level(), byte_level(),
                       large(**{"<think>": 9000}), large(**{"<think>": 9500}))
    assert len(warnings) == 1
    assert "unknown in the target and '<think>' in the draft" in warnings[0]
    assert "(in the target, '<think>' is 9000)" in warnings[0]


def test_many_differences_are_refused() -> None:
    moved = {f"<rare {i}>": 1000 + (i + 1) % 5000 for i in range(5000)}
    with pytest.raises(IncompatiblePair, match="5000 of 5263"):
        compare(byte_level(), byte_level(), large(), large(**moved))


def test_no_id_in_common_is_refused() -> None:
    with pytest.raises(IncompatiblePair, match="no id in common"):
        compare(byte_level(), byte_level(), {"a": 0}, {"b": 1})


def test_a_start_token_on_one_side_only_does_not_matter() -> None:
    starting = byte_level()
    starting.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", starting.token_to_id("<s>"))])
    assert compare(starting, byte_level()) == []
    assert compare(byte_level(), starting) == []
