"""Llama 2 and 3.x, Mistral, SmolLM2 and what shares their form."""

from __future__ import annotations

from typing import Any

from mlx_spec.architectures.decoder import Decoder, DecoderArguments, common_arguments


class ModelArgs(DecoderArguments):
    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> ModelArgs:
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            **common_arguments(
                config,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                mlp_bias=bool(config.get("mlp_bias", False)),
            )
        )


class Model(Decoder):
    pass
