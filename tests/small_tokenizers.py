"""Tokenizers of small vocabularies, built in the test."""

from __future__ import annotations

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlx_spec.loading.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<|user|>"]


def wrapped(backend: Backend, chat_template: str | None = None) -> Tokenizer:
    backend.add_special_tokens([AddedToken(string, special=True) for string in SPECIAL])
    backend.add_tokens([AddedToken("<think>", special=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    return Tokenizer(TokenizerWrapper(fast))


def byte_level(chat_template: str | None = None) -> Tokenizer:
    """Every byte, a few merges, some of which cut characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("ð", "Ł"), ("â", "Ĥ"), ("a", "ð")]
    strings = alphabet + [left + right for left, right in merges]
    vocabulary = {string: token for token, string in enumerate(strings)}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return wrapped(backend, chat_template)


def sentencepiece(*, fused: bool, chat_template: str | None = None, ends: bool = False) -> Tokenizer:
    """Pieces with a leading ▁, and a token for each byte; adds a BOS token, and if `ends` an EOS token."""
    strings = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    strings += ["▁", "▁▁", "a", "▁a", "b", "▁the", "é", "\ufffd", ",", "▁日"]
    vocabulary = {string: token for token, string in enumerate(strings)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    if fused:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Backend.from_str(backend.to_str())
    tokenizer.add_special_tokens([AddedToken(string, special=True) for string in SPECIAL])
    start, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A", special_tokens=[("<s>", start), ("</s>", end)])
    return wrapped(tokenizer, chat_template)
