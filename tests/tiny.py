"""Small random models, built in the test."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from mlx_spec.architectures.definitions import model_classes
from mlx_spec.architectures.paged import PagedModel
from mlx_spec.decoding.engine import Decoding
from mlx_spec.decoding.schedule.schedule import FixedSchedule

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 40,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def randomise(module: Any, seed: int, scale: float = 0.3) -> Any:
    """Give every parameter random float32 values, norms around one."""
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    weights = []
    for name, value in tree_flatten(module.parameters()):
        noise = scale * mx.random.normal(value.shape, key=next(keys))
        weights.append((name, 1 + noise if "norm" in name else noise))
    module.update(tree_unflatten(weights))
    mx.eval(module.parameters())
    return module


def tiny_module(seed: int = 0, scale: float = 0.3, **changes: Any) -> Any:
    """A native decoder of CONFIG with `changes`."""
    config = CONFIG | changes
    model_class, arguments_class = model_classes(config)
    return randomise(model_class(arguments_class.from_dict(config)), seed, scale)


def tiny_model(seed: int = 0, scale: float = 0.3, **changes: Any) -> PagedModel:
    return PagedModel(tiny_module(seed, scale, **changes))


def fixed(decoding: Decoding, k: int) -> Decoding:
    """`decoding`, to draft k tokens per round from now on."""
    if decoding.drafting is not None:
        decoding.drafting.schedule = FixedSchedule(k)
    return decoding
