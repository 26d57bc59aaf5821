"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from mlx_spec.architectures.decoder import Decoder, DecoderArguments, common_arguments


class ModelArgs(DecoderArguments):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        return cls(**common_arguments(config, qkv_bias=True))


class Model(Decoder):
    pass
