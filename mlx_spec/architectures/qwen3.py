"""Qwen3: queries and keys normalised per head."""

from __future__ import annotations

from typing import Any

from mlx_spec.architectures.decoder import Decoder, DecoderArguments, common_arguments


class ModelArgs(DecoderArguments):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        bias = bool(config.get("attention_bias", False))
        return cls(**common_arguments(config, qkv_bias=bias, output_bias=bias, qk_norm=True))


class Model(Decoder):
    pass
