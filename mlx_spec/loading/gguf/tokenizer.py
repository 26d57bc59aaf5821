"""The tokenizer a GGUF file describes in its metadata, as mlx-lm's wrapper. Knows nothing of tensors.

A GGUF file holds a vocabulary, merges or scores, and the name of a pre-tokenizer, but not the rules that
name stands for; those are here. `transformers` has such a table too, but as internal code that gives a name
it does not know GPT-2's rules: ids would then be wrong in silence. Here an unknown name is an error.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_spec.errors import BadConfig
from mlx_spec.loading.gguf.config import ADVICE

# What tokenizer.ggml.token_type says of a token; 1 is a normal one.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6

# Besides the ids named in the metadata: what ends a turn in the chat formats of the architectures read here.
# Files written before GGUF had eot_token_id name only the end of a document.
_END_TEXTS = frozenset({"<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"})

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3_SPLIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}[\r\n]*|{_SPACE}"
_QWEN2_SPLIT = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}[\r\n]*|{_SPACE}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_SPLIT = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}|{_SYMBOLS}[\r\n/]*|{_SPACE}"
)

# tokenizer.ggml.pre -> how text is cut before merging.
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "llama-v3": _LLAMA3_SPLIT, "falcon3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT, "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
    "smollm": "digits", "gpt-2": "gpt-2", "default": "gpt-2",
}  # fmt: skip
# Tokenizers that take a whole word which is a token as it is, merges or not, and begin with BOS by default.
_WHOLE_WORDS_FIRST = (_LLAMA3_SPLIT, _TEKKEN_SPLIT)


def build_tokenizer(metadata: Mapping[str, Any], context_length: int) -> tuple[Any, list[int]]:
    """Metadata of a GGUF file -> (mlx-lm TokenizerWrapper, ids that end a generation, eos first).

    Raises BadConfig for a tokenizer kind or pre-tokenizer that is not known, and for broken metadata.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise BadConfig(f"The tokenizer kind of this GGUF file is {kind!r}; 'gpt2' (byte-level) and 'llama' "
                        f"(sentencepiece) can be read. {ADVICE}")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise BadConfig(f"This GGUF file has {len(tokens)} tokens and {len(types)} token types: it is broken. {ADVICE}")
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise BadConfig(f"tokenizer.chat_template is {template!r} in this GGUF file, not text. {ADVICE}")
    try:
        if kind == "gpt2":
            tokenizer, add_bos = _byte_level(metadata, tokens, types)
        else:
            tokenizer, add_bos = _sentencepiece(metadata, tokens, types)
        named = _named_tokens(metadata, len(tokens))
        _add_special_tokens(tokenizer, tokens, types, named)
        bos = named.get("bos")
        if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", add_bos):
            _begin_with(tokenizer, tokens[bos], bos)
        ends = [named[role] for role in ("eos", "eot", "eom") if role in named]
        ends += [i for i, text in enumerate(tokens) if types[i] == _CONTROL and text in _END_TEXTS]
        ends = list(dict.fromkeys(ends))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
            "model_max_length": context_length, "chat_template": template,
            **{f"{name}_token": tokens[named[role]] for name, role in
               {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items() if role in named},
        }  # fmt: skip
        return _wrap(tokenizer, settings, ends), ends
    except BadConfig:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = " ".join(str(error).split())
        raise BadConfig(f"The tokenizer in this GGUF file cannot be built: {reason}. {ADVICE}") from error


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[Any, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(name) if name is not None else None
    if split is None:
        raise BadConfig(f"The pre-tokenizer of this GGUF file (tokenizer.ggml.pre) is {name!r}; known are "
                        f"{', '.join(sorted(_SPLITS))}. {ADVICE}")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    # The converter fills ids up to the size of the embedding with [PAD<id>]: no text ever gives them.
    vocabulary = {text: i for i, text in enumerate(tokens) if types[i] != _UNUSED or text != f"[PAD{i}]"}
    whole_words = split in _WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    if split == _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    if split == "digits":
        cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)]
    else:
        cuts = [] if split == "gpt-2" else [pre_tokenizers.Split(Regex(split), "isolated")]
    own_regex = split in ("digits", "gpt-2")  # GPT-2's own split is built into ByteLevel
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_regex))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, whole_words


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[Any, bool]:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise BadConfig(f"This GGUF file has {len(tokens)} tokens and {len(scores)} scores: its "
                        f"sentencepiece vocabulary is broken. {ADVICE}")
    # Sentencepiece merges the neighbours that make the best-scoring token, so every way to cut a token in two
    # tokens is a merge, ranked by that token's score.
    normal = {text: i for i, text in enumerate(tokens) if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    merges = sorted(
        (-scores[i], normal[text[:cut]], normal[text[cut:]], text[:cut], text[cut:])
        for text, i in normal.items()
        for cut in range(1, len(text))
        if text[:cut] in normal and text[cut:] in normal
    )
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(models.BPE(
        vocab={text: i for i, text in enumerate(tokens)}, merges=[merge[-2:] for merge in merges],
        unk_token=None if unknown is None else tokens[unknown], fuse_unk=True, byte_fallback=True,
    ))  # fmt: skip
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, True


def _named_tokens(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    """Role ("bos", "eos", ...) -> id, of the roles the metadata names."""
    named = {}
    for role in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        token = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token is None or token == 2**32 - 1:  # how GGUF writes "none" in an unsigned field
            continue
        if not 0 <= token < count:
            raise BadConfig(f"tokenizer.ggml.{role}_token_id is {token}, but this GGUF file has {count} "
                            f"tokens: it is broken. {ADVICE}")
        named[role] = int(token)
    return named


def _add_special_tokens(
    tokenizer: Any, tokens: Sequence[str], types: Sequence[int], named: Mapping[str, int]
) -> None:
    from tokenizers import AddedToken

    # Files without token types still say which tokens begin and end a text.
    special = {named[role] for role in ("bos", "eos", "eot", "eom") if role in named}
    special |= {i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)}
    whole = [i for i, kind in enumerate(types) if kind == _USER_DEFINED and i not in special]
    for ids, is_special in ((sorted(special), True), (whole, False)):
        added = [AddedToken(tokens[i], special=is_special, normalized=False) for i in ids]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(added)


def _begin_with(tokenizer: Any, text: str, token: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{text} $A", pair=f"{text} $A {text} $B", special_tokens=[(text, token)]
    )


def _wrap(tokenizer: Any, settings: Mapping[str, Any], ends: Sequence[int]) -> Any:
    from mlx_lm.tokenizer_utils import load

    # mlx-lm finds the right streaming detokenizer by reading tokenizer.json, so it gets one.
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        tokenizer.save(str(directory / "tokenizer.json"))
        kept = {key: value for key, value in settings.items() if value is not None}
        (directory / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")
        return load(directory, eos_token_ids=list(ends))
