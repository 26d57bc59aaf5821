"""Tiny model directories in the hub's layout, written by the test that needs them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tiny import CONFIG, tiny_module
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MERGES = (("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("l", "l"))
SPECIAL = ("<s>", "</s>", "<end>")


def byte_level(merges: Sequence[tuple[str, str]] = MERGES, special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Every byte, a few merges, special tokens at the end."""
    strings = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *dict.fromkeys(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({string: token for token, string in enumerate(strings)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(string, special=True) for string in special])
    return backend


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value), encoding="utf-8")


def write_tokenizer(directory: Path, tokenizer: Tokenizer | None = None, **config: Any) -> None:
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    standard = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    write_json(directory / "tokenizer_config.json", standard | config)


def write_weights(directory: Path, weights: dict[str, mx.array], shards: int = 1) -> None:
    """One file, or `shards` of them with an index."""
    if shards == 1:
        mx.save_safetensors(str(directory / "model.safetensors"), weights)
        return
    names, weight_map = sorted(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        mx.save_safetensors(str(directory / file), part)
        weight_map |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_model(
    directory: Path, *, shards: int = 1, dtype: mx.Dtype = mx.float32, bits: int | None = None, seed: int = 0,
    **changes: Any,
) -> Path:
    """A tiny decoder, quantized in groups of 32 if `bits` is given, with a byte-level tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    changes = {"vocab_size": 272, "eos_token_id": 261, **changes}
    module = tiny_module(seed, **changes)
    module.set_dtype(dtype)
    config = CONFIG | changes
    if bits:
        # Its layers are 48 wide in one place: those stay as they are.
        nn.quantize(module, group_size=32, bits=bits,
                    class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[-1] % 32 == 0)
        config["quantization"] = {"group_size": 32, "bits": bits}
    write_json(directory / "config.json", config)
    write_weights(directory, dict(tree_flatten(module.parameters())), shards)
    write_tokenizer(directory)
    return directory
