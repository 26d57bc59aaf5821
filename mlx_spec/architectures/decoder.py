"""The decoder that Llama, Qwen2 and Qwen3 are variants of. Knows weights and shapes; keys and values go un-rotated to
the attention pass, which keeps them.

Parameter names are those of the checkpoints (and of mlx-lm), so mlx-lm loads and quantizes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.attention.attend import AttentionPass
from mlx_spec.attention.rotary import Rotary
from mlx_spec.errors import BadConfig

T = TypeVar("T", int, float)

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
"""Those whose angles are proportional to the position."""


@dataclass(frozen=True)
class DecoderArguments:
    """The shape of a decoder. Subclasses say how a checkpoint's configuration maps to it."""

    hidden_size: int
    layers: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rope_traditional: bool
    max_position: int | None
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


def common_arguments(config: dict[str, Any], **variant: Any) -> dict[str, Any]:
    """The arguments that every variant reads from the same keys of a checkpoint's configuration.

    Raises BadConfig for a missing or unusable value, or an unknown kind of rotary embedding.
    """
    heads = _number(config, "num_attention_heads", int)
    hidden_size = _number(config, "hidden_size", int)
    # transformers 5 writes the rotary settings into one nested dictionary.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("type") or rope.get("rope_type") or "default"  # in mlx-lm's order
    if kind not in ROPE_KINDS:
        raise BadConfig(f"rope type {kind!r} is not known; known are {', '.join(ROPE_KINDS)}.")
    nested_theta = _number(rope, "rope_theta", float, 10000.0)
    return {
        "hidden_size": hidden_size,
        "layers": _number(config, "num_hidden_layers", int),
        "intermediate_size": _number(config, "intermediate_size", int),
        "heads": heads,
        "kv_heads": _number(config, "num_key_value_heads", int, heads),
        "head_dim": _number(config, "head_dim", int, hidden_size // heads),
        "vocabulary_size": _number(config, "vocab_size", int),
        "norm_epsilon": _number(config, "rms_norm_eps", float),
        "rope_theta": _number(config, "rope_theta", float, nested_theta),
        "rope_scaling": None if kind == "default" else rope,
        "rope_traditional": bool(config.get("rope_traditional", False)),
        "max_position": config.get("max_position_embeddings"),
        "tied": bool(config.get("tie_word_embeddings", False)),
    } | variant


def _number(config: dict[str, Any], key: str, kind: Callable[[Any], T], default: T | None = None) -> T:
    """A positive number of the configuration. With a default it may be absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if key not in config:
        raise BadConfig(f"config.json has no {key!r}; download the model again.")
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return kind(value)
    raise BadConfig(f"{key!r} in config.json is {value!r}, which is no positive number; download the model again.")


class Attention(nn.Module):
    def __init__(self, arguments: DecoderArguments, layer: int) -> None:
        super().__init__()
        self._layer, self._heads, self._kv_heads = layer, arguments.heads, arguments.kv_heads
        size, head_dim = arguments.hidden_size, arguments.head_dim
        self._scale = head_dim**-0.5
        self.q_proj = nn.Linear(size, arguments.heads * head_dim, bias=arguments.qkv_bias)
        self.k_proj = nn.Linear(size, arguments.kv_heads * head_dim, bias=arguments.qkv_bias)
        self.v_proj = nn.Linear(size, arguments.kv_heads * head_dim, bias=arguments.qkv_bias)
        self.o_proj = nn.Linear(arguments.heads * head_dim, size, bias=arguments.output_bias)
        self._qk_norm = arguments.qk_norm
        if arguments.qk_norm:
            self.q_norm = nn.RMSNorm(head_dim, eps=arguments.norm_epsilon)
            self.k_norm = nn.RMSNorm(head_dim, eps=arguments.norm_epsilon)

    def __call__(self, x: mx.array, attention: AttentionPass) -> mx.array:
        queries, keys, values = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self._qk_norm:
            queries = self.q_norm(mx.unflatten(queries, -1, (self._heads, -1)))
            keys = self.k_norm(mx.unflatten(keys, -1, (self._kv_heads, -1)))
        output = attention.attend(
            self._layer,
            _by_head(queries, attention.batch, self._heads),
            _by_head(keys, attention.batch, self._kv_heads),
            _by_head(values, attention.batch, self._kv_heads),
            self._scale,
        )  # (batch, heads, n, head_dim)
        if 1 not in output.shape[1:3]:
            output = output.transpose(0, 2, 1, 3)
        return self.o_proj(output.reshape(x.shape[0], -1))


def _by_head(x: mx.array, batch: int, heads: int) -> mx.array:
    """(batch * n, heads * head_dim) -> (batch, heads, n, head_dim)."""
    n = x.shape[0] // batch
    if n == 1 or heads == 1:  # the same order in memory: no transposition to compute later
        return x.reshape(batch, heads, n, -1)
    return x.reshape(batch, n, heads, -1).transpose(0, 2, 1, 3)


class MLP(nn.Module):
    def __init__(self, arguments: DecoderArguments) -> None:
        super().__init__()
        size, inner, bias = arguments.hidden_size, arguments.intermediate_size, arguments.mlp_bias
        self.gate_proj = nn.Linear(size, inner, bias=bias)
        self.up_proj = nn.Linear(size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, size, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    def __init__(self, arguments: DecoderArguments, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(arguments, layer)
        self.mlp = MLP(arguments)
        self.input_layernorm = nn.RMSNorm(arguments.hidden_size, eps=arguments.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(arguments.hidden_size, eps=arguments.norm_epsilon)

    def __call__(self, x: mx.array, attention: AttentionPass) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, arguments: DecoderArguments) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arguments.vocabulary_size, arguments.hidden_size)
        self.layers = [Layer(arguments, layer) for layer in range(arguments.layers)]
        self.norm = nn.RMSNorm(arguments.hidden_size, eps=arguments.norm_epsilon)


class Decoder(nn.Module):
    """A decoder-only transformer. Hidden states and logits are two steps, so that nobody pays for rows they do not
    read."""

    def __init__(self, arguments: DecoderArguments) -> None:
        super().__init__()
        self.arguments = arguments
        self.model = Body(arguments)
        self.rotary = Rotary(_rope(arguments), arguments.head_dim)
        if not arguments.tied:
            self.lm_head = nn.Linear(arguments.hidden_size, arguments.vocabulary_size, bias=False)

    def hidden(self, tokens: mx.array, attention: AttentionPass) -> mx.array:
        """Tokens (batch * n,) int32, those of one sequence together -> hidden states before the last norm
        (batch * n, hidden_size)."""
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, attention)
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden states (..., hidden_size) -> logits (..., vocabulary_size)."""
        x = self.model.norm(hidden)
        return self.lm_head(x) if "lm_head" in self else self.model.embed_tokens.as_linear(x)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drop what a checkpoint stores beside the parameters; decide from it whether the head is its own."""
        has_head = any(name.startswith("lm_head.") for name in weights)
        if weights and not has_head and "lm_head" in self:
            self.pop("lm_head")
        tied = "lm_head" not in self
        return {
            name: weight
            for name, weight in weights.items()
            if "rotary_emb.inv_freq" not in name and not (tied and name.startswith("lm_head."))
        }


def _rope(arguments: DecoderArguments) -> nn.Module:
    """The rotary embedding of every layer."""
    try:
        return initialize_rope(
            arguments.head_dim,
            base=arguments.rope_theta,
            traditional=arguments.rope_traditional,
            scaling_config=arguments.rope_scaling,
            max_position_embeddings=arguments.max_position,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadConfig(
            f"rope_scaling in config.json is incomplete or wrong: {error}; download the model again."
        ) from error
